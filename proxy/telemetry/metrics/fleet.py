"""How a fleet of replicas fares, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.fleet import Role
from proxy.telemetry.metrics.names import Name

if TYPE_CHECKING:
    from proxy.core.fleet import Member
    from proxy.telemetry.metrics.live import Readings


@dataclass(slots=True)
class FleetCounts:
    """What has happened since the start."""

    beats: int = 0
    failed_beats: int = 0
    beat_seconds: float = 0.0
    """Of all that were answered."""
    letters_sent: int = 0
    letters_failed: int = 0
    letters_fenced: int = 0
    """Not sent, as somebody else leads by now."""
    letters_received: int = 0
    letters_unread: int = 0
    """Not understood."""
    leaders: int = 0
    """How often another replica than before led."""


def watch_fleet(readings: Readings, member: Member, counts: FleetCounts) -> None:
    """Show who decides, and how the replicas hear of each other."""
    readings.watch(
        Name("slai.fleet.role", "1 for what this replica is: who decides on its requests", labels=("role",)),
        lambda: [((role.value,), member.role is role) for role in Role],
    )
    readings.watch(Name("slai.fleet.replicas", "Replicas known to live"), lambda: [((), member.replicas)])

    def count(name: str, description: str, field: str, unit: str = "") -> None:
        readings.watch(Name(name, description, unit), lambda: [((), getattr(counts, field))], counts=True)

    count("slai.fleet.beats", "Signs of life that the store answered", "beats")
    count("slai.fleet.beat.failures", "Signs of life that it did not answer in time", "failed_beats")
    count("slai.fleet.beat.duration", "Time that it took to answer them", "beat_seconds", "s")
    count("slai.fleet.leader.changes", "Times that another replica than before led", "leaders")
    readings.watch(
        Name("slai.fleet.letters", "Letters to and from other replicas", labels=("fate",)),
        lambda: [
            (("sent",), counts.letters_sent),
            (("failed",), counts.letters_failed),
            (("fenced",), counts.letters_fenced),
            (("received",), counts.letters_received),
            (("unread",), counts.letters_unread),
            (("lost",), member.lost_letters),
        ],
        counts=True,
    )
