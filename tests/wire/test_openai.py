from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.promptsize import PromptSize
from proxy.wire.openai import BadRequest, ChunkView, RequestView, peek, read_chunk, read_usage


def completion(prompt: Any = "x" * 400, **fields: Any) -> RequestView:
    return peek(json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), chat=False)


def chat(*messages: Any, **fields: Any) -> RequestView:
    return peek(json.dumps({"model": "m", "messages": messages, **fields}).encode(), chat=True)


# Requests: the fields.


def test_the_fields_of_a_completions_request() -> None:
    found = completion(stream=True, max_tokens=7, temperature=0.5, stop=["\n"], unknown={"a": [1]})
    assert found == RequestView("m", stream=True, max_tokens=7, prompt=PromptSize(ascii_bytes=400))


def test_the_fields_of_a_chat_request() -> None:
    found = chat({"role": "user", "content": "x" * 400}, max_tokens=7)
    assert found == RequestView("m", stream=False, max_tokens=7, prompt=PromptSize(ascii_bytes=400, messages=1))


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("body", [b"{}", b' {"model": null, "stream": null, "max_tokens": null}\n'])
def test_absent_and_null_fields(body: bytes, is_chat: bool) -> None:
    found = peek(body, chat=is_chat)
    assert (found.model, found.stream, found.max_tokens) == ("", False, None)
    assert found.prompt == PromptSize(json_bytes=len(body)), "counts as the whole body"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 0, "max_tokens": 9}, 0),
        ({"max_completion_tokens": None, "max_tokens": 9}, 9),
        ({"max_tokens": 16.0}, 16),
        ({"max_completion_tokens": 16.0, "max_tokens": 9}, 16),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 10**30}, 2**31 - 1),
    ],
)
def test_the_limit_of_a_chat_request(fields: dict[str, Any], limit: int | None) -> None:
    assert chat({"content": "hello"}, **fields).max_tokens == limit


def test_max_completion_tokens_means_nothing_to_completions() -> None:
    assert completion(max_completion_tokens="many").max_tokens is None


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 7),
        ("model", ["m"]),
        ("stream", "true"),
        ("stream", 1),
        ("stream", {}),
        ("max_tokens", "7"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", [7]),
    ],
)
def test_a_wrong_type_is_refused_by_the_field_s_name(field: str, value: Any, is_chat: bool) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        peek(json.dumps({"messages": [], "prompt": "x", field: value}).encode(), chat=is_chat)
    assert caught.value.param == field


