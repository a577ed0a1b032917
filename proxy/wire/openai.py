"""What the scheduler wants to know of an OpenAI request, stream chunk or answer, and nothing more.

Bodies and chunks are only looked at: what travels on is always the bytes that came. The typed decoders of
msgspec skip what is not asked for; where they refuse what Python's ``json`` takes (a lone surrogate, NaN, a
repeated key of the wrong type first), ``json`` decides, because vLLM reads requests with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from proxy.core.promptsize import PromptSize

_Shape = TypeVar("_Shape")

_MOST_SEQUENCES = 1024
_MOST_TOKENS = 2**31 - 1
"""No context is longer, and ``int`` this small is safe in the core's floating-point arithmetic."""


class BadRequest(ValueError):  # noqa: N818 - the status's own name
    """The client's request cannot be served; ``message`` tells the client why, ``param`` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestView:
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


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One payload of a completions or chat completions stream."""

    tokens: int = 0
    """Counted by ``token_ids`` or ``logprobs`` where the chunk has them, otherwise 1 per choice with content.

    The second is a lower bound: an engine may put several tokens into a chunk.
    """
    visible: bool = False
    """Whether the client can see something of the answer: stops the TTFT clock."""
    held_back: bool = False
    """The engine made a token, but nothing of it shows yet (half a character, or the start of a stop string)."""
    done: bool = False
    """The stream's end marker, ``[DONE]``."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Of all the stream so far, from ``usage``."""
    cached_tokens: int | None = None
    error: bool = False
    """The engine reports an error inside the stream, whose status was 200."""
    finish_reason: str | None = None
    """Of the last choice in the chunk that has one."""
    undecodable: bool = False


_VISIBLE_TOKEN = ChunkView(tokens=1, visible=True)
_NOTHING = ChunkView()
_HELD_BACK = ChunkView(held_back=True)
_DONE = ChunkView(done=True)
_UNDECODABLE = ChunkView(undecodable=True)


# Requests. The structures hold no cycles, so the garbage collector need not know them.


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
        limit = min(limit, _MOST_TOKENS) if limit >= 0 else None
    return RequestView(model or "", bool(stream), limit, prompt, min(sequences, _MOST_SEQUENCES))


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


# Answers. Leaves are ``Any``: what matters is whether they are empty, and a new kind must not hide a token.


class _Entry(msgspec.Struct, gc=False):
    """One token's log probabilities, with everything in it skipped."""


class _LogProbabilities(msgspec.Struct, gc=False):
    tokens: list[Any] | None = None
    content: list[_Entry] | None = None


class _Delta(msgspec.Struct, gc=False):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct, gc=False):
    text: Any = None
    delta: _Delta | None = None
    finish_reason: Any = None
    token_ids: list[Any] | None = None
    logprobs: _LogProbabilities | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_ANSWER = msgspec.json.Decoder(_Answer)


def read_chunk(data: bytes) -> ChunkView:
    """Read one payload of a completions or chat completions stream; never raises.

    A role, a usage report and an empty last chunk with its ``finish_reason`` are not tokens.
    """
    if data == b"[DONE]":
        return _DONE
    chunk = decode_leniently(_CHUNK, data)
    if chunk is None:
        return _UNDECODABLE
    tokens, visible, held_back, finish_reason = 0, False, False, None
    for choice in chunk.choices or ():
        shown = _shows(choice)
        tokens += _counted(choice) or shown
        visible = visible or shown
        held_back = held_back or (not shown and _holds_back(choice))
        finish_reason = choice.finish_reason or finish_reason
    usage = chunk.usage
    if usage is None and finish_reason is None and not chunk.error and not (visible and held_back):
        if tokens == 1 and visible:
            return _VISIBLE_TOKEN
        if tokens == 0:
            return _HELD_BACK if held_back else _NOTHING
    finish_reason = finish_reason if isinstance(finish_reason, str) else None
    # In the order of the fields: keywords would take twice as long.
    return ChunkView(tokens, visible, held_back, False, *_usage(usage), bool(chunk.error), finish_reason)


class _Numbered(msgspec.Struct, gc=False):
    index: Any = None


class _Choices(msgspec.Struct, gc=False):
    choices: list[_Numbered] | None = None


_CHOICES = msgspec.json.Decoder(_Choices)


def read_index(data: bytes) -> int:
    """Return which of a stream's answers a payload with a token belongs to; 0 where it does not tell."""
    chunk = decode_leniently(_CHOICES, data)
    index = chunk.choices[0].index if chunk is not None and chunk.choices else 0
    return index if type(index) is int and 0 <= index < _MOST_SEQUENCES else 0


class Usage(NamedTuple):
    """What an answer reports; each ``None`` where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""


def read_usage(body: bytes) -> Usage:
    """Return what a whole JSON answer reports; never raises."""
    answer = decode_leniently(_ANSWER, body)
    return _usage(answer.usage) if answer else Usage()


def decode_leniently(decoder: msgspec.json.Decoder[_Shape], data: bytes) -> _Shape | None:
    """Return what an engine has written; ``None`` where that is nothing of this shape."""
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, RecursionError):
        return None
    except msgspec.DecodeError:
        pass
    try:
        # An engine that cuts an emoji in two writes lone surrogates, which only Python's parser reads.
        return cast("_Shape", msgspec.convert(json.loads(data), decoder.type))
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _shows(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and bool(
        delta.content
        or delta.reasoning_content
        or delta.reasoning
        or delta.tool_calls
        or delta.function_call
        or delta.refusal
    )


def _holds_back(choice: _Choice) -> bool:
    if choice.finish_reason:
        return False
    delta = choice.delta
    return choice.text is not None if delta is None else not delta.role


def _counted(choice: _Choice) -> int:
    if choice.token_ids:
        return len(choice.token_ids)
    logprobs = choice.logprobs
    return len(logprobs.tokens or logprobs.content or ()) if logprobs else 0


def _usage(usage: _Usage | None) -> Usage:
    if usage is None:
        return Usage()
    details = usage.prompt_tokens_details
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(token_count(usage.prompt_tokens), token_count(usage.completion_tokens), token_count(cached))


def token_count(value: Any) -> int | None:
    """Return a number of tokens as an engine reports it; ``None`` where it makes no sense."""
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
