import random
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.stepmodel import PRIOR, OnlineStepModel, StepCoefficients, StepErrors, StepLoad

TRUTH = StepCoefficients(0.0105, 7.0e-5, 4e-5, 1.37e-7, 3e-9, 8e-4)


def duration(load: StepLoad, of: StepCoefficients = TRUTH) -> float:
    return (
        of.fixed
        + of.per_prefill_token * load.prefill_tokens
        + of.per_decode * load.decodes
        + of.per_kv_token * load.kv_tokens
        + of.per_attention * load.attention
        + of.per_prefill * load.prefills
    )


def random_load(rng: random.Random) -> StepLoad:
    """A step with no or a full share of prompt tokens, as the ones that can be told apart are."""
    decodes = rng.randrange(1, 128)
    tokens = rng.choice([0, 512 - decodes])
    attention = float(tokens * rng.randrange(256, 6000))
    prefills = rng.randrange(1, 6) if tokens else 0
    return StepLoad(tokens, decodes, decodes * rng.randrange(200, 3000), attention, prefills)


def trained(steps: int, *, noise: float = 0.0, hiccups: float = 0.0, seed: int = 0) -> OnlineStepModel:
    rng = random.Random(seed)
    model = OnlineStepModel()
    for _ in range(steps):
        load = random_load(rng)
        late = rng.expovariate(1 / noise) if noise else 0.0
        late += rng.uniform(0.005, 0.03) if rng.random() < hiccups else 0.0
        model.observe(load, duration(load) + late)
    return model


def worst_error(model: OnlineStepModel, truth: StepCoefficients = TRUTH) -> float:
    rng = random.Random(99)
    return max(abs(model.predict(load) - duration(load, truth)) for load in (random_load(rng) for _ in range(500)))


def test_before_any_step_the_prior_is_believed() -> None:
    model = OnlineStepModel(TRUTH)
    assert worst_error(model) < 1e-12
    assert vars_of(OnlineStepModel().coefficients) == pytest.approx(vars_of(PRIOR))
    assert not model.trusted


def test_steps_without_noise_are_learnt_exactly() -> None:
    assert worst_error(trained(2000)) < 0.0005


def test_jitter_and_hiccups_of_the_host_shift_predictions_by_no_more_than_their_usual_size() -> None:
    model = trained(3000, noise=0.0007, hiccups=0.01)
    assert worst_error(model) < 0.0025


def test_a_model_is_trusted_after_some_hundred_steps() -> None:
    assert not trained(199).trusted
    assert trained(200).trusted


def test_one_late_step_moves_nothing() -> None:
    model, load = trained(1000), StepLoad(0, 10, 10_000)
    before = model.predict(load)
    model.observe(load, 5.0)
    for _ in range(7):
        model.observe(load, before)
    assert abs(model.predict(load) - before) < 0.0005


def test_what_each_slice_costs_is_told_from_what_its_tokens_cost() -> None:
    model = trained(2000)
    one, eight = StepLoad(400, 20, 20_000, 1e5, 1), StepLoad(400, 20, 20_000, 1e5, 8)
    assert model.predict(eight) - model.predict(one) == pytest.approx(7 * TRUTH.per_prefill, rel=0.1)


def test_a_changed_engine_is_learnt_anew() -> None:
    model = trained(2000)
    slower = StepCoefficients(0.03, 1.5e-4, 1e-4, 2e-7, 5e-9, 2e-3)
    rng = random.Random(5)
    for _ in range(6000):
        load = random_load(rng)
        model.observe(load, duration(load, slower))
    assert worst_error(model, slower) < 0.003


@pytest.mark.parametrize("seconds", [0.004, 0.06])
def test_the_first_step_says_what_steps_like_it_take(seconds: float) -> None:
    """On engines several times as fast or slow as the prior."""
    model, load = OnlineStepModel(), StepLoad(0, 4, 8000)
    assert abs(model.predict(load) - seconds) > 0.5 * seconds
    for _ in range(2):
        model.observe(load, seconds)
    assert model.predict(load) == pytest.approx(seconds, rel=0.4)
    for _ in range(4):
        model.observe(load, seconds)
    assert model.predict(load) == pytest.approx(seconds, rel=0.2)


def test_one_pause_of_a_second_hardly_matters() -> None:
    model = trained(1000)
    before = worst_error(model)
    model.observe(StepLoad(0, 10, 10_000), 1.0)
    for _ in range(8):
        model.observe(StepLoad(0, 10, 10_000), duration(StepLoad(0, 10, 10_000)))
    assert worst_error(model) < before + 0.001


