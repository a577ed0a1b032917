"""Block hashes of prompts: equal beginnings are equal, nothing else is, and the cost is bounded."""

import json
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.prefix import NO_BLOCKS, PromptBlocks
from proxy.wire.fingerprint import Fingerprinter

FINGERPRINTER = Fingerprinter(b"k" * 16)
TEXT = "".join(f"Sentence number {i}. " for i in range(400))


def completion(prompt: Any = TEXT, tokens: int = 2000, **fields: Any) -> PromptBlocks:
    body = json.dumps({"model": "m", **fields, "prompt": prompt}).encode()
    return FINGERPRINTER.blocks(body, tokens, chat=False)


def chat(*contents: str, tokens: int = 2000, **fields: Any) -> PromptBlocks:
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    body = json.dumps({"model": "m", **fields, "messages": messages}).encode()
    return FINGERPRINTER.blocks(body, tokens, chat=True)


def shared(one: PromptBlocks, other: PromptBlocks) -> int:
    return in_common(one.hashes, other.hashes)


def in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_a_conversation_s_next_turn_begins_with_all_of_the_last() -> None:
    before = chat(TEXT, "answer", TEXT[:3000])
    after = chat(TEXT, "answer", TEXT[:3000], "another", "and one more question", stream=True, temperature=0.5)
    assert len(before.hashes) > 15
    assert shared(before, after) == len(before.hashes)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 8000), st.text(min_size=1, max_size=2000), st.text(min_size=1, max_size=2000))
def test_prompts_share_the_blocks_before_their_first_difference(common: int, one: str, other: str) -> None:
    texts = [TEXT[:common] + one, TEXT[:common] + other]
    first, second = (completion(text) for text in texts)
    spelt = [json.dumps(text) for text in texts]
    ends = [block_ends(len(raw)) for raw in spelt]
    assert [len(first.hashes), len(second.hashes)] == [len(ends[0]), len(ends[1])]
    assert shared(first, second) == sum(end <= in_common(*spelt) for end in ends[0])


def block_ends(length: int) -> list[int]:
    ends = [0]
    while (end := ends[-1] + max(512, ends[-1] // 32)) <= min(length, 1 << 20):
        ends.append(end)
    return ends[1:]


def test_a_difference_at_the_beginning_leaves_nothing_in_common() -> None:
    assert shared(completion("A" + TEXT), completion("B" + TEXT)) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "lora"},
        {"cache_salt": "tenant"},
        {"tools": [{"type": "function"}]},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"thinking": True}},
        {"documents": ["d"]},
    ],
)
def test_what_else_decides_on_the_cached_tokens_is_part_of_it(fields: dict[str, Any]) -> None:
    assert shared(chat(TEXT), chat(TEXT, **fields)) == 0
    assert shared(chat(TEXT, **fields), chat(TEXT, **fields)) > 10


def test_fields_do_not_run_into_each_other() -> None:
    assert shared(chat(TEXT, cache_salt=1, tools=23), chat(TEXT, cache_salt=12, tools=3)) == 0
    assert shared(completion(TEXT), FINGERPRINTER.blocks(chat_body(TEXT), 2000, chat=True)) == 0


def chat_body(messages: str) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_token_ids_have_blocks_too() -> None:
    ids = list(range(5000))
    one, other = completion(ids, 5000), completion([*ids[:4000], *ids[:1000]], 5000)
    part = shared(one, other)
    assert 0.85 * 4000 < one.ends[part - 1] < 1.15 * 4000


def test_ends_are_in_tokens() -> None:
    text = "x" * 8190
    blocks = completion(text, 2048)
    assert blocks.ends == tuple(i * 128 for i in range(1, 17))
    tools = [{"description": "y" * 8000}]
    after_tools = chat(text, tokens=4096, tools=tools)
    assert after_tools.ends[0] == pytest.approx(2048 + 128, rel=0.02), "a template puts tools first"


@given(st.integers(0, 3000), st.integers(1, 5000))
def test_ends_grow_up_to_the_prompt_s_length(characters: int, tokens: int) -> None:
    blocks = completion("x" * characters, tokens)
    assert len(blocks.hashes) == len(blocks.ends) == (characters + 2) // 512
    assert all(a <= b for a, b in pairwise((0, *blocks.ends, tokens)))


def test_another_process_has_other_hashes() -> None:
    body = json.dumps({"model": "m", "prompt": TEXT}).encode()
    other = Fingerprinter(b"o" * 16).blocks(body, 2000, chat=False)
    assert not set(other.hashes) & set(completion().hashes)


def test_the_number_of_blocks_is_bounded() -> None:
    huge = completion("x" * 10_000_000, 2_500_000)
    assert len(huge.hashes) < 200
    assert huge.ends[-1] * 4 <= 1 << 20


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b'{"prompt": "x"}', b'{"messages": []}'),
        *(b'{"prompt": null, "messages": null}', b'{"model": "m"}'),
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_what_has_no_prompt_to_speak_of_has_no_blocks(body: bytes, chat: bool) -> None:
    assert FINGERPRINTER.blocks(body, 10, chat=chat) == NO_BLOCKS


@settings(deadline=None)
@given(st.binary(), st.booleans())
def test_any_bytes_are_taken(data: bytes, chat: bool) -> None:
    for body in (data, b'{"prompt": "' + data + b'", "messages": [' + data + b"]}"):
        blocks = FINGERPRINTER.blocks(body, 10, chat=chat)
        assert len(blocks.hashes) == len(blocks.ends)


def test_a_whole_request_is_like_its_own_retry_and_like_no_other() -> None:
    path, key, body = "/v1/completions", b"Bearer k", b"{}" * 100_000
    found = FINGERPRINTER.whole(path, key, body)
    assert found == FINGERPRINTER.whole(path, key, bytes(body))
    others = [
        (path + "x", key, body),
        (path, b"Bearer l", body),
        (path, key, body[:-1]),
        (path, key + body[:1], body[1:]),
    ]
    assert found not in [FINGERPRINTER.whole(*other) for other in others]
    assert found != Fingerprinter(b"o" * 16).whole(path, key, body), "nobody can make it who does not know the secret"
