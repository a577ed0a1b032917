"""Estimates of prompt lengths: what they learn from, how fast, and what they do not believe."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.promptsize import PRIOR, PromptSize, PromptSizes, RateFit, TokenRates

TRACES = Path(__file__).parents[3] / "shared" / "traces"

statistical = settings(deadline=None, max_examples=50, derandomize=True, database=None)

Prompt = tuple[PromptSize, int]
"""A prompt's size and its true length in tokens."""


def drawn(rates: TokenRates, count: int, seed: int, *, spread: float = 0.15, other: float = 0.3) -> list[Prompt]:
    """Prompts of a model with these rates; a share ``other`` of them is not English."""
    rng = Random(seed)
    prompts = []
    for _ in range(count):
        length = int(10 ** rng.uniform(1.5, 4.5))
        beyond = int(length * rng.uniform(0.5, 1)) if rng.random() < other else 0
        size = PromptSize(ascii_bytes=length - beyond, other_bytes=beyond, messages=rng.choice([0, 1, 2, 5, 20]))
        tokens = size.ascii_bytes * rates.per_ascii_byte + size.other_bytes * rates.per_other_byte
        noisy = tokens * max(0.4, rng.gauss(1, spread)) + size.messages * rates.per_message
        prompts.append((size, max(1, round(noisy))))
    return prompts


def errors(prompts: list[Prompt], estimate: Callable[[PromptSize], int]) -> list[float]:
    return [abs(estimate(size) - tokens) / tokens for size, tokens in prompts]


def learnt(prompts: list[Prompt]) -> RateFit:
    fit = RateFit()
    for size, tokens in prompts:
        fit.learn(size, tokens)
    return fit


def four_bytes_a_token(size: PromptSize) -> int:
    """The rule without anything learnt."""
    return max(1, -(-size.text_bytes // 4))


# What counts.


def test_before_anything_is_known_four_bytes_are_a_token() -> None:
    sizes = PromptSizes()
    assert sizes.tokens("m", PromptSize(ascii_bytes=398)) == 100
    assert sizes.tokens("m", PromptSize(other_bytes=400)) == 100
    assert sizes.tokens("m", PromptSize(ascii_bytes=400, messages=3)) == 112
    assert sizes.tokens("m", PromptSize(ascii_bytes=400, json_bytes=400, parts=2)) == 200 + 2 * 256
    assert sizes.tokens("m", PromptSize()) == 1


@given(st.integers(1, 10**6), st.integers(0, 50))
def test_token_ids_are_exact_whatever_was_learnt(ids: int, seed: int) -> None:
    sizes = PromptSizes()
    for size, tokens in drawn(TokenRates(0.9, 0.9, 100.0), 20, seed):
        sizes.learn("m", size, tokens)
    assert sizes.tokens("m", PromptSize(token_ids=ids)) == ids
    assert sizes.tokens("m", PromptSize(token_ids=ids, ascii_bytes=400)) > ids


@pytest.mark.parametrize(
    "size",
    [
        PromptSize(token_ids=100),
        PromptSize(token_ids=100, ascii_bytes=400),
        PromptSize(ascii_bytes=400, json_bytes=1),
        PromptSize(ascii_bytes=400, parts=1),
        PromptSize(json_bytes=400),
        PromptSize(messages=1),
        PromptSize(),
    ],
)
def test_what_is_not_only_text_teaches_nothing(size: PromptSize) -> None:
    sizes = PromptSizes()
    sizes.learn("m", size, 300)
    assert len(sizes) == 0


@pytest.mark.parametrize("tokens", [0, -5, 10, 4_000, 10**9])
def test_a_count_that_cannot_be_true_teaches_nothing(tokens: int) -> None:
    fit = RateFit()
    fit.learn(PromptSize(ascii_bytes=2_000), tokens)
    assert (fit.rates, fit.reports) == (PRIOR, 0)


# How fast, and how well.

true_rates = st.builds(TokenRates, st.floats(0.12, 0.6), st.floats(0.12, 0.8), st.floats(0, 30))


@statistical
@given(true_rates, st.integers(0, 1000))
def test_some_tens_of_requests_are_enough(rates: TokenRates, seed: int) -> None:
    fit = learnt(drawn(rates, 60, seed))
    found = fmean(errors(drawn(rates, 200, seed + 5000), fit.rates.tokens))
    unavoidable = fmean(errors(drawn(rates, 200, seed + 5000), rates.tokens))
    assert found < unavoidable + 0.1


@statistical
@given(true_rates, st.integers(0, 1000))
def test_it_says_how_far_off_it_is(rates: TokenRates, seed: int) -> None:
    prompts = drawn(rates, 300, seed)
    fit, seen = RateFit(), list[float]()
    for size, tokens in prompts:
        seen += errors([(size, tokens)], fit.rates.tokens)
        fit.learn(size, tokens)
    assert fit.reports == len(prompts)
    assert fit.error == pytest.approx(fmean(seen[-50:]), abs=0.06)


def test_a_model_that_changes_under_its_name_is_learnt_anew() -> None:
    fit = learnt(drawn(TokenRates(0.25, 0.25, 4), 1000, 1) + drawn(TokenRates(0.5, 0.6, 10), 600, 2))
    assert fit.rates.per_ascii_byte == pytest.approx(0.5, rel=0.1)
    assert fit.rates.per_other_byte == pytest.approx(0.6, rel=0.15)


def test_what_is_known_of_a_script_outlasts_traffic_without_it() -> None:
    rates = TokenRates(0.2, 0.6, 8)
    before = learnt(drawn(rates, 100, 1)).rates.per_other_byte
    after = learnt(drawn(rates, 100, 1) + drawn(rates, 5000, 2, other=0)).rates.per_other_byte
    assert before == pytest.approx(0.6, rel=0.1)
    assert after == pytest.approx(before, rel=0.05)


# What it does not believe.


@statistical
@given(st.integers(0, 1000), st.integers(50, 100_000), st.floats(0.04, 0.99))
def test_one_odd_report_moves_little(seed: int, length: int, share: float) -> None:
    """Something else in the prompt than we saw, a truncated one, or a lie."""
    fit = learnt(drawn(TokenRates(0.25, 0.3, 5), 200, seed))
    before = fit.rates
    fit.learn(PromptSize(ascii_bytes=length), max(1, int(length * share)))
    assert fit.rates.per_ascii_byte == pytest.approx(before.per_ascii_byte, rel=0.1)
    assert fit.rates.per_other_byte == pytest.approx(before.per_other_byte, rel=0.1)
    assert fit.rates.per_message == pytest.approx(before.per_message, abs=2)


def test_one_report_in_ten_may_be_wrong() -> None:
    rng, rates = Random(5), TokenRates(0.2, 0.3, 5)
    fit = learnt([(s, rng.randint(1, 3 * s.text_bytes) if rng.random() < 0.1 else n) for s, n in drawn(rates, 400, 3)])
    assert fmean(errors(drawn(rates, 200, 4), fit.rates.tokens)) < 0.2


counts = st.one_of(st.integers(0, 50), st.integers(0, 5_000_000))
any_sizes = st.builds(PromptSize, st.just(0), counts, counts, st.just(0), st.integers(0, 500))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(any_sizes, st.floats(0, 1.2)), max_size=60))
def test_rates_stay_within_reason_whatever_is_reported(reports: list[tuple[PromptSize, float]]) -> None:
    fit = RateFit()
    for size, share in reports:
        fit.learn(size, int(share * size.text_bytes))
        ascii_rate, other_rate, message_rate = fit.rates
        assert 1 / 16 <= ascii_rate <= 1
        assert 1 / 16 <= other_rate <= 1
        assert 0 <= message_rate <= 512
        assert all(fit._covariance[i] > 0 for i in (0, 3, 5)), "the variances"
        assert 0 <= fit.error <= 1


