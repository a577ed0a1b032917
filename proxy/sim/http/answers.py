"""Bytes of the answers, in vLLM's shapes: server-sent events token by token, and whole bodies.

One process may have to write thousands of tokens a second, hence two decisions. Words are of one length, so that
all plain chunks of a stream are of one length too and everything but the word is made once per stream. And a stream
writes to its connection itself, in the chunked transfer coding, instead of waking its handler for every token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import asyncio

    from proxy.sim.http.bodies import Generation

MAX_UNSENT_BYTES = 1 << 20
"""A client that has this much unread is cut off: it must neither hold up the steps nor fill the memory."""

_WORDS = ("prime ", "token ", "batch ", "cache ", "queue ", "slack ", "chunk ", "block ", "serve ", "trace ", "layer ")
_WORD_BYTES = tuple(word.encode() for word in _WORDS)
_DONE = b"data: [DONE]\n\n"


def text_of(tokens: int) -> str:
    """Return the text of the first ``tokens`` tokens of any answer."""
    rounds, rest = divmod(tokens, len(_WORDS))
    return "".join(_WORDS) * rounds + "".join(_WORDS[:rest])


class Answer:
    """One answer's identity: what all its chunks share."""

    __slots__ = ("cached_tokens", "chat", "created", "id", "model", "wanted")

    def __init__(self, wanted: Generation, model: str, request_id: str) -> None:
        self.wanted = wanted
        self.model = model
        self.id = f"{'chatcmpl' if wanted.chat else 'cmpl'}-{request_id}"
        self.created = int(time.time())
        self.cached_tokens = 0
        """Tokens of the prompt that were found in the prefix cache."""

    def whole(self) -> bytes:
        """Return the body of the answer to a request that does not stream."""
        text = text_of(self.wanted.output_tokens)
        end: dict[str, Any] = {"logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None}
        choice: dict[str, Any]
        if self.wanted.chat:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, **end}
        else:
            choice = {"index": 0, "text": text, **end}
        name = "chat.completion" if self.wanted.chat else "text_completion"
        return msgspec.json.encode(self._envelope(name, [choice]) | {"usage": self._usage(self.wanted.output_tokens)})

    def role_event(self) -> bytes:
        """Return the chunk without a token that begins a chat."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, 0, prompt_token_ids=None, prompt_text=None)

    def token_event(self, word: str, tokens: int, *, last: bool) -> bytes:
        """Return the chunk of token number ``tokens``."""
        reason = "length" if last else None
        choice: dict[str, Any]
        if self.wanted.chat:
            choice = {"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": reason}
            if last:
                choice["stop_reason"] = None
        else:
            choice = {"index": 0, "text": word, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            choice["prompt_token_ids"] = None
        return self._event(choice | {"token_ids": None}, tokens)

    def usage_event(self) -> bytes:
        """Return the chunk without choices that ends a stream with ``include_usage``."""
        usage = {"usage": self._usage(self.wanted.output_tokens)}
        return b"data: " + msgspec.json.encode(self._envelope(self._stream_object, []) | usage) + b"\n\n"

    def _event(self, choice: dict[str, Any], tokens: int, **more: None) -> bytes:
        chunk = self._envelope(self._stream_object, [choice])
        if self.wanted.continuous_usage:
            details = {"completion_tokens_details": None} if self.wanted.chat else {}
            chunk["usage"] = self._usage(tokens) | details
        return b"data: " + msgspec.json.encode(chunk | more) + b"\n\n"

    @property
    def _stream_object(self) -> str:
        return "chat.completion.chunk" if self.wanted.chat else "text_completion"

    def _envelope(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self, tokens: int) -> dict[str, Any]:
        prompt = self.wanted.prompt_tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
        if self.cached_tokens:  # as vLLM with --enable-prompt-tokens-details, which leaves a zero out
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


class EventStream:
    """Writes an answer's events to a connection whose response headers are out already."""

    __slots__ = ("_after_word", "_answer", "_before_word", "_chunked", "_sent", "_transport")

    def __init__(self, answer: Answer, transport: asyncio.Transport, *, chunked: bool) -> None:
        self._answer = answer
        self._transport = transport
        self._chunked = chunked
        self._sent = 0
        # The words are plain ASCII, so the placeholder is as long as any of them and stands for itself in JSON.
        placeholder = "#" * len(_WORDS[0])
        plain = self._frame(answer.token_event(placeholder, 0, last=False))
        self._before_word, _, self._after_word = plain.rpartition(placeholder.encode())

    def on_start(self, cached_tokens: int) -> None:
        """Keep for the usage how much of the prompt was cached."""
        self._answer.cached_tokens = cached_tokens

    def on_token(self, *, finished: bool) -> None:
        """Write the events that the next token brings; to a connection that is gone, nothing."""
        transport = self._transport
        if transport.is_closing():
            return
        sent = self._sent
        self._sent = sent + 1
        if sent and not finished and not self._answer.wanted.continuous_usage:
            transport.write(self._before_word + _WORD_BYTES[sent % len(_WORD_BYTES)] + self._after_word)
        else:
            transport.write(self._rare_events(sent, finished=finished))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()  # ends the handler, and with it the sequence

    def _rare_events(self, sent: int, *, finished: bool) -> bytes:
        answer = self._answer
        events = [answer.token_event(_WORDS[sent % len(_WORDS)], sent + 1, last=finished)]
        if not sent and answer.wanted.chat:
            events.insert(0, answer.role_event())
        if finished:
            if answer.wanted.include_usage:
                events.append(answer.usage_event())
            events.append(_DONE)
        return b"".join(map(self._frame, events))

    def _frame(self, event: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event


class Silence:
    """Takes the tokens of an answer that is sent whole."""

    __slots__ = ("_answer",)

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def on_start(self, cached_tokens: int) -> None:
        """Keep for the usage how much of the prompt was cached."""
        self._answer.cached_tokens = cached_tokens

    def on_token(self, *, finished: bool) -> None:
        """Do nothing: the handler builds the body when the sequence has finished."""