def test_max_completion_tokens_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(BadRequest, match="max_completion_tokens") as caught:
        chat(max_completion_tokens="7")
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{bad", b"[]", b'"x"', b"null", b"7", b'{"model": "m"', b'{"model": "m"} x', b"\xff\xfe\xfa"),
        *(b'{"prompt": [1,]}', b'{"a": 01}', b"a" * 100_000),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, is_chat: bool) -> None:
    with pytest.raises(BadRequest, match="JSON") as caught:
        peek(body, chat=is_chat)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("key", ["prompt", "messages", "tools", "model", "unknown"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("closed", [False, True])
def test_a_nesting_bomb_is_refused(key: str, opening: str, closed: bool, is_chat: bool) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    value = opening * 100_000 + ("1" + closing * 100_000 + "}" if closed else "")
    with pytest.raises(BadRequest):
        peek(f'{{"{key}": {value}'.encode(), chat=is_chat)


def test_a_bare_nesting_bomb_is_refused() -> None:
    with pytest.raises(BadRequest):
        peek(b"[" * 100_000, chat=True)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    "rest",
    [
        r'"user": "\ud800"',
        r'"prompt": "\ud83d", "messages": [{"content": "\ud83d"}]',
        r'"prompt": "\u0000", "messages": [{"content": "\u0000"}]',
        '"temperature": 1e400',
        '"temperature": NaN, "top_p": -Infinity',
        '"seed": 123456789012345678901234567890',
        '"seed": 1, "seed": "one"',
        '"model": 7, "model": "m"',
        '"unknown": {"deep": [[[{"a": null}]]]}',
        '"stop": "one"',
        '"stop": ["one", "two"]',
        '"stream_options": {"include_usage": true}',
        '"prompt": 7, "messages": "hello"',
        '"prompt": {"a": 1}, "messages": [7]',
        '"prompt": [1.5], "messages": [{"content": 7}]',
        '"prompt": [null, [1], "a"], "messages": [{"content": [{"text": 7}]}]',
        '"prompt": null, "messages": null',
        '"prompt": [], "messages": []',
        '"prompt": "", "messages": [{}]',
        '"prompt": [[[[1]]]], "messages": {}',
    ],
)
def test_what_the_engine_should_judge_passes(rest: str, is_chat: bool) -> None:
    found = peek(f'{{"model": "m", "max_tokens": 5, {rest}}}'.encode(), chat=is_chat)
    assert (found.model, found.max_tokens) == ("m", 5)
    check_size(found.prompt)


def test_bytes_that_are_no_utf8_in_the_prompt_are_for_the_engine() -> None:
    assert peek(b'{"model": "m", "prompt": "\\n\xff"}', chat=False).model == "m"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_an_encoding_that_the_engine_reads_is_read(encoding: str) -> None:
    assert peek('{"model": "m", "prompt": "x"}'.encode(encoding), chat=False).model == "m"


def test_a_model_name_with_a_lone_surrogate_can_be_logged() -> None:
    assert peek(rb'{"model": "a\ud800"}', chat=False).model == r"a\ud800"


# Requests: what the prompt is made of.


def size_of(text: str, **more: int) -> PromptSize:
    """The size of a text, counted character by character."""
    other = sum(len(character.encode()) for character in text if not character.isascii())
    return PromptSize(ascii_bytes=sum(map(str.isascii, text)), other_bytes=other, **more)


def check_size(size: PromptSize) -> None:
    assert min(size.token_ids, size.ascii_bytes, size.other_bytes, size.json_bytes, size.messages, size.parts) >= 0


@settings(deadline=None)
@given(st.text(min_size=1), st.booleans())
def test_text_counts_by_its_utf8_length_however_it_is_escaped(text: str, escaped: bool) -> None:
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    encoded = json.dumps(body, ensure_ascii=escaped).encode()
    assert peek(encoded, chat=False).prompt == size_of(text)
    assert peek(encoded, chat=True).prompt == size_of(text, messages=1)


@pytest.mark.parametrize(
    ("text", "ascii_bytes", "other_bytes"),
    [("plain\n", 6, 0), ("naïve", 4, 2), ("Привет!", 1, 12), ("你好", 0, 6), ("ok 👍", 3, 4), ("", 0, 0)],
)
def test_bytes_beyond_ascii_are_told_apart(text: str, ascii_bytes: int, other_bytes: int) -> None:
    assert completion(text).prompt == PromptSize(ascii_bytes=ascii_bytes, other_bytes=other_bytes)
    both = peek(json.dumps({"prompt": text}, ensure_ascii=False).encode(), chat=False)
    assert both.prompt == completion(text).prompt


def test_several_prompts_add_up() -> None:
    assert completion(["x" * 40, 'a "quoted" line\n', "é"]).prompt == PromptSize(ascii_bytes=56, other_bytes=2)


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**70), 2**70), min_size=1),
    st.sampled_from([None, 1]),
    st.sampled_from([",", ", ", " ,\n\t"]),
)
def test_token_ids_are_counted(ids: list[int], indent: int | None, comma: str) -> None:
    body = json.dumps({"prompt": ids}, indent=indent, separators=(comma, ": ")).encode()
    assert peek(body, chat=False).prompt == PromptSize(token_ids=len(ids))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 200_000), min_size=1), min_size=1))
def test_several_prompts_of_token_ids_add_up(prompts: list[list[int]]) -> None:
    assert completion(prompts).prompt == PromptSize(token_ids=sum(map(len, prompts)))


def test_a_mixed_list_of_prompts_has_both() -> None:
    assert completion([[1, 2, 3], "x" * 40]).prompt == PromptSize(token_ids=3, ascii_bytes=40)


@pytest.mark.parametrize("prompt", [{"a": 1}, [1.5, 2], [1, "x"], 7, None, [{"prompt": 1}]])
def test_an_odd_prompt_counts_as_the_whole_body(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt, "padding": "x" * 400}).encode()
    assert peek(body, chat=False).prompt == PromptSize(json_bytes=len(body))