# Models.


def test_models_are_told_apart() -> None:
    sizes = PromptSizes()
    for size, tokens in drawn(TokenRates(0.5, 0.5, 4), 50, 1):
        sizes.learn("a", size, tokens)
    text = PromptSize(ascii_bytes=10_000)
    assert sizes.tokens("a", text) > 4_500
    assert sizes.tokens("b", text) == 2_500
    assert [model for model, _ in sizes] == ["a"]


def test_the_models_used_longest_ago_are_forgotten() -> None:
    sizes = PromptSizes(max_models=3)
    text = PromptSize(ascii_bytes=1000)
    for number in range(50):
        sizes.learn(f"m{number}", text, 500)
        sizes.learn("kept", text, 500)
        assert len(sizes) <= 3
    assert [model for model, _ in sizes] == ["m48", "m49", "kept"]


def test_asking_for_a_model_that_nobody_knows_keeps_nothing() -> None:
    sizes = PromptSizes()
    for number in range(100):
        sizes.tokens(f"m{number}", PromptSize(ascii_bytes=10))
    assert len(sizes) == 0


# Real texts.


def pseudo_tokens(text: str) -> int:
    """As long as what a tokenizer makes of English: words in pieces of up to seven letters, the rest by character."""
    return len(re.findall(r" ?[A-Za-z]{1,7}|\d{1,3}| ?[^\w\s]|\s+|.", text))


def conversations() -> list[list[str]]:
    """Prompts of real conversations: each question with all that was said before it."""
    prompts = []
    for name, most in (("dialogstudio_sharegpt_original_example.json", 5), ("fastchat_dummy_conversation.json", 60)):
        if not (TRACES / name).exists():
            pytest.skip("no shared traces here")
        for conversation in json.loads((TRACES / name).read_text())[:most]:
            turns = [(turn["from"], turn["value"]) for turn in conversation["conversations"]]
            prompts += [[v for _, v in turns[: i + 1]] for i, (who, _) in enumerate(turns) if who == "human"]
    Random(0).shuffle(prompts)
    return prompts


def test_on_real_conversations_the_error_falls_to_a_third() -> None:
    prompts = []
    for messages in conversations():
        size = PromptSize(ascii_bytes=sum(len(m.encode()) for m in messages), messages=len(messages))
        prompts.append((size, sum(pseudo_tokens(m) + 5 for m in messages)))
    sizes, found = PromptSizes(), list[float]()
    for size, tokens in prompts:
        found.append(abs(sizes.tokens("m", size) - tokens) / tokens)
        sizes.learn("m", size, tokens)
    before = errors(prompts, four_bytes_a_token)
    told = f"before {fmean(before):.3f}, first 20 {fmean(found[:20]):.3f}, from 20 on {fmean(found[20:]):.3f}"
    assert fmean(found[20:]) < fmean(before[20:]) / 3, told
    assert fmean(found[20:]) < 0.15, told
    pairs = list(pairwise(sorted((tokens, sizes.tokens("m", size)) for size, tokens in prompts)))
    assert fmean(a[1] <= b[1] for a, b in pairs) > 0.7, "nor is the order lost"
