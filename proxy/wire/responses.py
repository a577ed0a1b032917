"""OpenAI's Responses API: what the scheduler wants to know of a request and of the events of its stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from proxy.wire.openai import (
    VISIBLE_TOKEN,
    BadRequest,
    ChunkView,
    RequestView,
    Usage,
    decode_leniently,
    integer,
    make_view,
    read_fields,
    size_of_texts,
    token_count,
    whole_body,
)


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Item(msgspec.Struct, gc=False):
    """An item of the input: a message, or something that a tool got or gave."""

    content: str | list[str | _Part] | None = None
    output: str | list[str | _Part] | None = None
    arguments: str | None = None


class _Body(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    input: str | list[str | _Item] | None = None
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_Body)


def peek_response(body: bytes) -> RequestView:
    """Read what the scheduler needs from the body of a ``/v1/responses`` request.

    Raises:
        BadRequest: as from ``openai.peek``.
    """
    try:
        found = _BODY.decode(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except msgspec.DecodeError:
        fields, model, stream = read_fields(body)
        return make_view(model, stream, integer(fields, "max_output_tokens"), whole_body(body))
    texts = [] if found.instructions is None else [found.instructions]
    parts, items = 0, 1
    if isinstance(found.input, str):
        texts.append(found.input)
    elif found.input is not None:
        items = len(found.input)
        for item in found.input:
            if isinstance(item, str):
                texts.append(item)
                continue
            for content in (item.content, item.output, item.arguments):
                parts += _collect(content, texts)
    size = size_of_texts(texts, found.tools, items, parts)
    return make_view(found.model, found.stream, found.max_output_tokens, size)


def _collect(content: str | list[str | _Part] | None, texts: list[str]) -> int:
    """Add the texts of a content to ``texts``; return how many parts have none."""
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        found = [part if isinstance(part, str) else part.text for part in content]
        texts += (text for text in found if text is not None)
        return found.count(None)
    return 0


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Any = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Any = None
    output_tokens: Any = None
    input_tokens_details: _Details | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None
    status: Any = None


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    response: _Response | None = None


_EVENT = msgspec.json.Decoder(_Event)
_RESPONSE = msgspec.json.Decoder(_Response)
_HELD_BACK = ChunkView(held_back=True)
_NOTHING = ChunkView()
_LAST = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}


def read_response_event(data: bytes) -> ChunkView:
    """Read one payload of a stream of the Responses API; never raises.

    A ``*.delta`` is a token: of text, of reasoning, of the arguments of a tool. That an item begins or is done is none.
    """
    if data == b"[DONE]":
        return ChunkView(done=True)
    event = decode_leniently(_EVENT, data)
    if event is None or not isinstance(event.type, str):
        return ChunkView(undecodable=True) if event is None else _NOTHING
    if event.type.endswith(".delta"):
        return VISIBLE_TOKEN if event.delta else _HELD_BACK
    if event.type == "error":
        return ChunkView(error=True)
    reason = _LAST.get(event.type)
    if reason is None:
        return _NOTHING
    usage = _usage(event.response)
    return ChunkView(
        done=True,
        finish_reason=reason,
        error=reason == "failed",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def read_response_usage(body: bytes) -> Usage:
    """Return what a whole answer reports; never raises."""
    return _usage(decode_leniently(_RESPONSE, body))


def response_error_frame(body: bytes) -> bytes:
    """Return an error as the event by which a stream of this API tells one; ``body``: the error as whole answer."""
    error = json.loads(body)["error"]
    told = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
    return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"


def _usage(response: _Response | None) -> Usage:
    if response is None or response.usage is None:
        return Usage()
    usage = response.usage
    cached = None if usage.input_tokens_details is None else usage.input_tokens_details.cached_tokens
    return Usage(token_count(usage.input_tokens), token_count(usage.output_tokens), token_count(cached))
