"""What a scheduler inside an engine makes of a step."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.stepmodel import OnlineStepModel, StepCoefficients, StepLoad
from proxy.core.stepplan import (
    Deadline,
    Decode,
    EngineState,
    Order,
    Prompt,
    Rad,
    Slai,
    StepPlan,
    StepPolicy,
    admissible,
)

NOW = 100.0
TRUTH = OnlineStepModel(StepCoefficients(0.01, 1e-4, 1e-4, 0.0, 0.0, 0.0))


def taught() -> OnlineStepModel:
    """A model that has seen steps of 10 ms, and .1 ms more for each token."""
    model = OnlineStepModel(StepCoefficients(0.01, 1e-4, 1e-4, 0.0, 0.0, 0.0))
    for n in range(64):
        load = StepLoad(50 * (n % 10), n % 7, 0)
        model.observe(load, TRUTH.predict(load))
    return model


def decodes(*due_in: float, context: int = 100) -> list[Decode]:
    return [Decode(f"d{n}", NOW + seconds, context) for n, seconds in enumerate(due_in)]


def prompt(name: str, remaining: int, *, waited: float = 0.0, computed: int = 0, rank: int = 0) -> Prompt:
    return Prompt(name, remaining, computed, NOW - waited, rank)


def state(
    running: list[Decode] | None = None,
    waiting: list[Prompt] | None = None,
    *,
    begun: list[Prompt] | None = None,
    budget: int = 512,
    slots: int = 100,
    free_tokens: int = 1_000_000,
    kv_usage: float = 0.0,
    mean_step: float = 0.02,
    ahead: int = 0,
) -> EngineState:
    return EngineState(
        NOW, budget, running or [], begun or [], waiting or [], slots, free_tokens, kv_usage, mean_step, ahead
    )


class TestSlai:
    def test_prompts_go_shortest_first(self) -> None:
        plan = Slai(Order(None)).plan(state(waiting=[prompt("a", 300), prompt("b", 100), prompt("c", 200)]))
        assert plan.order == ["b", "c", "a"]

    def test_without_prompts_nobody_waits(self) -> None:
        assert not Slai().plan(state(decodes(5, 5, 5))).held

    def test_decodes_wait_for_prompts_up_to_their_last_schedulable_time(self) -> None:
        """Five mean steps before the deadline (eq. 8); the rest of the budget goes to whoever is due next."""
        running = decodes(0.09, 0.11, 0.5, 0.4)
        plan = Slai().plan(state(running, [prompt("a", 510)]))
        assert plan.held == {"d2", "d3"}  # one critical, 510 for the prompt, one left
        assert plan.token_budget == 512

    def test_a_nearly_full_cache_makes_more_of_them_critical(self) -> None:
        running = decodes(0.15, 0.25)
        long = [prompt("a", 5000)]
        assert Slai().plan(state(running, long)).held == {"d0", "d1"}
        assert Slai().plan(state(running, long, kv_usage=0.97)).held == {"d1"}

    def test_steps_composed_ahead_count_as_gone(self) -> None:
        running = decodes(0.11)
        assert Slai().plan(state(running, [prompt("a", 5000)])).held
        assert not Slai().plan(state(running, [prompt("a", 5000)], ahead=1)).held

    @pytest.mark.parametrize("lacks", [{"slots": 0}, {"free_tokens": 4999}])
    def test_nobody_waits_for_a_prompt_that_cannot_enter(self, lacks: dict[str, int]) -> None:
        assert not Slai().plan(state(decodes(5.0), [prompt("a", 5000)], **lacks)).held  # type: ignore[arg-type]


class TestRad:
    def test_full_tiles_of_the_oldest_prompts_while_sequences_may_join(self) -> None:
        waiting = [prompt("young", 10, waited=1), prompt("old", 5000, waited=2)]
        plan = Rad(256, 4).plan(state(decodes(9, 9, 9), waiting))
        assert plan == StepPlan(256, frozenset({"d0", "d1", "d2"}), ["old", "young"])

    def test_decodes_alone_when_a_tile_of_them_is_there(self) -> None:
        plan = Rad(256, 3).plan(state(decodes(9, 9, 9), [prompt("a", 500)], begun=[prompt("b", 9)]))
        assert (set(plan.held), plan.admits, plan.token_budget) == ({"b"}, False, 512)

    def test_decodes_alone_when_no_prompt_can_enter(self) -> None:
        assert not Rad().plan(state(decodes(9), [prompt("a", 500)], free_tokens=499)).admits


class TestDeadline:
    def test_a_step_is_as_long_as_the_tightest_deadline_allows(self) -> None:
        policy = Deadline(taught())
        for due_in in (0.05, 0.04, 0.03):
            running = decodes(due_in, 0.06)
            plan = policy.plan(state(running, [prompt("a", 5000)], budget=8192))
            tokens = plan.token_budget - len(running)
            step = StepLoad(tokens, len(running), 200, 0.0, 1)
            assert due_in * 0.9 < TRUTH.predict(step) <= due_in

    def test_without_decodes_there_is_no_deadline(self) -> None:
        assert Deadline(taught()).plan(state(waiting=[prompt("a", 5000)], budget=8192)).token_budget == 8192

    def test_prompts_go_on_however_late_a_decode_is(self) -> None:
        plan = Deadline(taught()).plan(state(decodes(-1.0), [prompt("a", 5000)]))
        assert plan.token_budget == 1 + 128

    def test_a_model_that_knows_little_is_not_relied_on(self) -> None:
        plan = Deadline(OnlineStepModel()).plan(state(decodes(5.0, 5.0), [prompt("a", 5000)], budget=8192))
        assert plan.token_budget == 2 + 256
        assert not plan.held

    def test_decodes_with_time_to_spare_wait_where_that_wins_something(self) -> None:
        running = decodes(0.04, *[3.0] * 60)
        plan = Deadline(taught()).plan(state(running, [prompt("a", 5000)], budget=8192))
        assert plan.held == {d.id for d in running[1:]}
        alone = Deadline(taught()).plan(state(running[:1], [prompt("a", 5000)], budget=8192))
        assert plan.token_budget == alone.token_budget

    def test_decodes_do_not_wait_for_less_than_a_twentieth(self) -> None:
        running = decodes(0.08, *[3.0] * 5)
        assert not Deadline(taught()).plan(state(running, [prompt("a", 5000)], budget=8192)).held

    def test_decodes_do_not_wait_where_the_cache_is_full(self) -> None:
        running = decodes(0.04, *[3.0] * 60)
        assert not Deadline(taught()).plan(state(running, [prompt("a", 5000)], budget=8192, kv_usage=0.95)).held

    def test_only_as_many_wait_as_prompts_have_use_for(self) -> None:
        running = decodes(*[3.0] * 400)
        plan = Deadline(taught()).plan(state(running, [prompt("a", 200)]))
        assert len(plan.held) == 88  # 200 of the prompt and 312 others are 512
        assert plan.token_budget == 512

    def test_a_shorter_prompt_passes_one_half_way(self) -> None:
        begun = [prompt("long", 5000, computed=3000)]
        plan = Deadline(taught()).plan(state(begun=begun, waiting=[prompt("short", 500)]))
        assert plan.held == {"long"}
        plan = Deadline(taught()).plan(state(begun=begun, waiting=[prompt("short", 112)]))
        assert (plan.held, plan.chunk_tokens) == (frozenset(), 400)

    def test_a_longer_one_does_not(self) -> None:
        plan = Deadline(taught()).plan(state(begun=[prompt("a", 300)], waiting=[prompt("b", 400)]))
        assert (plan.held, plan.chunk_tokens) == (frozenset(), 0)

    def test_of_those_half_way_one_goes_on(self) -> None:
        begun = [prompt("a", 900), prompt("b", 600), prompt("c", 700)]
        assert Deadline(taught()).plan(state(begun=begun)).held == {"a", "c"}


class TestOrder:
    def test_nobody_is_passed_over_for_ever(self) -> None:
        """Whoever comes later than aging times the logarithm of one's length cannot overtake."""
        old = prompt("old", 4000, waited=10.0 * 8.3)  # ln 4000 = 8.29
        assert Order(10.0)(old) < Order(10.0)(prompt("new", 1))
        assert Order(None)(old) > Order(None)(prompt("new", 3999))

    def test_the_engines_priorities_go_before_lengths(self) -> None:
        assert Order()(prompt("a", 4000, rank=-1)) < Order()(prompt("b", 1))


