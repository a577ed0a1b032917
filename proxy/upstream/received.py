"""Whether an engine can have read what was sent to it on a connection that it then closed.

A server that closes an idle connection does so at some moment, and a request may be on its way at that moment. The end
of the connection (FIN) tells how much had been received when it was sent, as every segment of TCP does. If that is
nothing of the request, nobody has read it: what comes to a closed socket is thrown away. So the request has provably
not started, and may be sent on another connection.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

_BYTES_ACKED = struct.Struct("=120xQ")
"""Where the kernel's ``struct tcp_info`` has ``tcpi_bytes_acked`` (Linux 4.1 and later)."""
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


class Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def nothing_received(of: Socket, sent_before: int) -> bool:
    """Whether the other end had got nothing but the first ``sent_before`` bytes when it closed; false if unknown.

    Only where its FIN has come: a reset need not tell what was received before it. ``sent_before`` must be above 0,
    and those bytes answered.
    """
    if _TCP_INFO is None or sent_before <= 0:
        return False
    try:
        (acknowledged,) = _BYTES_ACKED.unpack(of.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_ACKED.size))
    except (OSError, struct.error):
        return False
    # The kernel counts the connection's first packet as a byte. Less than was answered is no figure at all.
    return bool(sent_before <= acknowledged <= sent_before + 1)
