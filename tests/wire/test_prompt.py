"""``proxy.wire.prompt``: which prompts can be cut, and the bytes that send a piece of one."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.prompt import MAX_PROMPT_IDS, PromptIds, SlicePlan, plan_slices, read_token_ids

IDS = list(range(0, 3000, 7))


def encode(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def planned(*, chat: bool = False, **fields: Any) -> SlicePlan:
    plan = plan_slices(encode(**fields), chat=chat)
    assert plan is not None
    return plan


def chat(content: object, **fields: Any) -> bytes:
    return encode(messages=[{"role": "user", "content": content}], **fields)


# -- ids --


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=60), st.data())
def test_a_prefix_is_the_json_of_the_first_ids(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(ids)))
    prompt = PromptIds(ids)
    assert len(prompt) == len(ids)
    assert prompt.prefix(cut) == json.dumps(ids[:cut], separators=(",", ":")).encode()


def test_every_cut_of_a_long_prompt_is_right() -> None:
    prompt = PromptIds(IDS)
    for cut in range(1, len(IDS) + 1):
        assert json.loads(prompt.prefix(cut)) == IDS[:cut]


# -- plans --


def test_a_prompt_of_ids_has_its_plan_complete() -> None:
    plan = planned(prompt=IDS, max_tokens=500, stream=True, temperature=0.7)
    assert plan.ids is not None
    assert len(plan.ids) == len(IDS)
    assert json.loads(plan.body(32)) == {"model": "m", "prompt": IDS[:32], "max_tokens": 1, "temperature": 0}


def test_a_prompt_of_text_is_tokenized_first() -> None:
    plan = planned(prompt="hello  wörld", add_special_tokens=False, stream=True, max_tokens=7)
    assert plan.ids is None
    assert json.loads(plan.tokenize_body) == {"model": "m", "prompt": "hello  wörld", "add_special_tokens": False}
    plan.ids = read_token_ids(b'{"count": 3, "tokens": [5, 6, 7]}')
    assert json.loads(plan.body(2))["prompt"] == [5, 6]


def test_a_chat_is_tokenized_with_all_that_its_template_is_given() -> None:
    template = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "chat_template": "{{ x }}",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    plan = planned(chat=True, **template, stream=True, max_completion_tokens=9, user="u", tool_choice="auto")
    assert plan.ids is None
    assert json.loads(plan.tokenize_body) == {"model": "m", **template}


def test_values_travel_as_they_came() -> None:
    body = b'{"model":"m","messages":[ {"role":"user", "content":"\xc3\xbc \\u00fc", "x": 1.10} ],"stream":true}'
    plan = plan_slices(body, chat=True)
    assert plan is not None
    assert b'[ {"role":"user", "content":"\xc3\xbc \\u00fc", "x": 1.10} ]' in plan.tokenize_body


@pytest.mark.parametrize("model", ["m", "lora/a b", 'quo"te', "ü"])
def test_model_salt_and_priority_travel_with_the_slices(model: str) -> None:
    plan = planned(model=model, prompt=IDS, cache_salt="tenant 1", priority=-3, seed=5, user="u")
    assert json.loads(plan.body(1)) == {
        "model": model,
        "prompt": IDS[:1],
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": "tenant 1",
        "priority": -3,
    }


@pytest.mark.parametrize(
    "content",
    ["text", "", None, [], [{"type": "text", "text": "a"}], [{"type": "text", "text": "a"}, {"type": "text"}]],
)
def test_a_message_of_text_can_be_cut(content: object) -> None:
    assert plan_slices(chat(content), chat=True) is not None


def test_an_answer_with_tool_calls_and_no_content_can_be_cut() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    assert plan_slices(encode(messages=[calls, {"role": "tool", "content": "42"}]), chat=True) is not None


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "image_embeds", "refusal"])
def test_a_message_with_more_than_text_goes_whole(kind: str) -> None:
    assert plan_slices(chat([{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]), chat=True) is None


NOT_SLICEABLE = {
    "echo": True,
    "prompt_logprobs": 0,
    "prompt_embeds": "x",
    "mm_processor_kwargs": {},
    "kv_transfer_params": {"a": 1},
    "truncate_prompt_tokens": 10,
    "documents": [{"text": "x"}],
}


@pytest.mark.parametrize("name", NOT_SLICEABLE)
def test_what_needs_the_whole_prompt_goes_whole(name: str) -> None:
    assert plan_slices(encode(prompt=IDS, **{name: NOT_SLICEABLE[name]}), chat=False) is None
    assert plan_slices(chat("hi", **{name: NOT_SLICEABLE[name]}), chat=True) is None
    assert plan_slices(encode(prompt=IDS, **{name: None}), chat=False) is not None


def test_echo_and_prompt_logprobs_that_are_off_do_not_matter() -> None:
    assert plan_slices(encode(prompt=IDS, echo=False, prompt_logprobs=None), chat=False) is not None


BAD = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b"{",
    b'{"prompt": [1]} x',
    b'{"prompt": []}',
    b'{"prompt": [[1, 2], [3]]}',
    b'{"prompt": ["a", "b"]}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [-1, 5]}',
    b'{"prompt": [true]}',
    b'{"prompt": [null]}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": null}',
    b'{"prompt": 5}',
    b'{"prompt": [1], "x": NaN}',
    b'{"prompt": [1], "\xff": 1}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": null}',
    b'{"messages": {}}',
    b'{"messages": "hi"}',
    b'{"messages": [1]}',
    b'{"messages": [{"content": 5}]}',
    b'{"messages": [{"content": {"type": "text"}}]}',
    b'{"messages": [{"content": [5]}]}',
    b'{"messages": [{"content": ["text"]}]}',
    b'{"messages": [{"content": [{"type": null}]}]}',
    b'{"messages": [{"content": [{"image_url": "http://x"}]}]}',
    b'{"messages": [{"content": "\xff"}]}',
    b'{"messages": [{"content": "\\ud800"}]}',
    b'{"messages": [{"content": ' + b"[" * 100_000,
)


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_a_body_of_another_shape_goes_whole(body: bytes) -> None:
    assert plan_slices(body, chat=False) is None
    assert plan_slices(body, chat=True) is None


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200), st.booleans())
def test_a_body_with_anything_in_it_never_raises(junk: bytes, at: int, is_chat: bool) -> None:
    body = encode(prompt=[1, 2, 3], messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    plan = plan_slices(body[:at] + junk + body[at:], chat=is_chat)
    if plan is not None and plan.ids is not None:
        assert plan.body(1).startswith(b'{"max_tokens":1')


def test_a_prompt_that_is_too_long_goes_whole() -> None:
    ids = [1] * (MAX_PROMPT_IDS + 1)
    assert plan_slices(encode(prompt=ids[:-1]), chat=False) is not None
    assert plan_slices(encode(prompt=ids), chat=False) is None
    assert read_token_ids(json.dumps({"tokens": ids[:-1]}).encode()) is not None
    assert read_token_ids(json.dumps({"tokens": ids}).encode()) is None


# -- answers of /tokenize --


def test_the_ids_of_an_answer_are_read_whatever_else_is_in_it() -> None:
    found = read_token_ids(b'{"count": 2, "max_model_len": 4096, "tokens": [128000, 9906], "token_strs": null}')
    assert found is not None
    assert found.prefix(2) == b"[128000,9906]"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"null",
        b'{"tokens": []}',
        b'{"tokens": null}',
        b'{"tokens": "12"}',
        b'{"tokens": [1.5]}',
        b'{"tokens": ["a"]}',
        b'{"tokens": [1}',
        b'{"error": {"message": "no"}}',
        b'{"tokens": ' + b"[" * 100_000,
        b"\xff",
    ],
)
def test_an_answer_without_ids_has_none(answer: bytes) -> None:
    assert read_token_ids(answer) is None