POLICIES: list[Callable[[], StepPolicy]] = [Slai, Rad, lambda: Deadline(taught()), lambda: Deadline(OnlineStepModel())]

DECODES = st.lists(
    st.builds(
        lambda due, context, tokens: (due, context, tokens), st.floats(-1, 10), st.integers(1, 9000), st.integers(1, 4)
    ),
    max_size=40,
)
PROMPTS = st.lists(
    st.tuples(st.integers(1, 9000), st.integers(0, 9000), st.floats(0, 1000), st.integers(-1, 1)), max_size=20
)


@pytest.mark.parametrize("make", POLICIES)
@given(
    DECODES,
    PROMPTS,
    PROMPTS,
    st.integers(1, 9000),
    st.integers(0, 9),
    st.integers(0, 20_000),
    st.floats(0, 1),
    st.integers(0, 1),
)
def test_every_plan_can_be_carried_out_and_gets_on(  # noqa: PLR0917 - hypothesis gives them by position
    make: Callable[[], StepPolicy],
    running: list[tuple[float, int, int]],
    begun: list[tuple[int, int, float, int]],
    waiting: list[tuple[int, int, float, int]],
    budget: int,
    slots: int,
    free_tokens: int,
    kv_usage: float,
    ahead: int,
) -> None:
    """No plan names anybody who is not there, asks for more than a step holds, or leaves an engine idle with work."""
    given_state = state(
        [Decode(f"d{n}", NOW + due, context, tokens) for n, (due, context, tokens) in enumerate(running)],
        [prompt(f"w{n}", r, computed=c, waited=w, rank=k) for n, (r, c, w, k) in enumerate(waiting)],
        begun=[prompt(f"b{n}", r, computed=c, waited=w, rank=k) for n, (r, c, w, k) in enumerate(begun)],
        budget=budget,
        slots=slots,
        free_tokens=free_tokens,
        kv_usage=kv_usage,
        ahead=ahead,
    )
    plan = make().plan(given_state)
    assert 1 <= plan.token_budget <= budget
    assert plan.order is None or sorted(plan.order) == sorted(p.id for p in given_state.waiting)
    assert plan.held <= {d.id for d in given_state.decodes} | {p.id for p in given_state.begun}
    entering = (
        admissible(
            given_state,
            sorted(given_state.waiting, key=lambda p: (plan.order or []).index(p.id))
            if plan.order
            else given_state.waiting,
        )
        if plan.admits
        else []
    )
    can_run = {d.id for d in given_state.decodes} | {p.id for p in given_state.begun} | {p.id for p in entering}
    if given_state.decodes or given_state.begun or entering:
        assert can_run - plan.held, "the engine has work and would do nothing"


