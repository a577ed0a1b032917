"""Requests: their place in the queue and the size of their prompts."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from proxy.core.promptsize import PromptSize

MOST_SEQUENCES = 1024
MOST_TOKENS = 2**31 - 1
"""No context is longer, and ``int`` this small is safe in the core's floating-point arithmetic."""


class BadRequest(ValueError):  # noqa: N818 - the status's own name
    """The client's request cannot be served; ``message`` tells the client why, ``param`` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestView(NamedTuple):
    """The fields of a generation request that decide its place in the queue."""

    model: str
    """Empty where the request names none."""
    stream: bool
    max_tokens: int | None
    """``None`` where the client set no usable limit: none, null or a negative one, which the engine judges."""
    prompt: PromptSize
    """What its length in tokens can be told from."""
    sequences: int = 1
    """Answers that it asks for, of all its prompts together."""


# The structures hold no cycles, so the garbage collector need not know them.


class _Part(msgspec.Struct, gc=False):
    text: str | None = None


class _Message(msgspec.Struct, gc=False):
    content: str | list[str | _Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class _ChatBody(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: Any = None
    messages: list[_Message] | None = None
    tools: msgspec.Raw = msgspec.Raw()


class _CompletionBody(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    n: Any = None
    best_of: Any = None
    prompt: msgspec.Raw = msgspec.Raw()


_CHAT_BODY = msgspec.json.Decoder(_ChatBody)
_COMPLETION_BODY = msgspec.json.Decoder(_CompletionBody)
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str | list[int]])


def peek(body: bytes, *, chat: bool) -> RequestView:
    """Read what the scheduler needs from the body of a completions or, with ``chat``, chat completions request.

    A prompt that cannot be understood counts as the whole body's length; whether it is valid is for the engine to say.

    Raises:
        BadRequest: not a JSON object, nested too deeply, or a field named here has the wrong type.
    """
    try:
        if chat:
            chat_body = _CHAT_BODY.decode(body)
            limit = chat_body.max_tokens if chat_body.max_completion_tokens is None else chat_body.max_completion_tokens
            size = _chat_size(chat_body) or whole_body(body)
            return make_view(chat_body.model, chat_body.stream, limit, size, _answers(chat_body.n))
        completion = _COMPLETION_BODY.decode(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except msgspec.DecodeError:
        return _peek_as_the_engine(body, chat=chat)
    prompt = bytes(completion.prompt)
    size = _prompt_size(prompt) or whole_body(body)
    sequences = _prompts(prompt) * _answers(completion.n, completion.best_of)
    return make_view(completion.model, completion.stream, completion.max_tokens, size, sequences)


def make_view(
    model: str | None, stream: bool | None, limit: int | None, prompt: PromptSize, sequences: int = 1
) -> RequestView:
    """Return a view in which a limit that makes no sense is none."""
    if limit is not None:
        limit = min(limit, MOST_TOKENS) if limit >= 0 else None
    return RequestView(model or "", bool(stream), limit, prompt, min(sequences, MOST_SEQUENCES))


def _answers(*wishes: Any) -> int:
    """Return how many answers to each prompt are asked for: ``n``, or ``best_of`` if that is more."""
    return max([1, *(wish for wish in wishes if type(wish) is int)])


def _prompts(prompt: bytes) -> int:
    """Return how many prompts a completion's ``prompt`` is."""
    if not prompt.startswith(b"["):
        return 1
    if not prompt.translate(None, b"-0123456789[], \t\r\n"):  # token ids of one prompt, or a list of such
        return max(1, prompt.count(b"[") - 1)
    try:
        return max(1, len(_TEXTS.decode(prompt)))
    except msgspec.DecodeError:
        return 1


def _peek_as_the_engine(body: bytes, *, chat: bool) -> RequestView:
    """Decide with Python's own parser what msgspec refused; ten times slower, and seldom needed."""
    fields, model, stream = read_fields(body)
    limit = integer(fields, "max_tokens")
    if chat and (wins := integer(fields, "max_completion_tokens")) is not None:
        limit = wins
    return make_view(model, stream, limit, whole_body(body))