def test_the_error_percentile_covers_about_that_share_of_the_steps() -> None:
    model = trained(8000, noise=0.001)
    rng = random.Random(7)
    longer = 0
    for _ in range(2000):
        load = random_load(rng)
        seconds = duration(load) + rng.expovariate(1000.0)
        longer += seconds > model.predict(load) + model.margin_seconds(load)
        model.observe(load, seconds)
    assert 0.02 < longer / 2000 < 0.09


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("offset", [0, 4000])
def test_the_prompt_tokens_within_a_time_are_the_most_that_keep_it(seconds: float, offset: int) -> None:
    model = trained(500)
    for base in (StepLoad(0, 0, 0), StepLoad(100, 40, 60_000, 5e4), StepLoad(0, 128, 200_000)):
        tokens = model.prefill_tokens_within(seconds, base, offset)
        assert tokens >= 0
        if tokens:
            assert model.predict(with_tokens(base, tokens, offset)) <= seconds + 1e-9
        assert model.predict(with_tokens(base, tokens + 1, offset)) > seconds


def with_tokens(base: StepLoad, tokens: int, offset: int) -> StepLoad:
    attention = base.attention + tokens * (offset + tokens / 2)
    tokens += base.prefill_tokens
    return base._replace(prefill_tokens=tokens, attention=attention, prefills=base.prefills + 1)


def test_no_prompt_token_fits_where_the_decodes_alone_take_too_long() -> None:
    assert OnlineStepModel().prefill_tokens_within(0.001, StepLoad(0, 1, 1), 0) == 0
    assert OnlineStepModel().prefill_tokens_within(-1.0, StepLoad(0, 1, 1), 0) == 0


def test_where_prompt_tokens_seem_to_cost_nothing_any_number_fits() -> None:
    model = OnlineStepModel(StepCoefficients(0.01, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert model.prefill_tokens_within(0.1, StepLoad(0, 10, 1000), 0) > 1_000_000


@pytest.mark.parametrize("pause", [5.0, 60.0])
def test_a_pause_of_the_host_does_not_stretch_what_counts_as_usual(pause: float) -> None:
    model, load = trained(1000), StepLoad(0, 10, 10_000)
    before = model.predict(load)
    model.observe(load, pause)
    for _ in range(120):
        model.observe(load, duration(load))
    assert abs(model.predict(load) - before) < 0.0005


def test_the_error_of_a_good_fit_is_known_by_the_time_it_is_trusted() -> None:
    model = trained(500, noise=0.0007)
    assert model.prompt_errors.p95 < 0.05
    assert model.decode_errors.p95 < 0.1


def test_steps_with_prompts_may_be_few_long_and_noisy() -> None:
    """As on a slow engine, between many short and steady steps of decodes; the prior is far from it."""
    rng = random.Random(11)
    model = OnlineStepModel()

    def step_with_prompt() -> tuple[StepLoad, float]:
        tokens, offset = rng.randrange(100, 1000), rng.randrange(2000)
        load = StepLoad(tokens, rng.randrange(1, 12), 5000, tokens * (offset + tokens / 2), 1)
        exact = 0.015 + 3.5e-4 * tokens + 1e-3 * load.decodes + 8e-8 * load.attention
        return load, exact * rng.uniform(0.9, 1.15)

    for n in range(1000):
        if n % 10:
            model.observe(StepLoad(0, n % 8 + 1, 5000), 0.015 + 1e-3 * (n % 8 + 1) + rng.expovariate(1000))
        else:
            model.observe(*step_with_prompt())
    seen = [step_with_prompt() for _ in range(300)]
    bias = sum(seconds / model.predict(load) for load, seconds in seen) / 300
    assert bias == pytest.approx(1.0, abs=0.05)
    later = sum(seconds > model.predict(load) + model.margin_seconds(load) for load, seconds in seen)
    assert later <= 300 * 0.1
    assert model.decode_errors.p95 < 0.3


loads = st.builds(
    StepLoad,
    st.integers(0, 16_384),
    st.integers(0, 1024),
    st.integers(0, 2_000_000),
    st.floats(0, 1e9),
    st.integers(0, 50),
)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(loads, st.floats(1e-6, 30.0)), min_size=8, max_size=80), loads, loads)
def test_whatever_was_seen_more_work_never_looks_shorter(
    observed: list[tuple[StepLoad, float]], load: StepLoad, more: StepLoad
) -> None:
    model = OnlineStepModel()
    for content, seconds in observed:
        model.observe(content, seconds)
    assert all(isfinite(c) and c >= 0 for c in vars_of(model.coefficients))
    larger = StepLoad(*(a + b for a, b in zip(load, more, strict=True)))  # type: ignore[arg-type]
    assert 0 <= model.predict(load) <= model.predict(larger)
    assert model.prompt_errors.p95 >= 0
    assert model.decode_errors.p95 >= 0
    assert model.prefill_tokens_within(0.1, load, 1000) >= 0


