"""Answers: the payloads of a stream, and what is reported beside the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from proxy.wire.openai.request import MOST_SEQUENCES, MOST_TOKENS
from proxy.wire.timing import milliseconds

_Shape = TypeVar("_Shape")


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
    queue_seconds: float | None = None
    """What vLLM says that the request waited in it (``--enable-per-request-metrics``), beside the usage."""


VISIBLE_TOKEN = ChunkView(tokens=1, visible=True)
"""What nearly every chunk is: a token that shows, and nothing else."""
_NOTHING = ChunkView()
_HELD_BACK = ChunkView(held_back=True)
_DONE = ChunkView(done=True)
_UNDECODABLE = ChunkView(undecodable=True)


# Leaves are ``Any``: what matters is whether they are empty, and a new kind must not hide a token.


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
    metrics: Any = None


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
            return VISIBLE_TOKEN
        if tokens == 0:
            return _HELD_BACK if held_back else _NOTHING
    finish_reason = finish_reason if isinstance(finish_reason, str) else None
    # In the order of the fields: keywords would take twice as long.
    told = (*_usage(usage), bool(chunk.error), finish_reason, False, _queued(chunk.metrics))
    return ChunkView(tokens, visible, held_back, False, *told)


class _Numbered(msgspec.Struct, gc=False):
    index: Any = None


class _Choices(msgspec.Struct, gc=False):
    choices: list[_Numbered] | None = None


_CHOICES = msgspec.json.Decoder(_Choices)


def read_index(data: bytes) -> int:
    """Return which of a stream's answers a payload with a token belongs to; 0 where it does not tell."""
    chunk = decode_leniently(_CHOICES, data)
    index = chunk.choices[0].index if chunk is not None and chunk.choices else 0
    return index if type(index) is int and 0 <= index < MOST_SEQUENCES else 0


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


def _queued(metrics: Any) -> float | None:
    return milliseconds(metrics.get("queue_time_ms")) if isinstance(metrics, dict) else None


def token_count(value: Any) -> int | None:
    """Return a number of tokens as an engine reports it; ``None`` where it makes no sense."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
