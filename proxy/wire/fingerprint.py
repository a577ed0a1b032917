"""A prompt's beginnings as hashes, by which engines that have seen them are found again; a whole request as another.

Taken of the bytes as they came: a client that sends a conversation's next turn, or the same instructions before another
question, spells the common part alike. Equal prompts spelt differently are not recognised, which costs a hit and
nothing else. Blocks grow with the distance from the start, so a long prompt has few of them; text beyond the first
megabyte is not looked at. The hashes are keyed with a secret of the process, and no text is kept: nobody can probe
with them what others have sent.
"""

from __future__ import annotations

from hashlib import blake2b, sha256

import msgspec

from proxy.core.prefix import NO_BLOCKS, PromptBlocks

_FIRST_BLOCK_BYTES = 512
"""Some 130 tokens; a shorter common beginning saves less than a step."""
_GROWTH = 32
"""Each block is at least one such part of all text before it, which is how exactly the common part is known."""
_MAX_BYTES = 1 << 20

_END_BYTES = 1 << 16

_ABSENT = msgspec.Raw()


class _Fields(msgspec.Struct, gc=False):
    """What an engine's prompt, and its cache's key, are made from."""

    model: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT


_FIELDS = msgspec.json.Decoder(_Fields)


class Fingerprinter:
    """Makes block hashes that are comparable with each other, but with those of no other process."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """``key`` is a secret of at least 16 random bytes."""
        self._key = key

    def blocks(self, body: bytes, prompt_tokens: int, *, chat: bool) -> PromptBlocks:
        """Return the blocks of a generation request's prompt, which has ``prompt_tokens`` tokens in all.

        Never raises: a body that cannot be read has none.
        """
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return NO_BLOCKS
        text = memoryview(fields.messages if chat else fields.prompt if bytes(fields.prompt) else fields.input)
        if len(text) < _FIRST_BLOCK_BYTES:
            return NO_BLOCKS
        chain = sha256(self._key)  # twice as fast as BLAKE2 where the processor knows it
        tools = bytes(fields.tools)
        before = (bytes(fields.system), bytes(fields.instructions))
        template = (fields.chat_template, fields.chat_template_kwargs, fields.documents, *before)
        kind = b"chat" if chat else b"text"
        # No NUL can stand in valid JSON.
        chain.update(b"\0".join((kind, fields.model, fields.cache_salt, tools, *template, b"")))
        ahead = len(tools) + sum(map(len, before))  # a template puts them before the messages
        tokens_per_byte = prompt_tokens / (ahead + len(text))
        hashes: list[int] = []
        ends: list[int] = []
        start = 0
        while (end := start + max(_FIRST_BLOCK_BYTES, start // _GROWTH)) <= min(len(text), _MAX_BYTES):
            chain.update(text[start:end])
            hashes.append(int.from_bytes(chain.copy().digest()[:8]))
            ends.append(int(tokens_per_byte * (ahead + end)))
            start = end
        return PromptBlocks(tuple(hashes), tuple(ends))

    def whole(self, path: str, credentials: bytes, body: bytes) -> bytes:
        """Return what a request has in common with its own retry, and with no other client's.

        Of a very long body the ends and the length must do: the loop has others to serve.
        """
        name = path.encode("utf-8", "surrogateescape")
        ends = (body,) if len(body) <= 2 * _END_BYTES else (body[:_END_BYTES], body[-_END_BYTES:])
        # Each part by its length, so that none can pass for the end of another.
        sizes = b"%d:%d:%d:" % (len(name), len(credentials), len(body))
        return blake2b(b"".join((sizes, name, credentials, *ends)), key=self._key[:64], digest_size=16).digest()
