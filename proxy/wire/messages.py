"""Anthropic's Messages API: what the scheduler wants to know of a request and of the events of its stream."""

from __future__ import annotations

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


class _Block(msgspec.Struct, gc=False):
    """A block of content: its text, what a tool was asked for (``input``), or what it gave (``content``)."""

    text: str | None = None
    thinking: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    content: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, gc=False):
    content: str | list[_Block] | None = None


class _Body(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    messages: list[_Message] | None = None
    tools: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_Body)


def peek_message(body: bytes) -> RequestView:
    """Read what the scheduler needs from the body of a ``/v1/messages`` request.

    Raises:
        BadRequest: as from ``openai.peek``.
    """
    try:
        found = _BODY.decode(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except msgspec.DecodeError:
        fields, model, stream = read_fields(body)
        return make_view(model, stream, integer(fields, "max_tokens"), whole_body(body))
    texts: list[str] = []
    raw_bytes = _collect(found.system, texts)
    parts = 0
    for message in found.messages or ():
        raw_bytes += _collect(message.content, texts)
        if isinstance(message.content, list):
            parts += sum(block.text is None and block.thinking is None and not _raw(block) for block in message.content)
    size = size_of_texts(texts, found.tools, len(found.messages or ()), parts, raw_bytes)
    return make_view(found.model, found.stream, found.max_tokens, size)


def _collect(content: str | list[_Block] | None, texts: list[str]) -> int:
    """Add the texts of a content to ``texts``; return the bytes of what tools were asked for and gave."""
    if isinstance(content, str):
        texts.append(content)
        return 0
    for block in content or ():
        texts += (text for text in (block.text, block.thinking) if text is not None)
    return sum(map(_raw, content or ()))


def _raw(block: _Block) -> int:
    return len(bytes(block.input)) + len(bytes(block.content))


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Any = None
    output_tokens: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _Delta(msgspec.Struct, gc=False):
    type: Any = None
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    stop_reason: Any = None


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: _Delta | None = None
    message: _Answer | None = None
    usage: _Usage | None = None


_EVENT = msgspec.json.Decoder(_Event)
_ANSWER = msgspec.json.Decoder(_Answer)
_HELD_BACK = ChunkView(held_back=True)
_NOTHING = ChunkView()


def read_message_event(data: bytes) -> ChunkView:
    """Read one payload of a stream of the Messages API; never raises.

    A ``content_block_delta`` is a token: of text, of thinking, of a tool's input; a signature is none. What has been
    used is told in two parts: the prompt with ``message_start``, the answer with ``message_delta``.
    """
    if data == b"[DONE]":
        return ChunkView(done=True)
    event = decode_leniently(_EVENT, data)
    if event is None:
        return ChunkView(undecodable=True)
    delta = event.delta
    match event.type:
        case "content_block_delta" if delta is not None and delta.type != "signature_delta":
            return VISIBLE_TOKEN if delta.text or delta.thinking or delta.partial_json else _HELD_BACK
        case "message_start" if event.message is not None:
            usage = _usage(event.message.usage)
            return ChunkView(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        case "message_delta":
            usage = _usage(event.usage)
            reason = None if delta is None or not isinstance(delta.stop_reason, str) else delta.stop_reason
            return ChunkView(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=reason,
            )
        case "message_stop":
            return ChunkView(done=True)
        case "error":
            return ChunkView(error=True)
        case _:
            return _NOTHING


def read_message_usage(body: bytes) -> Usage:
    """Return what a whole answer reports; never raises."""
    answer = decode_leniently(_ANSWER, body)
    return Usage() if answer is None else _usage(answer.usage)


def message_error_frame(body: bytes) -> bytes:
    """Return an error as the event by which a stream of this API tells one; ``body``: the error as whole answer."""
    return b"event: error\ndata: " + body + b"\n\n"


def _usage(usage: _Usage | None) -> Usage:
    """The API tells what was read from the cache, and what was written to it, beside the rest of the prompt."""
    if usage is None:
        return Usage()
    cached = token_count(usage.cache_read_input_tokens)
    prompt = token_count(usage.input_tokens)
    if prompt is not None:
        prompt += (cached or 0) + (token_count(usage.cache_creation_input_tokens) or 0)
    return Usage(prompt, token_count(usage.output_tokens), cached)
