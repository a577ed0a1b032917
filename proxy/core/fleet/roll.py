"""What a replica has told that it has, kept until whoever asked takes it over."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.fleet import letters

if TYPE_CHECKING:
    from proxy.core.fleet.judging import ClaimNote
    from proxy.core.fleet.letters import Note
    from proxy.core.request import Request


class Held(NamedTuple):
    """A request of another replica, by its own id there. ``engine_id``: empty while it waits."""

    request: Request
    arrived_at: float
    engine_id: str = ""
    tokens: int = 0
    claim: int = 0


class Roll:
    """All that one replica has, from its announcement on."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.passing: Counter[str] = Counter()
        self.claims: list[letters.Claimed] = []
        self.owed: dict[str, tuple[float, float]] = {}
        self.spent: dict[str, tuple[float, float, float]] = {}
        self.claim_notes: list[ClaimNote] = []
        """What has become of claims since."""
        self.complete = False

    def announce(self, part: letters.Announced, now: float) -> None:
        """Take in a part of the announcement."""
        for waits in part.waiting:
            self.held[waits.request.id] = Held(waits.request, now - waits.age_seconds, claim=waits.claim)
        for runs in part.running:
            self.held[runs.request.id] = Held(runs.request, now - runs.age_seconds, runs.engine_id, runs.tokens)
        self.passing.update(part.passing)
        self.claims += part.claims
        self.owed |= part.owed
        if part.spent is not None:
            self.spent |= part.spent.keys
        self.complete = not part.more

    def take(self, note: Note, now: float) -> None:
        """Take in what has happened since."""
        match note:
            case letters.Waits(request, age_seconds, claim):
                self.held[request.id] = Held(request, now - age_seconds, claim=claim)
            case letters.Claims() | letters.Reserves() | letters.Settles():
                self.claim_notes.append(note)
            case letters.Produced(chunks):
                for request_id, count in chunks.items():
                    if (of := self.held.get(request_id)) is not None and of.engine_id:
                        self.held[request_id] = of._replace(tokens=of.tokens + count)
            case letters.Over(request_id):
                self.held.pop(request_id, None)
            case letters.TurnedAway(request_id):
                if (of := self.held.get(request_id)) is not None:
                    self.held[request_id] = Held(of.request, of.arrived_at)
            case letters.Counted(request_id, prompt_tokens):
                if (of := self.held.get(request_id)) is not None:
                    request = replace(of.request, prompt_tokens=prompt_tokens, sliceable=True)
                    self.held[request_id] = of._replace(request=request)
            case letters.Passing(engine_id, begins):
                self.passing[engine_id] += 1 if begins else -1
