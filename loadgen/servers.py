"""Servers at the end of URLs, as one thing to measure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadgen.client import Api
from loadgen.processes import run_in_processes
from loadgen.runner import run_workload
from loadgen.texts import measure_texts

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from loadgen.results import Result
    from loadgen.runner import Display
    from proxy.sim.workload import ScheduledRequest


@dataclass(frozen=True, slots=True)
class LiveServer:
    """Servers that answer at ``urls``, which get the requests in turn."""

    urls: tuple[str, ...]
    model: str
    api: Api = Api.COMPLETIONS
    time_scale: float = 1.0
    timeout_seconds: float = 600.0
    send_class: bool = False
    processes: int = 1
    """From which requests are sent."""
    api_key: str | None = field(default=None, repr=False)
    standard: bool = False
    """Whether only fields of OpenAI's own API are sent."""
    tell: Callable[[str], None] = lambda _: None
    """Hears of lengths that cannot be exact."""

    async def serve(
        self,
        workload: Sequence[ScheduledRequest],
        *,
        progress: Display | None = None,
        stop: asyncio.Event | None = None,
        records: list[Result] | None = None,
        nonce: int | None = None,
    ) -> list[Result]:
        """Send ``workload``; see ``run_workload``. From several processes ``records`` are there at the end only."""
        nonce = secrets.randbits(53) if nonce is None else nonce  # as large as any JSON reader holds exactly
        how: dict[str, Any] = {
            "model": self.model,
            "api": self.api,
            "time_scale": self.time_scale,
            "timeout_seconds": self.timeout_seconds,
            "send_class": self.send_class,
            "nonce": nonce,
            "api_key": self.api_key,
            "standard": self.standard,
        }
        if self.api is Api.CHAT:
            how["texts"] = await measure_texts(
                self.urls[0], self.model, workload, nonce, api_key=self.api_key, tell=self.tell
            )
        if self.processes == 1:
            return await run_workload(workload, self.urls, progress=progress, stop=stop, records=records, **how)
        found = await run_in_processes(
            workload, self.urls, processes=self.processes, progress=progress, stop=stop, **how
        )
        if records is not None:
            records.extend(found)
        return found

    def describe(self) -> dict[str, Any]:
        """For a report's ``config``."""
        return {
            "urls": list(self.urls),
            "model": self.model,
            "api": str(self.api),
            "time_scale": self.time_scale,
            "timeout_s": self.timeout_seconds,
            "send_class": self.send_class,
            "processes": self.processes,
            "standard_only": self.standard,
        }