def vars_of(c: StepCoefficients) -> tuple[float, ...]:
    return c.fixed, c.per_prefill_token, c.per_decode, c.per_kv_token, c.per_attention, c.per_prefill


class TestSnapshot:
    def test_a_restart_begins_with_what_was_learnt(self) -> None:
        learnt = trained(3000, noise=0.0005)
        warm = OnlineStepModel()
        cold_error = worst_error(warm)
        warm.restore(learnt.snapshot())
        assert worst_error(warm) < worst_error(learnt) + 0.002 < cold_error / 5
        assert warm.trusted
        assert warm.prompt_errors.figures() == learnt.prompt_errors.figures()
        assert warm.decode_errors.figures() == learnt.decode_errors.figures()
        assert warm.prompt_errors.p95 < OnlineStepModel().prompt_errors.p95

    def test_what_was_learnt_of_another_engine_is_soon_forgotten(self) -> None:
        """As after a change of the hardware behind the same limits: half as fast as it was."""
        slower = StepCoefficients(0.021, 1.4e-4, 8e-5, 2.7e-7, 6e-9, 1.6e-3)
        misled, fresh = OnlineStepModel(), OnlineStepModel()
        misled.restore(trained(20_000).snapshot())
        rng = random.Random(5)
        for _ in range(400):
            load = random_load(rng)
            for model in (misled, fresh):
                model.observe(load, duration(load, slower))
        assert worst_error(misled, slower) < 0.01
        assert worst_error(misled, slower) < worst_error(fresh, slower) + 0.008

    def test_a_model_that_has_seen_nothing_stays_at_its_prior(self) -> None:
        model = OnlineStepModel()
        model.restore(OnlineStepModel().snapshot())
        assert model.coefficients == pytest.approx(PRIOR)
        assert not model.trusted

    def test_few_steps_are_not_trusted_more_for_being_restored(self) -> None:
        model = OnlineStepModel()
        model.restore(trained(50).snapshot())
        assert not model.trusted
        assert model.snapshot().steps == 50

    def test_what_an_earlier_run_saw_counts_for_trust_and_not_as_steps_seen(self) -> None:
        model = OnlineStepModel()
        model.restore(trained(150).snapshot())
        assert (model.steps, model.trusted) == (0, False)
        for _ in range(50):
            model.observe(StepLoad(0, 10, 10_000), 0.03)
        assert (model.steps, model.trusted) == (50, True)
        assert model.snapshot().steps == 200

    def test_restoring_again_and_again_adds_no_weight(self) -> None:
        model = trained(5000)
        for _ in range(5):
            again = OnlineStepModel()
            again.restore(model.snapshot())
            model = again
        assert model.snapshot().gram[0] <= 20
        assert worst_error(model) < 0.002


def test_what_a_young_model_was_wrong_by_says_nothing_of_a_grown_one() -> None:
    """One of its first mistakes would be the 99th percentile of the next hundred steps."""
    slow = StepCoefficients(0.006, 2e-4, 5e-4, 1e-7, 2e-9, 3e-3)
    rng, model = random.Random(1), OnlineStepModel()
    for n in range(80):
        tokens = rng.randrange(100, 1000)
        load = StepLoad(tokens, 5, 5000, tokens * tokens / 2, 1)
        if n == 0:
            assert duration(load, slow) > 1.5 * model.predict(load)
        model.observe(load, duration(load, slow))
    assert model.prompt_errors.p99 < 0.05


def test_the_later_half_of_the_errors_counts_and_no_more_than_256() -> None:
    errors = StepErrors()
    for n in range(1, 2001):
        errors.add(float(n), 1.0)
        errors.judge()
        oldest = max(n // 2 + 1, n - 255)
        assert errors.mean == pytest.approx((oldest + n) / 2)


def test_how_much_sooner_a_step_may_end_is_told_by_those_that_ended_sooner() -> None:
    model, load = trained(1000), StepLoad(400, 10, 10_000, 0.0, 1)
    for n in range(640):
        seconds = model.predict(load)
        model.observe(load, seconds * (0.7 if n % 10 == 0 else 1.05 if n % 10 == 1 else 1.0))
    assert model.earliness_seconds(load) == pytest.approx(0.3 * model.predict(load), rel=0.15)
    assert model.margin_seconds(load) < 0.1 * model.predict(load)
