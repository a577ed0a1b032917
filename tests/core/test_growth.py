"""Output lengths and what they say about the KV cache to come."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.growth import HORIZONS, GrowthModel, KvForecast, KvOutlook, OutputLengths, Sequence, bucket_of

quick = settings(max_examples=100, derandomize=True, database=None, deadline=None)
lengths = st.lists(st.integers(1, 20_000), min_size=100, max_size=400)


def learnt(*tokens: int, times: int = 1, pooled: OutputLengths | None = None) -> OutputLengths:
    found = OutputLengths(pooled)
    for length in tokens * times:
        found.learn(length)
    return found


def true_survival(tokens: list[int], longer_than: float) -> float:
    return sum(length > longer_than for length in tokens) / len(tokens)


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30))
@quick
def test_buckets_are_in_the_order_of_lengths_and_half_an_octave_wide(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert 0 <= bucket_of(low) <= bucket_of(high) < 48
    if low >= 4 and high < 1.3 * low:
        assert bucket_of(high) - bucket_of(low) <= 1


@given(lengths)
@quick
def test_survival_falls_from_one_and_never_to_zero(tokens: list[int]) -> None:
    kind = learnt(*tokens)
    values = [kind.survival(x) for x in (0, 1, 2, 3, 7, 8, 9, 100, 1000, 4096, 20_000, 1e6)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0


def test_survival_is_what_was_seen() -> None:
    random = Random(1)
    tokens = [1 + int(random.expovariate(1 / 200)) for _ in range(2000)]
    kind = learnt(*tokens)
    for x in (0, 5, 20, 50, 100, 200, 400, 800):
        assert kind.survival(x) == pytest.approx(true_survival(tokens, x), abs=0.03)


def test_a_row_is_conditional_on_what_has_been_produced() -> None:
    """Half of all answers have 20 tokens, the others 1000: who has come to 100 is one of the long ones."""
    kind = learnt(20, 1000, times=500)
    at_64 = HORIZONS.index(64)
    assert kind.row(bucket_of(0))[at_64] == pytest.approx(0.5, abs=0.02)
    assert kind.row(bucket_of(100))[at_64] == pytest.approx(1.0, abs=0.02)
    assert kind.row(bucket_of(0))[0] == 1.0


def test_an_answer_longer_than_any_before_is_taken_to_be_half_way() -> None:
    kind = learnt(50, times=300)
    at = HORIZONS.index(4096)
    assert kind.row(bucket_of(4096))[at] == pytest.approx(0.5, abs=0.1)


def test_old_lengths_fade() -> None:
    kind = learnt(2000, times=3000)
    for _ in range(10_000):
        kind.learn(10)
    assert kind.survival(100) < 0.02


def test_a_kind_that_is_seldom_seen_is_taken_for_usual_until_it_tells_more() -> None:
    model = GrowthModel()
    usual, seldom = model.of("m", "relaxed"), model.of("m", "strict")
    assert not seldom.learnt
    for _ in range(200):
        usual.learn(100)
    assert seldom.learnt
    assert seldom.survival(50) == pytest.approx(usual.survival(50), abs=0.02)
    for _ in range(400):
        seldom.learn(1000)
    assert seldom.survival(500) > 0.9
    assert usual.survival(500) < 0.1


def test_kinds_are_bounded_since_clients_name_them() -> None:
    model = GrowthModel()
    kinds = {id(model.of(f"model-{n}", "relaxed")) for n in range(10_000)}
    assert len(kinds) <= 257
    assert model.of("model-9999", "relaxed") is model.pooled
    assert model.of("model-0", "relaxed") is not model.pooled


@pytest.mark.parametrize("tokens", [0, -3])
def test_an_answer_without_tokens_teaches_nothing(tokens: int) -> None:
    kind = learnt(100, times=10)
    before = kind.survival(50), repr(kind)
    kind.learn(tokens)
    assert (kind.survival(50), repr(kind)) == before


# -- forecasts --


def peak(sequences: list[Sequence], prompt: int, kind: OutputLengths) -> float:
    return KvForecast(sequences).peak(prompt, kind)


def test_the_peak_of_answers_of_one_length_is_their_end() -> None:
    """All have 1024 tokens to come, or nearly: nobody frees anything before."""
    kind = learnt(1024, times=5000)
    found = peak([(100, 0, kind, None)] * 10, 100, kind)
    assert 11 * (100 + 512) < found < 11 * (100 + 1024) * 1.1


def test_long_prompts_with_short_answers_need_hardly_more_than_they_hold() -> None:
    kind = learnt(*range(1, 101), times=20)
    held = 200 * 3000
    assert held + 3000 <= peak([(3000, 30, kind, None)] * 200, 3000, kind) < 1.03 * (held + 3000)


def test_what_clients_allow_bounds_the_growth() -> None:
    kind = learnt(4000, times=500)
    free = peak([(100, 0, kind, None)] * 10, 1, kind)
    capped = peak([(100, 0, kind, 64)] * 10, 1, kind)
    assert free > 10 * 2000
    assert capped < 10 * (100 + 64) + 4000 * 1.2


def test_chance_is_allowed_for_and_weighs_less_the_more_there_are() -> None:
    kind = learnt(*[20, 1000] * 300)
    few, many = (peak([(500, 0, kind, None)] * n, 500, kind) / n for n in (4, 400))
    assert few > 1.1 * many


@given(
    lengths,
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3000), st.sampled_from([None, 5, 700])), max_size=30),
    st.integers(1, 8000),
)
@quick
def test_a_peak_is_at_least_what_is_held_and_adding_later_is_as_counting_at_once(
    tokens: list[int], given_to: list[tuple[int, int, int | None]], prompt: int
) -> None:
    kind = learnt(*tokens)
    sequences: list[Sequence] = [(context, produced, kind, most) for context, produced, most in given_to]
    at_once, later = KvForecast(sequences), KvForecast(sequences[::2])
    for sequence in sequences[1::2]:
        later.add(sequence)
    assert later.sequences == at_once.sequences == len(sequences)
    assert later.peak(prompt, kind) == pytest.approx(at_once.peak(prompt, kind))
    assert at_once.peak(prompt, kind) >= (prompt + sum(s[0] for s in sequences)) * (1 - 1e-9)
    assert at_once.peak(prompt + 10, kind) >= at_once.peak(prompt, kind)


def test_the_forecast_holds_in_a_simulation_of_ends_by_chance() -> None:
    """Sequences at random points of their answers: what they hold later stays within the peak nearly always."""
    random = Random(3)
    kind = learnt(*[1 + int(random.expovariate(1 / 300)) for _ in range(3000)])
    exceeded, spare = 0, []
    for _ in range(200):
        sequences = [(random.randint(20, 400), kind) for _ in range(60)]
        bound = peak([(context, 0, kind, None) for context, _ in sequences], 200, kind)
        left = [(context, 1 + int(random.expovariate(1 / 300))) for context, _ in [*sequences, (200, kind)]]
        highest = max(sum(c + h for c, end in left if end > h) for h in range(0, 1500, 5))
        exceeded += highest > bound
        spare.append(bound / highest - 1)
    assert exceeded <= 0.1 * 200
    assert sum(spare) / len(spare) < 0.3, "nor is it out of proportion"


# -- the outlook: when a forecast is made anew --


class Engine:
    """Sequences with ``grown`` tokens of their answers each; counts how often an outlook asks for them."""

    def __init__(self, kind: OutputLengths, sequences: int) -> None:
        self.kind = kind
        self.outlook = KvOutlook()
        self.grown = 10
        self.asked = 0
        for n in range(sequences):
            self.outlook.add(f"s{n}", 1000, kind, None)

    def contexts(self) -> dict[str, int]:
        self.asked += 1
        return {f"s{n}": 1000 + self.grown for n in range(100)}

    def fits(self, prompt: int, room: float, step: int) -> bool:
        return self.outlook.fits(prompt, self.kind, room, step, self.contexts)


def test_a_full_engine_is_not_looked_at_again_before_something_ends() -> None:
    engine = Engine(learnt(*range(1, 101), times=20), 50)
    assert not [step for step in range(40) if engine.fits(1000, 50_500, step)]
    assert engine.asked == 1
    for n in range(5):
        engine.outlook.end(f"s{n}", 1050)
    assert engine.fits(1000, 50_500, 40)
    assert engine.asked == 2


def test_a_full_engine_is_looked_at_again_after_some_time() -> None:
    engine = Engine(learnt(*range(1, 101), times=20), 50)
    assert not [step for step in range(64) if engine.fits(1000, 50_500, step)]
    assert engine.asked == 1
    engine.fits(1000, 50_500, 64)
    assert engine.asked == 2


def test_what_is_released_counts_at_once_and_so_does_what_has_grown() -> None:
    engine = Engine(learnt(*range(1, 101), times=20), 10)
    needed = peak([(1010, 10, engine.kind, None)] * 10, 1000, engine.kind)
    assert engine.fits(1000, needed + 100, 0)
    engine.outlook.add("another", 1000, engine.kind, None)
    assert not engine.fits(1000, needed + 100, 0)
    assert not engine.fits(1000, needed + 900, 0)
    assert engine.fits(1000, needed + 1200, 0)
    engine.grown += 50
    assert not engine.fits(1000, needed + 1200, 50), "each of them has 50 more tokens"


def test_an_end_teaches_the_length_of_the_answer_and_leaves_nothing() -> None:
    kind, outlook = OutputLengths(), KvOutlook()
    for n in range(150):
        outlook.add(f"s{n}", 700, kind, None)
        outlook.end(f"s{n}", 750)
        outlook.end(f"s{n}", 9999)
    assert len(outlook) == 0
    assert kind.survival(30) > 0.9 > kind.survival(70)
