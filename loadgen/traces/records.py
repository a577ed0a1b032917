"""Traces of JSON lines that tell the blocks of each prompt: Mooncake and Qwen-Bailian.

Blocks of one name have the same text, so prompts that begin with the same names have a real beginning in common. Where
a row has more names than its prompt has blocks the rest is cut off; where it has fewer, what follows is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from loadgen.traces.rows import NO_TIME, NOT_JSON, WRONG_FIELD, Format, Row, tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_Shape = TypeVar("_Shape")

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16

_ROOT = -1
"""What Qwen-Bailian gives for the turn before the first."""


class _Mooncake(msgspec.Struct, gc=False):
    timestamp: float
    """In milliseconds."""
    input_length: float
    output_length: float
    hash_ids: list[int] = []


class _Bailian(msgspec.Struct, gc=False):
    chat_id: int | str
    timestamp: float
    """In seconds."""
    input_length: float
    output_length: float
    parent_chat_id: int | str = _ROOT
    hash_ids: list[int] = []


class _Keys(msgspec.Struct):
    chat_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    timestamp: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_length: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def recognise(line: bytes) -> Format | None:
    """Recognise a trace by its first line."""
    try:
        keys = msgspec.json.decode(line, type=_Keys)
    except msgspec.MsgspecError:
        return None
    if keys.timestamp is msgspec.UNSET or keys.input_length is msgspec.UNSET:
        return None
    return Format.MOONCAKE if keys.chat_id is msgspec.UNSET else Format.BAILIAN


def read_mooncake(lines: Iterable[bytes]) -> Iterator[Row | str]:
    """Yield each row, or why it is not usable."""
    decoder = msgspec.json.Decoder(_Mooncake)
    for line in lines:
        if not line.strip():
            continue
        read = _decode(decoder, line)
        if isinstance(read, str):
            yield read
        else:
            milliseconds = read.timestamp
            yield _row(milliseconds / 1000, read.input_length, read.output_length, read.hash_ids, MOONCAKE_BLOCK_TOKENS)


def read_bailian(lines: Iterable[bytes]) -> Iterator[Row | str]:
    """Yield each row, or why it is not usable; a conversation is named after its first turn."""
    decoder = msgspec.json.Decoder(_Bailian)
    roots: dict[str, str] = {}
    for line in lines:
        if not line.strip():
            continue
        read = _decode(decoder, line)
        row = (
            read
            if isinstance(read, str)
            else _row(read.timestamp, read.input_length, read.output_length, read.hash_ids, BAILIAN_BLOCK_TOKENS)
        )
        if isinstance(row, str) or isinstance(read, str):
            yield row
            continue
        key = str(read.chat_id)
        parent = "" if read.parent_chat_id == _ROOT else str(read.parent_chat_id)
        session = roots[key] = roots.get(parent, parent or key)
        yield Row(
            row.prompt_tokens,
            row.output_tokens,
            row.time_s,
            row.blocks,
            row.block_tokens,
            session=session,
            key=key,
            parent=parent,
        )


def _decode(decoder: msgspec.json.Decoder[_Shape], line: bytes) -> _Shape | str:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError:
        return WRONG_FIELD
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_JSON


def _row(at_seconds: float, prompt: float, output: float, blocks: list[int], block_tokens: int) -> Row | str:
    sizes = [tokens(prompt), tokens(output)]
    for size in sizes:
        if isinstance(size, str):
            return size
    if not 0 <= at_seconds < 1e12:
        return NO_TIME
    if any(block < 0 for block in blocks):
        return WRONG_FIELD
    whole = int(prompt)
    kept = tuple(blocks[: -(-whole // block_tokens)])
    return Row(whole, int(output), at_seconds, kept, block_tokens if kept else 0)