@pytest.mark.parametrize("messages", ["hello", 7, None, [7], [{"content": 7}], [{"content": [{"text": []}]}]])
def test_odd_messages_count_as_the_whole_body(messages: Any) -> None:
    body = json.dumps({"messages": messages, "padding": "x" * 400}).encode()
    assert peek(body, chat=True).prompt == PromptSize(json_bytes=len(body))


def test_an_empty_prompt_has_no_bytes() -> None:
    assert completion("").prompt == PromptSize()
    assert chat({"role": "user", "content": ""}).prompt == PromptSize(messages=1)
    assert chat().prompt == PromptSize()


def test_parts_count_by_their_text_and_others_by_their_number() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    text = {"type": "text", "text": "x" * 400}
    found = chat({"role": "system", "content": "x" * 40}, {"role": "user", "content": [text, image, "é" * 40, image]})
    assert found.prompt == PromptSize(ascii_bytes=440, other_bytes=80, messages=2, parts=2)


def test_tools_and_earlier_tool_calls_count_by_their_length() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    plain = chat({"role": "user", "content": "x" * 400}, tools=None)
    found = chat({"role": "user", "content": "x" * 400}, {"role": "assistant", "tool_calls": calls}, tools=tools)
    assert plain.prompt == PromptSize(ascii_bytes=400, messages=1)
    raw = len(json.dumps(tools)) + len(json.dumps(calls))
    assert found.prompt == PromptSize(ascii_bytes=400, json_bytes=raw, messages=2)


def test_a_large_body_is_read() -> None:
    assert completion("x" * 2_100_000).prompt == PromptSize(ascii_bytes=2_100_000)
    assert completion(list(range(100_000))) == RequestView("m", False, None, PromptSize(token_ids=100_000))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
request_fields = st.sampled_from(
    ["model", "stream", "max_tokens", "max_completion_tokens", "prompt", "messages", "tools"]
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(request_fields, json_values), st.booleans())
def test_any_object_is_read_or_refused(fields: dict[str, Any], is_chat: bool) -> None:
    param, found = read_or_refuse(json.dumps(fields).encode(), is_chat=is_chat)
    if found is None:
        assert param in ("model", "stream", "max_tokens", "max_completion_tokens")
    else:
        check_size(found.prompt)


@settings(deadline=None)
@given(st.binary(), st.booleans())
def test_any_bytes_are_read_or_refused(body: bytes, is_chat: bool) -> None:
    read_or_refuse(body, is_chat=is_chat)
    read_or_refuse(b'{"messages": [{"content": "' + body + b'"}], "prompt": "' + body + b'"}', is_chat=is_chat)


def read_or_refuse(body: bytes, *, is_chat: bool) -> tuple[str | None, RequestView | None]:
    try:
        return None, peek(body, chat=is_chat)
    except BadRequest as error:
        return error.param, None


# Chunks of a stream.


def chunk(*choices: Any, **fields: Any) -> ChunkView:
    payload = {"id": "x-1", "object": "chunk", "created": 1767225600, "model": "m", "choices": list(choices), **fields}
    return read_chunk(json.dumps(payload).encode())


