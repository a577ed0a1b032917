"""Requests, streams and errors of the Responses and the Messages API; several answers and prompts in one request."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.wire.errors import UpstreamFailure, answer
from proxy.wire.openai import BadRequest, ChunkView, Usage, read_index


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


class TestResponses:
    def test_what_a_request_is_made_of(self) -> None:
        view = RESPONSES.peek(body(model="m", input="hello", instructions="be brief", max_output_tokens=7, stream=True))
        assert (view.model, view.stream, view.max_tokens) == ("m", True, 7)
        assert view.prompt.ascii_bytes == len("hellobe brief")

    def test_items_of_all_kinds(self) -> None:
        items = [
            {"role": "user", "content": "abc"},
            {"role": "user", "content": [{"type": "input_text", "text": "é"}, {"type": "input_image"}]},
            {"type": "function_call", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "output": "done"},
            {"type": "reasoning", "summary": []},
        ]
        view = RESPONSES.peek(body(input=items, tools=[{"type": "function"}]))
        size = view.prompt
        assert (size.ascii_bytes, size.other_bytes) == (len('abc{"a":1}done'), 2)
        assert (size.messages, size.parts) == (5, 1)
        assert size.json_bytes > 0
        assert view.max_tokens is None

    @pytest.mark.parametrize(
        ("event", "view"),
        [
            ({"type": "response.created", "response": {}}, ChunkView()),
            ({"type": "response.output_item.added", "item": {"role": "assistant"}}, ChunkView()),
            ({"type": "response.output_text.delta", "delta": "a"}, ChunkView(1, visible=True)),
            ({"type": "response.reasoning_text.delta", "delta": "a"}, ChunkView(1, visible=True)),
            ({"type": "response.function_call_arguments.delta", "delta": "{"}, ChunkView(1, visible=True)),
            ({"type": "response.output_text.delta", "delta": ""}, ChunkView(held_back=True)),
            ({"type": "response.output_text.done", "text": "abc"}, ChunkView()),
            ({"type": "error", "message": "x"}, ChunkView(error=True)),
            ({"type": "response.failed", "response": {}}, ChunkView(done=True, error=True, finish_reason="failed")),
            ({"type": 5}, ChunkView()),
            ({}, ChunkView()),
            ([], ChunkView(undecodable=True)),
        ],
    )
    def test_events(self, event: Any, view: ChunkView) -> None:
        assert RESPONSES.read_event(json.dumps(event).encode()) == view

    def test_the_last_event_tells_the_usage(self) -> None:
        usage = {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}
        for kind, reason in (("completed", "completed"), ("incomplete", "incomplete")):
            event = {"type": f"response.{kind}", "response": {"usage": usage, "status": kind}}
            view = RESPONSES.read_event(json.dumps(event).encode())
            assert (view.prompt_tokens, view.completion_tokens, view.cached_tokens) == (11, 3, 4)
            assert (view.done, view.finish_reason, view.error) == (True, reason, False)
        assert RESPONSES.read_usage(body(usage=usage)) == Usage(11, 3, 4)
        assert RESPONSES.read_usage(b"nonsense") == Usage()


class TestMessages:
    def test_what_a_request_is_made_of(self) -> None:
        messages = [
            {"role": "user", "content": "abc"},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "content": "42"}, {"type": "image", "source": {}}]},
        ]
        system = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]
        view = MESSAGES.peek(body(model="m", max_tokens=5, system=system, messages=messages, stream=True))
        size = view.prompt
        assert (view.model, view.stream, view.max_tokens) == ("m", True, 5)
        assert size.ascii_bytes == len("be kindabchm")
        assert size.json_bytes == len('{"a": 1}') + len('"42"')
        assert (size.messages, size.parts) == (3, 1)

    @pytest.mark.parametrize(
        ("event", "view"),
        [
            (
                {"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}},
                ChunkView(prompt_tokens=9),
            ),
            ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, ChunkView()),
            ({"type": "ping"}, ChunkView()),
            ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, ChunkView(1, visible=True)),
            (
                {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
                ChunkView(1, visible=True),
            ),
            (
                {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
                ChunkView(1, visible=True),
            ),
            (
                {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": ""}},
                ChunkView(held_back=True),
            ),
            ({"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x"}}, ChunkView()),
            ({"type": "content_block_stop", "index": 0}, ChunkView()),
            (
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
                ChunkView(completion_tokens=4, finish_reason="end_turn"),
            ),
            ({"type": "message_stop"}, ChunkView(done=True)),
            ({"type": "error", "error": {"type": "overloaded_error"}}, ChunkView(error=True)),
            ([], ChunkView(undecodable=True)),
        ],
    )
    def test_events(self, event: Any, view: ChunkView) -> None:
        assert MESSAGES.read_event(json.dumps(event).encode()) == view

    def test_the_prompt_is_what_was_read_from_the_cache_too(self) -> None:
        usage = {"input_tokens": 3, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 1, "output_tokens": 5}
        assert MESSAGES.read_usage(body(usage=usage)) == Usage(12, 5, 8)
        assert MESSAGES.read_usage(b"") == Usage()


@pytest.mark.parametrize("api", list(APIS.values()), ids=list(APIS))
class TestAll:
    @pytest.mark.parametrize(
        "bad", [b"", b"{bad", b"[]", b'"x"', b"null", b"[" * 100_000, b'{"model": 1}', b'{"stream": "yes"}']
    )
    def test_what_is_no_request_is_told(self, api: Any, bad: bytes) -> None:
        with pytest.raises(BadRequest):
            api.peek(bad)

    def test_limits_that_are_null_or_none(self, api: Any) -> None:
        for fields in ({}, {"max_tokens": None}, {"max_output_tokens": None}, {"max_completion_tokens": None}):
            assert api.peek(body(model="m", **fields)).max_tokens is None

    def test_the_error_that_ends_a_stream_is_one_event_in_the_api_s_own_shape(self, api: Any) -> None:
        frame = api.error_frame(answer(UpstreamFailure.CUT_MID_STREAM))
        assert frame.endswith(b"\n\n")
        assert frame.count(b"\n\n") == 1
        data = json.loads(frame.split(b"data: ", 1)[1])
        if api is MESSAGES:
            assert data["type"] == "error"
            assert set(data["error"]) == {"type", "message"}
        elif api is RESPONSES:
            assert data["type"] == "error"
            assert "closed the connection" in data["message"]
        else:
            assert data["error"]["code"] == "upstream_error"
        assert api.read_event(frame.split(b"data: ", 1)[1].strip()).error


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(
    st.sampled_from([RESPONSES, MESSAGES]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=5)
        | st.sampled_from(["response.completed", "content_block_delta", "message_delta", "text_delta"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "delta", "usage", "response", "message", "input_tokens", "text"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
)
def test_no_event_is_too_odd_to_be_read(api: Any, event: Any) -> None:
    assert isinstance(api.read_event(json.dumps(event).encode()), ChunkView)
    assert isinstance(api.read_usage(json.dumps(event).encode()), Usage)


class TestSequences:
    @pytest.mark.parametrize(
        ("fields", "sequences"),
        [
            ({"prompt": "a"}, 1),
            ({"prompt": "a", "n": 3}, 3),
            ({"prompt": ["a", "b"], "n": 3}, 6),
            ({"prompt": ["a", "b"], "best_of": 4, "n": 2}, 8),
            ({"prompt": [1, 2, 3]}, 1),
            ({"prompt": [[1, 2], [3]]}, 2),
            ({"prompt": []}, 1),
            ({"prompt": "a", "n": None}, 1),
            ({"prompt": "a", "n": 0}, 1),
            ({"prompt": "a", "n": "two"}, 1),
            ({"prompt": "a", "n": 10**9}, 1024),
        ],
    )
    def test_of_a_completion(self, fields: dict[str, Any], sequences: int) -> None:
        assert COMPLETIONS.peek(body(**fields)).sequences == sequences

    def test_of_a_chat(self) -> None:
        assert CHAT.peek(body(messages=[{"role": "user", "content": "a"}], n=4)).sequences == 4
        assert CHAT.peek(body(messages=[{"role": "user", "content": "a"}])).sequences == 1

    def test_the_index_of_a_chunk(self) -> None:
        assert read_index(b'{"choices": [{"index": 3, "text": "a"}]}') == 3
        for odd in (b"", b"{}", b'{"choices": []}', b'{"choices": [{"index": -1}]}', b'{"choices": [{"index": "x"}]}'):
            assert read_index(odd) == 0