@given(st.lists(st.floats(0.02, 1.0), min_size=1, max_size=30), st.integers(100, 9000))
def test_a_deadline_that_can_be_kept_is_kept(due_in: list[float], length: int) -> None:
    """By the model's own prediction, whoever runs and whoever waits has its token in time."""
    model = taught()
    running = decodes(*due_in)
    plan = Deadline(model).plan(state(running, [prompt("a", length)], budget=8192))
    run = [d for d in running if d.id not in plan.held]
    tokens = min(length, plan.token_budget - len(run))
    seconds = model.predict(StepLoad(tokens, len(run), 100 * len(run), 0.0, 1))
    if tokens > 128:
        assert all(NOW + seconds <= d.due_at + 1e-9 for d in run)
    for d in running:
        if d.id in plan.held:
            assert NOW + 2 * seconds <= d.due_at + 1e-9


def carried_out(plan: StepPlan, given_state: EngineState) -> tuple[StepLoad, set[str]]:
    """What vLLM makes of a plan where prompts half-way were admitted before all decodes; and which decodes run."""
    left, prompt_tokens, attention, prompts = plan.token_budget, 0, 0.0, 0
    run = []
    by_id = {p.id: p for p in given_state.waiting}
    entering = admissible(given_state, [by_id[name] for name in plan.order or ()])
    for p in [*given_state.begun, None, *entering]:
        if p is None:
            run = [d for d in given_state.decodes if d.id not in plan.held][:left]
            left -= len(run)
        elif p.id not in plan.held and (tokens := min(p.remaining, plan.chunk_tokens or p.remaining, left)):
            left -= tokens
            prompt_tokens += tokens
            attention += tokens * (p.computed + tokens / 2)
            prompts += 1
    load = StepLoad(prompt_tokens, len(run), sum(d.context for d in run), attention, prompts)
    return load, {d.id for d in run}


@pytest.mark.parametrize("attention", [5e-9, 2.5e-7], ids=["little", "most"])
@given(
    st.lists(st.floats(0.1, 1.0), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), max_size=4),
    st.lists(st.integers(1, 3000), max_size=4),
)
def test_deadlines_are_kept_in_the_engines_order_where_late_tokens_cost_more(
    attention: float, due_in: list[float], begun: list[tuple[int, int]], waiting: list[int]
) -> None:
    """As vLLM goes: prompts half-way first, in order of admission, with all that the step holds."""
    model = OnlineStepModel(StepCoefficients(0.01, 5e-5, 4e-4, 1e-7, attention, 0.0))
    for n in range(64):
        load = StepLoad(50 * (n % 10), n % 7, 700 * (n % 7), 3e4 * (n % 10), n % 10 > 0)
        model.observe(load, model.predict(load))
    given_state = state(
        decodes(*due_in, context=500),
        [prompt(f"w{n}", remaining) for n, remaining in enumerate(waiting)],
        begun=[prompt(f"b{n}", remaining, computed=computed) for n, (remaining, computed) in enumerate(begun)],
        budget=8192,
    )
    plan = Deadline(model).plan(given_state)
    load, run = carried_out(plan, given_state)
    assert run == {d.id for d in given_state.decodes} - plan.held, "no prompt takes the share of a decode"
    if load.prefill_tokens > 128:
        assert NOW + model.predict(load) <= min(d.due_at for d in given_state.decodes) + 1e-9
    # The step after this one takes some of the prompts as well, however late everybody is.
    some = StepLoad(128, len(due_in), 500 * len(due_in), 128 * 64.0, 1)
    over = NOW + model.predict(load) + model.predict(some)
    assert all(over <= d.due_at for d in given_state.decodes if d.id in plan.held)
