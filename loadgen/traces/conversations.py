"""ShareGPT: conversations, of which every answer is a request with all that came before it as its prompt.

A row is an answer, or a conversation without any. Lengths are estimated from the characters, as the files have no
token counts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.traces.rows import EMPTY, MOST_TOKENS, NOT_JSON, TOO_LONG, Row
from proxy.sim.workload import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ANSWERERS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})
_NO_TURNS = "no list of turns under 'conversations' or 'messages'"
_NO_ANSWER = "a conversation without an answer"
_NOTHING_BEFORE = "an answer with nothing before it"


class _Keys(msgspec.Struct):
    conversations: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def recognise(line: bytes) -> bool:
    """Recognise a file of conversations, one a line, by its first line."""
    try:
        keys = msgspec.json.decode(line, type=_Keys)
    except msgspec.MsgspecError:
        return False
    return keys.conversations is not msgspec.UNSET or keys.messages is not msgspec.UNSET


def split(data: bytes) -> list[bytes]:
    """Cut a JSON array into its items, which need not be right themselves.

    Raises:
        ValueError: it is no JSON array.
    """
    try:
        return [bytes(item) for item in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:  # Python's parser takes more: lone surrogates, NaN
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, list):
        raise ValueError("no array")  # noqa: TRY004 - a wrong file, not a wrong call
    return [json.dumps(item).encode() for item in found]


def read_conversations(items: Iterable[bytes]) -> Iterator[Row | str]:
    """Yield each answer, or why it is not usable; ``items`` are conversations as JSON."""
    for number, item in enumerate(items):
        if item.strip():
            yield from _answers(item, str(number))


def _answers(item: bytes, session: str) -> Iterator[Row | str]:
    conversation = _loads(item)
    if conversation is None:
        yield NOT_JSON
        return
    turns = None
    if isinstance(conversation, dict):
        turns = conversation.get("conversations", conversation.get("messages"))
    if not isinstance(turns, list):
        yield _NO_TURNS
        return
    before, answers, last = 0.0, 0, ""
    for turn in turns:
        who, text = _turn(turn)
        size = len(text) / CHARACTERS_PER_TOKEN
        if who in _ANSWERERS:
            answers += 1
            if before < 1:
                yield _NOTHING_BEFORE
            elif not text:
                yield EMPTY
            elif before + size > MOST_TOKENS:
                yield TOO_LONG
            else:
                key = f"{session} {answers}"
                row = Row(round(before), max(1, round(size)), session=session, grows=True, key=key, parent=last)
                last = key
                yield row
        before += size
    if not answers:
        yield _NO_ANSWER


def _turn(turn: Any) -> tuple[str, str]:
    """Return who speaks and what; ShareGPT's names or the OpenAI API's. Some files hold each turn as a JSON string."""
    if isinstance(turn, str):
        turn = _loads(turn.encode("utf-8", "surrogatepass"))
    if not isinstance(turn, dict):
        return "", ""
    who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    return who if isinstance(who, str) else "", text if isinstance(text, str) else ""


def _loads(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
