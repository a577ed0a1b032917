import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sim.profiles import PROFILES, read_profile, write_profile

NAMES = sorted(PROFILES)


def prefill_seconds(name: str, prompt_tokens: int) -> float:
    """A step with nothing but one whole prompt in it."""
    return PROFILES[name].step.seconds(
        prefill_tokens=prompt_tokens, sequences=1, decodes=0, kv_tokens=0, attention=prompt_tokens**2 / 2
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "milliseconds"),
    [(64, 22.6), (128, 24.1), (256, 29.9), (384, 44.0), (512, 53.0), (768, 75.9), (1024, 100.8)],
)
def test_prefill_steps_of_the_papers_gpu_are_within_six_percent_of_its_measurements(
    prompt_tokens: int, milliseconds: float
) -> None:
    assert prefill_seconds("rtx6000ada", prompt_tokens) * 1000 == pytest.approx(milliseconds, rel=0.06)


def test_512_tokens_are_the_largest_power_of_two_whose_mixed_steps_stay_below_100_ms() -> None:
    """What ``EngineConfig.token_budget`` says of itself, for a full batch of 128 decodes of 1,500 tokens each."""

    def seconds(token_budget: int) -> float:
        return PROFILES["rtx6000ada"].step.seconds(
            prefill_tokens=token_budget - 128, sequences=129, decodes=128, kv_tokens=128 * 1500, attention=0
        )

    assert seconds(512) < 0.1 < seconds(1024)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    base=st.tuples(
        st.integers(0, 8192), st.integers(0, 256), st.integers(0, 256), st.integers(0, 400_000), st.floats(0, 4e7)
    ),
    more=st.integers(1, 4096),
    which=st.integers(0, 4),
)
def test_more_of_anything_never_takes_less_time(
    name: str, base: tuple[int, int, int, int, float], more: int, which: int
) -> None:
    def seconds(values: tuple[float, ...]) -> float:
        prefill, sequences, decodes, kv, attention = values
        return PROFILES[name].step.seconds(
            prefill_tokens=int(prefill),
            sequences=int(sequences),
            decodes=int(decodes),
            kv_tokens=int(kv),
            attention=attention,
        )

    larger = tuple(v + (more if i == which else 0) for i, v in enumerate(base))
    assert 0 < seconds(base) <= seconds(larger)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_found_by_its_own_name_and_says_where_it_comes_from(name: str) -> None:
    profile = PROFILES[name]
    assert profile.name == name
    assert profile.source
    assert profile.kv_tokens >= 8192 * 16, "a batch of the trace's longest requests fits"


def test_a_newer_gpu_prefills_faster() -> None:
    assert prefill_seconds("h100", 2048) < prefill_seconds("a100", 2048) < prefill_seconds("rtx6000ada", 2048)


def test_a_prompt_in_a_step_may_have_a_cost_of_its_own() -> None:
    plain = PROFILES["rtx6000ada"].step
    costly = replace(plain, host_per_prompt=3.0)

    def more(prompts: int, decodes: int) -> float:
        load = {
            "prefill_tokens": 500,
            "sequences": prompts + decodes,
            "decodes": decodes,
            "kv_tokens": 0,
            "attention": 0,
        }
        return costly.seconds(**load) - plain.seconds(**load)

    assert more(2, 7) == pytest.approx(0.006)
    assert more(0, 7) == 0


def test_a_profile_from_before_prompts_had_a_cost_can_still_be_read() -> None:
    document = json.loads(write_profile(PROFILES["h100"]))
    del document["step"]["host_per_prompt"]
    assert read_profile(json.dumps(document)).step == PROFILES["h100"].step
