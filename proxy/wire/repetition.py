r"""Knowing a token's event by one before it, which it repeats with another text.

To decode JSON is the larger part of watching a token. But an engine writes the same event for every token of a stream,
but for the text. What has been decoded once tells of any other read with the same bytes around its text, if that is
a valid string of JSON too: nothing but whether the string is empty makes a difference to what a token is.
"""

from __future__ import annotations

import re

_UTF_8 = (
    rb"[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
_ESCAPED = rb'\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
"""Without surrogates: not every decoder takes those alone."""
_TEXT = re.compile(rb"(?>[ !#-\[\]-\x7f]++|%b|%b)++" % (_ESCAPED, _UTF_8))
"""What stands between the quotes of a string that is not empty."""
_FIELD = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|partial_json)": ?"((?:[^"\\]++|\\.)++)"', re.DOTALL
)
"""The quote after a name is that of its end, as it would be escaped inside of a string: so the value is one."""
_TRIES = 8
_WORTH = 4


class Repetition:
    """The event of one token of a stream, to know the others by."""

    __slots__ = ("_after", "_before", "_left", "_since", "known")

    def __init__(self) -> None:
        self.known = False
        """Whether one has been learnt."""
        self._before = b""
        self._after = b""
        self._left = _TRIES
        """Events that may still be learnt: where each is another one, knowing them costs more than it spares."""
        self._since = 0

    def learn(self, read: bytes, number: int) -> None:
        """Note a read that was just one token's event; ``number``: of the tokens so far."""
        if number - self._since > _WORTH:
            self._left = _TRIES  # the last one was of use
        self._since = number
        if self._left and (field := _FIELD.search(read)) is not None:
            self._before, self._after = read[: field.start(1)], read[field.end(1) :]
            self._left -= 1
            self.known = True

    def fits(self, read: bytes) -> bool:
        """Whether a read is such an event, and so one token, as that was which is known."""
        before, after = self._before, self._after
        return (
            read.startswith(before)
            and read.endswith(after)
            and _TEXT.fullmatch(read, len(before), len(read) - len(after)) is not None
        )