def text(value: str | None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": value, "logprobs": None, "finish_reason": None, **fields}


def delta(fields: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": fields, "logprobs": None, "finish_reason": finish_reason, **more}


TOOL_CALL = [{"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '{"a'}}]


@pytest.mark.parametrize(
    "choice",
    [
        text(" word"),
        text(" "),
        delta({"content": " word"}),
        delta({"role": "assistant", "content": "word"}),
        delta({"reasoning": "hm"}),
        delta({"reasoning_content": "hm"}),
        delta({"reasoning_content": "hm", "content": ""}),
        delta({"content": None, "tool_calls": TOOL_CALL}),
        delta(
            {"role": "assistant", "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}
        ),
        delta({"function_call": {"arguments": "{"}}),
        delta({"refusal": "I cannot"}),
        delta({"content": [{"type": "text", "text": "word"}]}),
    ],
)
def test_a_chunk_with_content_is_one_visible_token(choice: dict[str, Any]) -> None:
    assert chunk(choice) == ChunkView(tokens=1, visible=True)


def test_the_usual_view_is_made_once() -> None:
    assert chunk(text("a")) is chunk(delta({"content": "b"}), usage=None)


@pytest.mark.parametrize(
    "choice",
    [
        delta({"role": "assistant", "content": ""}),
        delta({"role": "assistant", "content": None}),
        delta({"role": "assistant"}),
        delta({"role": "assistant", "content": "", "tool_calls": [], "refusal": None}),
        {"index": 0},
    ],
)
def test_a_role_alone_is_no_token(choice: dict[str, Any]) -> None:
    assert chunk(choice) == ChunkView()


@pytest.mark.parametrize("choice", [text("", finish_reason="stop"), delta({}, "stop"), delta({"content": ""}, "stop")])
def test_an_empty_last_chunk_is_no_token(choice: dict[str, Any]) -> None:
    assert chunk(choice) == ChunkView(finish_reason="stop")


@pytest.mark.parametrize("choice", [text("a", finish_reason="length"), delta({"content": "a"}, "length")])
def test_a_last_chunk_with_content_is_a_token(choice: dict[str, Any]) -> None:
    assert chunk(choice) == ChunkView(tokens=1, visible=True, finish_reason="length")


@pytest.mark.parametrize(
    "choice", [text(""), delta({"content": ""}), delta({}), delta({"content": None}), delta(None, text="")]
)
def test_a_token_whose_text_is_held_back(choice: dict[str, Any]) -> None:
    assert chunk(choice) == ChunkView(held_back=True)


def test_each_choice_counts() -> None:
    assert chunk(text("a"), text("b", index=1)) == ChunkView(tokens=2, visible=True)
    mixed = chunk(delta({"content": "a"}), delta({"content": ""}, index=1), delta({}, "stop", index=2))
    assert mixed == ChunkView(tokens=1, visible=True, held_back=True, finish_reason="stop")
    assert chunk(text("a"), text("", index=1)) == ChunkView(tokens=1, visible=True, held_back=True)


@pytest.mark.parametrize(
    ("choice", "tokens"),
    [
        (text(" two words", token_ids=[5, 6]), 2),
        (delta({"content": "many"}, token_ids=[1, 2, 3, 4]), 4),
        (delta({"content": "a"}, token_ids=None), 1),
        (delta({"content": "a"}, token_ids=[]), 1),
        (text(" two words", logprobs={"tokens": [" two", " words"], "token_logprobs": [-1.5, None]}), 2),
        (delta({"content": "ab"}, logprobs={"content": [{"token": "a", "top_logprobs": []}, {"token": "b"}]}), 2),
        (delta({"content": "a"}, logprobs={"content": None}), 1),
        (delta({"content": "a"}, logprobs={}), 1),
        (text("ab", token_ids=[1, 2, 3], logprobs={"tokens": ["a", "b"]}), 3),
    ],
)
def test_lists_of_tokens_give_the_exact_count(choice: dict[str, Any], tokens: int) -> None:
    choice = {**choice, "logprobs": choice["logprobs"]}
    assert chunk(choice) == ChunkView(tokens=tokens, visible=True)


def test_a_counted_token_may_be_held_back() -> None:
    assert chunk(text("", token_ids=[5])) == ChunkView(tokens=1, held_back=True)
    assert chunk(text("", finish_reason="stop", token_ids=[2])) == ChunkView(tokens=1, finish_reason="stop")


def test_the_end_marker_is_the_whole_payload() -> None:
    assert read_chunk(b"[DONE]") == ChunkView(done=True)
    for quoted in ("data: [DONE]", "[DONE]", "data: [DONE]\n\n"):
        assert chunk(delta({"content": quoted})) == ChunkView(tokens=1, visible=True)
    assert not read_chunk(b'"[DONE]"').done


def test_usage_alone() -> None:
    usage = {"prompt_tokens": 100, "total_tokens": 120, "completion_tokens": 20}
    assert chunk(usage=usage) == ChunkView(prompt_tokens=100, completion_tokens=20)
    details = {**usage, "prompt_tokens_details": {"cached_tokens": 64}}
    assert chunk(usage=details).cached_tokens == 64
    assert chunk(usage={**usage, "prompt_tokens_details": None}).cached_tokens is None


def test_usage_with_every_chunk() -> None:
    found = chunk(text("ab"), usage={"prompt_tokens": 100, "completion_tokens": 2})
    assert found == ChunkView(tokens=1, visible=True, prompt_tokens=100, completion_tokens=2)


def test_the_time_in_vllms_queue() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    assert chunk(usage=usage, metrics={"queue_time_ms": 12.5, "mean_itl_ms": 2.0}).queue_seconds == 0.0125
    for nothing in ({}, {"queue_time_ms": None}, {"queue_time_ms": -1}, {"queue_time_ms": True}, "x", None, [1]):
        assert chunk(usage=usage, metrics=nothing) == ChunkView(prompt_tokens=1, completion_tokens=2)


@pytest.mark.parametrize("value", [None, "7", 7.5, True, -1, [], {}])
def test_usage_that_is_no_count_is_left_out(value: Any) -> None:
    found = chunk(usage={"prompt_tokens": value, "completion_tokens": 3, "prompt_tokens_details": value})
    assert found == ChunkView(completion_tokens=3)


@pytest.mark.parametrize(
    "payload", [b"{}", b'{"choices": []}', b'{"choices": null}', b'{"type": "ping"}', b'{"error": null}']
)
def test_a_chunk_without_choices_is_nothing(payload: bytes) -> None:
    assert read_chunk(payload) == ChunkView()


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error": {"message": "boom", "type": "InternalServerError", "param": null, "code": 500}}',
        b'{"error": "Unauthorized"}',
        b'{"choices": [], "error": {"message": "boom"}}',
    ],
)
def test_an_error_inside_a_stream(payload: bytes) -> None:
    assert read_chunk(payload) == ChunkView(error=True)


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"{", b"null", b"[]", b'"x"', b"7", b"\xff", b"[DONE", b" [DONE]", b"[" * 100_000, b'{"a":' * 100_000),
        *(b'{"choices": 7}', b'{"choices": [7]}', b'{"choices": [{"delta": "a"}]}', b'{"usage": 7}', b'{"a": "\\ud8'),
    ],
)
def test_an_undecodable_payload_is_told_and_not_raised(payload: bytes) -> None:
    assert read_chunk(payload) == ChunkView(undecodable=True)


