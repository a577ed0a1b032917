"""Server-sent events, watched as they pass: which events did this read complete?

The relay hands every read on untouched and shows it to an ``EventSplitter`` as well, which remembers only
the event under way. Each byte is looked at a fixed number of times, however small the reads are; that is
why lines are never taken one by one from a buffer, but whole events are cut at blank lines.
"""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELD = b"data: "
_BLANK_LINE = b"\n\n"
_LF, _CR = b"\n\r"  # as integers, for which "in" is ten times faster on bytes


class EventSplitter:
    """Gives the payloads of a stream of server-sent events, whatever the reads' cuts.

    Lines may end in LF, CR or CRLF, as the HTML standard's event stream format says; the event's other
    fields and comments are passed over. An event of more than ``max_event_bytes`` (without its blank line,
    each line end counted as one byte) is passed over as well, so memory stays bounded.
    """

    __slots__ = ("_after_cr", "_max_event_bytes", "_pending", "_skipping", "_started", "oversized")

    def __init__(self, *, max_event_bytes: int = 4 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = bytearray()
        """The event under way, its line ends made LF; while skipping, only its last byte."""
        self._started = False
        """Set once the byte order mark that may open the stream has been seen or ruled out."""
        self._after_cr = False
        """Set when the last byte was a CR: an LF that follows belongs to the same line end."""
        self._skipping = False
        self.oversized = 0
        """Events passed over because they were too long."""

    @property
    def at_boundary(self) -> bool:
        r"""Whether the stream so far ended on an event boundary: right at its start, or after a blank line.

        Where it did not, whoever adds an event to the stream has to write ``b"\n\n"`` first: the last line
        itself may be cut, and after a lone CR the first LF would only complete that line's end.
        """
        return not self._pending

    @property
    def between_events(self) -> bool:
        """Whether the next byte begins an event, whatever it is."""
        return self._started and not self._pending and not self._after_cr

    def feed(self, data: bytes) -> list[bytes]:
        """Return the ``data`` payload of every event that ``data`` completes, in order.

        Several data lines of one event are joined by LF; an event without any gives nothing.
        """
        pending = self._pending
        # The usual read holds one whole event of one line.
        if (
            not pending
            and data.startswith(_FIELD)
            and data.find(b"\n") == len(data) - 2
            and data.endswith(_BLANK_LINE)
            and _CR not in data
            and len(data) - 2 <= self._max_event_bytes
        ):
            self._started, self._after_cr = True, False
            return [data[6:-2]]

        if not self._started:
            data = self._without_byte_order_mark(data)
        if self._after_cr or _CR in data:
            data = self._with_lf_only(data)
        if not pending and data.startswith(b"\n"):
            data = data.lstrip(b"\n")  # more blank lines than one between events
        if not data:
            return []

        if not pending:
            end = data.rfind(_BLANK_LINE) + 2
            blocks, rest = (data[:end], data[end:]) if end > 1 else (b"", data)
            pending += rest
        else:
            # The blank line may begin with the last byte of the read before, and not earlier.
            searched = len(pending) - 1
            pending += data
            end = pending.rfind(_BLANK_LINE, searched) + 2
            blocks = b""
            if end > 1:
                blocks = bytes(pending[:end])
                del pending[:end]
        events = self._payloads(blocks) if blocks else []
        self._bound_pending()
        return events

    def _payloads(self, blocks: bytes) -> list[bytes]:
        events = []
        for split in blocks.split(_BLANK_LINE):
            if self._skipping:
                self._skipping = False  # this is the end of the event that was too long
                continue
            block = split.lstrip(b"\n")
            if len(block) > self._max_event_bytes:
                self.oversized += 1
            elif block.startswith(_FIELD) and _LF not in block:
                events.append(block[6:])
            elif block:
                values = [_value(line) for line in block.split(b"\n") if line.startswith(b"data:") or line == b"data"]
                if values:
                    events.append(b"\n".join(values))
        return events

    def _bound_pending(self) -> None:
        pending, most = self._pending, self._max_event_bytes
        # At one byte over, a line end may still turn out to be the first half of the blank line.
        if not self._skipping and (len(pending) > most + 1 or (len(pending) > most and not pending.endswith(b"\n"))):
            self._skipping = True
            self.oversized += 1
        if self._skipping:
            del pending[:-1]

    def _without_byte_order_mark(self, data: bytes) -> bytes:
        head = bytes(self._pending) + data
        self._pending.clear()
        if len(head) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(head):
            self._pending += head
            return b""
        self._started = True
        return head.removeprefix(_BYTE_ORDER_MARK)

    def _with_lf_only(self, data: bytes) -> bytes:
        if not data:
            return data
        if self._after_cr:
            data = data.removeprefix(b"\n")
        # A CR ends its line at once: to wait for a possible LF would hold back an event that is complete.
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _value(line: bytes) -> bytes:
    return line[5:].removeprefix(b" ")
