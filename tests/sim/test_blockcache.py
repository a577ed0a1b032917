"""``proxy.sim.blockcache`` inside an engine: what a prompt finds, and that no block is lost or held twice."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.blockcache import BlockCache
from proxy.sim.engine import EngineConfig, SimulatedEngine
from proxy.sim.profiles import Profile, StepModel

BLOCK = 16
STEP = StepModel(1, 0, 0, 0, 1, 0, 0, 0)


def make_engine(blocks: int = 64, **config: Any) -> SimulatedEngine:
    profile = Profile("test", STEP, blocks * BLOCK, "every step takes as long")
    return SimulatedEngine(EngineConfig(profile, **config), cache=BlockCache)


def hashes(*blocks: int) -> tuple[bytes, ...]:
    """Each block's hash says all that is before it."""
    return tuple(bytes(blocks[: n + 1]) for n in range(len(blocks)))


def prompt(engine: SimulatedEngine, name: str, *blocks: int, more: int = 1, output: int = 1) -> None:
    """Add a prompt of these blocks and ``more`` tokens after them."""
    engine.add(name, len(blocks) * BLOCK + more, output, hashes=hashes(*blocks))


def run(engine: SimulatedEngine) -> dict[str, int]:
    """Run until nothing is left; return what each prompt found when it was taken in first."""
    found: dict[str, int] = {}
    while engine.start_step() is not None:
        for name in engine.step_admitted:
            found.setdefault(name, engine.cached_tokens(name))
        engine.finish_step()
    return found


def test_blocks_are_found_while_their_sequence_runs() -> None:
    engine = make_engine()
    prompt(engine, "a", 1, 2, 3, output=5)
    assert engine.start_step() is not None
    engine.finish_step()
    prompt(engine, "b", 1, 2, 9)
    assert run(engine) == {"b": 2 * BLOCK}


def test_a_prompt_of_the_same_step_is_found() -> None:
    engine = make_engine()
    prompt(engine, "a", 1, 2, 3)
    prompt(engine, "b", 1, 2, 3)
    assert run(engine) == {"a": 0, "b": 3 * BLOCK}


def test_what_was_not_computed_is_not_found() -> None:
    engine = make_engine(token_budget=2 * BLOCK, max_num_seqs=8)
    prompt(engine, "a", 1, 2, 3, 4)
    assert engine.start_step() is not None
    engine.finish_step()
    engine.abort("a")
    prompt(engine, "b", 1, 2, 3, 4)
    assert run(engine) == {"b": 2 * BLOCK}


def test_the_end_of_what_was_used_longest_ago_makes_room_first() -> None:
    engine = make_engine(blocks=8)
    for name, blocks in (("a", (1, 2, 3)), ("b", (4, 5, 6)), ("c", (7, 8, 9))):
        prompt(engine, name, *blocks, more=BLOCK - 1)  # fills four blocks with its output
        run(engine)
    prompt(engine, "b again", 4, 5, 6)
    assert run(engine) == {"b again": 3 * BLOCK}
    prompt(engine, "a again", 1, 2, 3)
    assert run(engine) == {"a again": BLOCK}


@settings(deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(1, 2), max_size=6), st.integers(1, BLOCK), st.integers(1, 40)), max_size=12
    ),
    blocks=st.integers(12, 30),
    aborted=st.sets(st.integers(0, 11)),
)
def test_no_block_is_lost_and_none_is_found_that_was_not_there(
    prompts: list[tuple[list[int], int, int]], blocks: int, aborted: set[int]
) -> None:
    engine = make_engine(blocks=blocks, token_budget=40, max_num_seqs=8)
    known: list[set[bytes]] = []
    taken_in: set[str] = set()
    for number, (content, more, output) in enumerate(prompts):
        prompt(engine, str(number), *content, more=more, output=output)
        known.append(set(hashes(*content)))
        if engine.start_step() is not None:
            for name in set(engine.step_admitted) - taken_in:
                own = prompts[int(name)]
                cached = engine.cached_tokens(name)
                assert cached % BLOCK == 0
                assert cached < len(own[0]) * BLOCK + own[1]
                assert set(hashes(*own[0])[: cached // BLOCK]) <= set().union(*known[: int(name)])
            taken_in.update(engine.step_admitted)
            if number in aborted:
                engine.abort(str(number // 2))
            engine.finish_step()
    run(engine)
    kv = engine._kv
    assert isinstance(kv, BlockCache)
    assert kv.free == kv.blocks
    assert not kv._held
    assert kv.cached == len(kv._idle) <= kv.free
    assert set(kv._idle) <= set().union(*known)