def test_half_an_emoji_as_a_lone_surrogate_is_a_token() -> None:
    assert read_chunk(rb'{"choices": [{"delta": {"content": "\ud83d"}}]}') == ChunkView(tokens=1, visible=True)
    found = read_chunk(rb'{"choices": [{"text": "\ud83d", "logprobs": {"content": [{"a": NaN}, {}]}}]}')
    assert found == ChunkView(tokens=2, visible=True)


def test_a_chunk_of_300_kb() -> None:
    entry = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": [{"token": "b" * 100}] * 2000}
    assert chunk(delta({"content": "a"}, logprobs={"content": [entry]})) == ChunkView(tokens=1, visible=True)


chunk_fields = st.sampled_from(
    ["choices", "usage", "error", "delta", "text", "content", "logprobs", "token_ids", "role"]
)
chunk_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(chunk_fields, inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(), chunk_values.map(lambda value: json.dumps(value).encode())))
def test_no_payload_raises(payload: bytes) -> None:
    found = read_chunk(payload)
    assert found.tokens >= found.visible
    assert len(read_usage(payload)) == 3


# Whole answers.


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}', (9, 3, None)),
        (rb'{"choices": [{"text": "\ud83d"}], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}', (9, 3, None)),
        (b'{"usage": {"prompt_tokens": 9}}', (9, None, None)),
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}', (9, None, 8)),
        (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": [8]}}', (9, None, None)),
        # More than a float can hold: in sums and metrics they would raise, and leave the request's slot taken for good.
        (b'{"usage": {"prompt_tokens": 1%b, "completion_tokens": 1%b}}' % (b"0" * 400, b"0" * 10), (None, None, None)),
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 1%b}}}' % (b"0" * 400), (None, None, None)),
        (b'{"usage": null}', (None, None, None)),
        (b'{"usage": 7}', (None, None, None)),
        (b'{"error": {"message": "boom"}}', (None, None, None)),
        (b"<html>", (None, None, None)),
        (b"", (None, None, None)),
        (b"[]", (None, None, None)),
        (b"[" * 100_000, (None, None, None)),
    ],
)
def test_the_usage_of_a_whole_answer(body: bytes, usage: tuple[int | None, int | None]) -> None:
    assert tuple(read_usage(body)) == usage
