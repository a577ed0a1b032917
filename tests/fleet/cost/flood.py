"""A process that sends Redis one command after the other on each of its connections: ``python -m fleet.cost.flood``.

Commands are ready as bytes, and answers are only counted, so that Redis is at its limit before its clients are. A
channel has a subscriber each, as a replica's has. With ``--store`` the proxy's own client sends them instead, one after
the other as a replica does.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from importlib.resources import files
from typing import cast

import redis
import uvloop

from proxy.core.fleet import Letter, letters
from proxy.core.prefix import PromptBlocks
from proxy.core.request import Request
from proxy.store.redis import RedisStore
from proxy.wire.letters import encode_letter

POOL = "default"
LEADER = "proxy-7f5d9c6b8-x2x9k-7-1a2b3c4d"  # as pods are called
FOLLOWER = "proxy-7f5d9c6b8-q8w4z-7-5e6f7a8b"
_PREFIX = f"slai:{{{POOL}}}:v1"
_STREAMS = 64


def letter(kind: str, epoch: int) -> bytes:
    """Return a letter with one note, of usual length."""
    blocks = PromptBlocks(tuple(range(2**63, 2**63 + 8)), tuple(range(64, 576, 64)))
    request = Request("1234", 512, model="m", max_tokens=256, size_bytes=2000, blocks=blocks, fingerprint=bytes(16))
    notes: dict[str, letters.Note] = {
        "arrival": letters.Waits(request, 0.0001),
        "release": letters.Send("1234", "http://10.0.0.17:8000"),
        "tokens": letters.Produced({str(number): 1 for number in range(1000, 1000 + _STREAMS)}),
        "end": letters.Over("1234", 256, 128, served=True),
    }
    ends = (LEADER, FOLLOWER) if kind == "release" else (FOLLOWER, LEADER)
    return encode_letter(
        Letter(*ends, epoch, leads=kind == "release", session=1, number=4321, heard=4320, notes=(notes[kind],))
    )


def command(kind: str, epoch: int, channel: str, shas: dict[str, str]) -> bytes:
    """Return what the store sends to Redis."""
    match kind:
        case "sign of life":
            keys = (f"{_PREFIX}:lease", f"{_PREFIX}:members")
            return _resp("EVALSHA", shas["beat"], "2", *keys, channel, "2000000", "1")
        case "release":
            return _resp(
                "EVALSHA", shas["post"], "1", f"{_PREFIX}:lease", LEADER, f"{epoch}", channel, letter(kind, epoch)
            )
        case _:
            return _resp("PUBLISH", channel, letter(kind, epoch))


def _resp(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class _Sending(asyncio.Protocol):
    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        if data.startswith((b"-", b":0")):  # an error, or nobody heard it
            raise SystemExit(data.decode(errors="replace"))
        self._transport.write(self._sent)


class _Hearing(asyncio.Protocol):
    def __init__(self, channel: str) -> None:
        self._channel = channel
        self.heard = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(_resp("SUBSCRIBE", self._channel))

    def data_received(self, data: bytes) -> None:
        self.heard.set()


async def flood(port: int, kind: str, epoch: int, connections: int, number: int) -> None:
    """Send from many connections until the process ends."""
    loop = asyncio.get_running_loop()
    client = redis.Redis(port=port)
    scripts = files("proxy.store").joinpath("lua")
    shas = {name: str(client.script_load(scripts.joinpath(f"{name}.lua").read_text())) for name in ("beat", "post")}
    client.close()
    for each in range(connections):
        channel = f"{_PREFIX}:to:{FOLLOWER}-{number}-{each}"
        _, hearing = await loop.create_connection(partial(_Hearing, channel), "127.0.0.1", port)
        await hearing.heard.wait()
        sent = command(kind, epoch, channel, shas)
        await loop.create_connection(partial(_Sending, sent), "127.0.0.1", port)
    print("floods", flush=True)
    await asyncio.Event().wait()


async def send(port: int, kind: str, epoch: int) -> None:
    """Send as a replica does until the process ends."""
    store = RedisStore.from_url(f"redis://127.0.0.1:{port}", POOL)
    data = letter(kind, epoch)
    listening = asyncio.ensure_future(store.listen(FOLLOWER, lambda _: None))
    await asyncio.sleep(0.2)
    print("sends", flush=True)
    while not listening.done():
        if kind != "release":
            await store.post(FOLLOWER, data)
        elif not await store.post_as_leader(FOLLOWER, data, LEADER, epoch):
            raise SystemExit("the lease is over")


def main() -> None:
    parser = argparse.ArgumentParser("python -m fleet.cost.flood", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("kind")
    parser.add_argument("epoch", type=int)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--number", type=int, default=0, help="of the process, among those that flood")
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    if options.store:
        uvloop.run(send(options.port, options.kind, options.epoch))
    else:
        uvloop.run(flood(options.port, options.kind, options.epoch, options.connections, options.number))


if __name__ == "__main__":
    main()