def read_fields(body: bytes) -> tuple[dict[str, Any], str | None, bool | None]:
    """Return the fields of a body as Python's own parser reads them, with its model and whether it streams.

    Raises:
        BadRequest: as from ``peek``.
    """
    try:
        fields = json.loads(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the request body must be a JSON object")
    model, stream = fields.get("model"), fields.get("stream")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("stream must be a boolean", param="stream")
    # A name with a lone surrogate is no model's name, but has to be fit for a log line and an error message.
    return fields, model and model.encode(errors="backslashreplace").decode(), stream


def integer(fields: dict[str, Any], name: str) -> int | None:
    """Return a field of ``read_fields`` that is an integer, or none.

    Raises:
        BadRequest: it is something else.
    """
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 16.0 is an integer to JSON Schema, and to vLLM
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BadRequest(f"{name} must be an integer", param=name)


def _chat_size(body: _ChatBody) -> PromptSize | None:
    """Return what the messages are made of, ``None`` where there are none that are understood."""
    if body.messages is None:
        return None
    texts: list[str] = []
    parts, raw_bytes = 0, _raw_size(body.tools)
    for message in body.messages:
        content = message.content
        if isinstance(content, str):
            texts.append(content)
        elif content is not None:
            found = [part if isinstance(part, str) else part.text for part in content]
            known = [text for text in found if text is not None]
            parts += len(found) - len(known)
            texts += known
        raw_bytes += _raw_size(message.tool_calls)
    ascii_bytes, other_bytes = _bytes_of("".join(texts).encode())
    return PromptSize(0, ascii_bytes, other_bytes, raw_bytes, len(body.messages), parts)


def _prompt_size(prompt: bytes) -> PromptSize | None:
    """Return what a completion's prompt is made of, ``None`` where its shape is not understood."""
    if prompt.startswith(b"["):
        # The decoder has seen that it is valid JSON, so if nothing but numbers, brackets and white space
        # surrounds the commas, they separate token ids. That saves making 100,000 integers to count them.
        commas = prompt.translate(None, b"-0123456789[] \t\r\n")
        if not commas.strip(b","):
            return PromptSize(len(commas) + 1)
    try:
        if prompt.startswith(b'"'):
            text = prompt[1:-1] if b"\\" not in prompt else _TEXT.decode(prompt).encode()
            return PromptSize(0, *_bytes_of(text))
        ids = 0
        texts: list[str] = []
        for item in _TEXTS.decode(prompt):
            if isinstance(item, str):
                texts.append(item)
            else:
                ids += len(item)
        return PromptSize(ids, *_bytes_of("".join(texts).encode()))
    except msgspec.DecodeError:
        return None


def size_of_texts(texts: list[str], tools: msgspec.Raw, messages: int, parts: int, raw_bytes: int = 0) -> PromptSize:
    """Return what a conversation is made of; ``raw_bytes`` of it are JSON beside the tools."""
    ascii_bytes, other_bytes = _bytes_of("".join(texts).encode(errors="replace"))
    return PromptSize(0, ascii_bytes, other_bytes, _raw_size(tools) + raw_bytes, messages, parts)


_ASCII = bytes(range(128))


def _bytes_of(text: bytes) -> tuple[int, int]:
    """Return how many bytes of UTF-8 text are ASCII characters, and how many belong to others."""
    other = 0 if text.isascii() else len(text.translate(None, _ASCII))
    return len(text) - other, other


def whole_body(body: bytes) -> PromptSize:
    """Return the size of what is not understood."""
    return PromptSize(json_bytes=len(body))


def _raw_size(value: msgspec.Raw) -> int:
    raw = bytes(value)
    return 0 if raw == b"null" else len(raw)
