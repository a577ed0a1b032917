import json

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_upstream import request_at

from loadgen.content import FIRST_ID, IDS, as_json, as_numbers, prompt_ids
from proxy.sim.workload import ScheduledRequest

KIND = request_at(0.0).request_class


def ids(nonce: int = 1, *, prompt: int = 64, seed: int = 7, **more: object) -> list[int]:
    return as_numbers(prompt_ids(ScheduledRequest(0, 0.0, prompt, 2, KIND, seed, **more), nonce))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**48))
def test_prompts_have_exactly_the_length_asked_for_and_plain_ids(prompt: int, seed: int) -> None:
    request = ScheduledRequest(0, 0.0, prompt, 2, KIND, seed)
    found = prompt_ids(request, 3)
    assert len(found) == prompt
    assert json.loads(as_json(found)) == as_numbers(found)
    assert all(FIRST_ID <= n < FIRST_ID + IDS for n in as_numbers(found))


def test_a_prompt_is_the_same_in_every_process_and_new_in_every_run() -> None:
    assert ids()[:4] == [2926, 2134, 1197, 2256]
    assert ids() == ids()
    assert ids(1)[:16] != ids(2)[:16] != ids(1, seed=8)[:16]


def test_of_one_seed_the_longer_prompt_begins_with_the_shorter() -> None:
    assert ids(prompt=100)[:40] == ids(prompt=40)


def test_blocks_of_one_name_are_the_same_text_wherever_they_stand() -> None:
    first = ids(prompt=40, blocks=(1, 2, 3), block_tokens=16)
    second = ids(prompt=50, seed=8, blocks=(9, 2), block_tokens=16)
    assert len(first) == 40
    assert len(second) == 50
    assert first[16:32] == second[16:32]
    assert first[:16] != second[:16]
    assert second[32:] == ids(prompt=18, seed=8)  # its own
    assert ids(2, prompt=40, blocks=(1, 2, 3), block_tokens=16) != first


def test_a_shared_prefix_is_followed_by_what_is_its_own() -> None:
    first, second = (ids(seed=seed, prefix="0:1", prefix_tokens=30) for seed in (7, 8))
    assert first[:30] == second[:30]
    assert first[30:46] != second[30:46]
    assert ids(seed=7, prefix="0:2", prefix_tokens=30)[:30] != first[:30]
