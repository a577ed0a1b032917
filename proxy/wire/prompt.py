"""Token ids of a prompt, and what it takes to send a prefix of it ahead."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_PROMPT_IDS = 262_144
"""Longer prompts are not sliced."""

_CHAT_TEMPLATE_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
)
_COMPLETION_FIELDS = ("model", "prompt", "add_special_tokens")

# With these the engine computes prompt tokens again, or the prompt has more in it than token ids.
_NOT_SLICEABLE = (
    "prompt_logprobs",
    "echo",
    "prompt_embeds",
    "mm_processor_kwargs",
    "kv_transfer_params",
    "truncate_prompt_tokens",
    "documents",
)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _TokenIds(msgspec.Struct, gc=False):
    tokens: list[int]


class _Part(msgspec.Struct, gc=False):
    type: str = ""


class _Message(msgspec.Struct, gc=False):
    content: str | list[_Part] | None = None


_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])
_token_ids = msgspec.json.Decoder(_TokenIds)
_messages = msgspec.json.Decoder(list[_Message])


class PromptIds:
    """A prompt's token ids in JSON, built once; a prefix of the prompt is a piece of these bytes."""

    __slots__ = ("_ends", "_json")

    def __init__(self, ids: list[int]) -> None:
        texts = [b"%d" % i for i in ids]
        self._json = b",".join(texts)
        self._ends = array("I", accumulate(len(t) + 1 for t in texts))  # after the comma behind each id

    def __len__(self) -> int:
        return len(self._ends)

    def prefix(self, tokens: int) -> bytes:
        """Return the first ``tokens`` ids as a JSON array; there must be that many."""
        return b"[" + self._json[: self._ends[tokens - 1] - 1] + b"]"


class SlicePlan:
    """How to send prefixes of one request's prompt: the bodies to tokenize it and to have a prefix cached."""

    __slots__ = ("_head", "_tail", "ids", "tokenize_body")

    def __init__(self, fields: Mapping[str, msgspec.Raw], *, chat: bool) -> None:
        names = _CHAT_TEMPLATE_FIELDS if chat else _COMPLETION_FIELDS
        self.tokenize_body = msgspec.json.encode({name: fields[name] for name in names if name in fields})
        """For the engine's ``/tokenize``, with the request's own template arguments."""
        self.ids: PromptIds | None = None
        kept = {name: fields[name] for name in ("model", "cache_salt", "priority") if name in fields}
        self._head = b'{"max_tokens":1,"temperature":0,"prompt":'
        self._tail = b"".join(b",%s:%s" % (msgspec.json.encode(name), bytes(raw)) for name, raw in kept.items()) + b"}"

    def body(self, tokens: int) -> bytes:
        """Return a completion request that leaves the first ``tokens`` tokens in the engine's prefix cache."""
        assert self.ids is not None
        return self._head + self.ids.prefix(tokens) + self._tail


def plan_slices(body: bytes, *, chat: bool) -> SlicePlan | None:
    """Return how to slice a request's prompt, or ``None`` where it must go whole; ``body`` is a valid request.

    The plan has the token ids already if the client sent such.
    """
    try:
        fields = _fields.decode(body)
        if any(bytes(fields.get(name, b"null")) not in (b"null", b"false") for name in _NOT_SLICEABLE):
            return None
        if chat:
            messages = _messages.decode(fields["messages"])
            if any(p.type != "text" for m in messages if isinstance(m.content, list) for p in m.content):
                return None
            return SlicePlan(fields, chat=True)
        plan = SlicePlan(fields, chat=False)
        prompt = bytes(fields["prompt"]).lstrip()
        if prompt.startswith(b"["):
            ids = _ids.decode(prompt)
            if not 0 < len(ids) <= MAX_PROMPT_IDS:
                return None
            plan.ids = PromptIds(ids)
        elif not prompt.startswith(b'"'):
            return None
    except (msgspec.DecodeError, KeyError, RecursionError):
        return None
    return plan


def read_token_ids(answer: bytes) -> PromptIds | None:
    """Return the ids from an answer of ``/tokenize``; ``None`` if it has none."""
    try:
        ids = _token_ids.decode(answer).tokens
    except (msgspec.DecodeError, RecursionError):
        return None
    return PromptIds(ids) if 0 < len(ids) <= MAX_PROMPT_IDS else None
