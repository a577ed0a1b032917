"""What only slai-proxy says of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from scripted_engine import DONE, last, token

from conformance.suite import Bench, Claim, case, check, equal

if TYPE_CHECKING:
    from conformance.upstream import Seen

AREA = "slai-proxy"


@case(
    AREA,
    "x-slo-... and x-slai-... headers of the client",
    right="they do not reach the engine",
    why="they are for the proxy, and no client may speak in its name",
    needs=(Claim.SLAI,),
)
async def own_headers_end_here(t: Bench) -> None:
    await t.post(t.body(), "x-slo-class: strict", "x-slo-ttft-ms: 5000", "x-slai-no-queue: 0")
    check(not [n for n, _ in t.calls[0].headers if n.lower().startswith(("x-slo-", "x-slai-"))], "they reached it")


@case(
    AREA,
    "an unknown class, deadlines that are none",
    right="400 that names the header",
    why="a typing error must not turn into a default",
    needs=(Claim.SLAI,),
)
async def wrong_own_headers(t: Bench) -> None:
    for header in ("x-slo-class: nobody's", "x-slo-ttft-ms: -1", "x-slo-tbt-ms: nan", "x-slai-no-queue: maybe"):
        answer = await t.post(t.body(), header)
        equal(answer.status, 400, f"status for {header}")
        equal(answer.json()["error"]["param"], header.partition(":")[0], "param")


@case(
    AREA,
    "/v1/models, /livez, /readyz, /health, /metrics",
    right="answered by the proxy, without an engine's help",
    why="probes must not depend on a busy engine",
    needs=(Claim.SLAI,),
)
async def own_paths(t: Bench) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics", "/v1/models"):
        answer = await t.get(path)
        equal(answer.status, 200, f"status of {path}")
    equal([entry["id"] for entry in (await t.get("/v1/models")).json()["data"]], [t.model], "models")


@case(
    AREA,
    "100 names of models, classes and paths that clients make up",
    right="/metrics does not grow",
    why="every label value is memory for ever, here and in the monitoring",
    needs=(Claim.SLAI,),
    alone=True,
)
async def made_up_names_make_no_series(t: Bench) -> None:
    async def series() -> int:
        return len((await t.get("/metrics")).body.splitlines())

    async def made_up(number: int) -> None:
        await t.post(t.body(model=f"made-up-{number}"))
        await t.post(t.body(), f"x-slo-class: made-up-{number}")
        await t.get(f"/made-up-{number}?{t.token}")

    await made_up(0)
    before = await series()
    await asyncio.gather(*(made_up(number) for number in range(1, 100)))
    check(await series() <= before + 10, f"{await series() - before} more lines")


@case(
    AREA,
    "a stream that is cut, by the proxy's own count",
    right="one engine_failed more, and no completed",
    why="a cut stream counted as a success hides a dying engine",
    needs=(Claim.SLAI,),
    alone=True,
)
async def a_cut_is_counted_as_one(t: Bench) -> None:
    async def counts() -> dict[str, float]:
        found: dict[str, float] = {}
        for line in (await t.get("/metrics")).body.decode().splitlines():
            if line.startswith("slai_requests_total{"):
                outcome = line.partition('outcome="')[2].partition('"')[0]
                found[outcome] = found.get(outcome, 0) + float(line.rpartition(" ")[2])
        return found

    async def script(call: Seen) -> None:
        await call.begin()
        await call.write(token("a"))
        call.reset()

    before = await counts()
    t.script(script)
    await t.post()
    t.stream(token("a"), last(), DONE)
    await t.post()
    after = await counts()
    changed = {outcome: after[outcome] - before.get(outcome, 0) for outcome in after}
    equal({o: n for o, n in changed.items() if n}, {"engine_failed": 1, "completed": 1}, "outcomes")
