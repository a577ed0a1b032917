"""What replicas tell each other.

Times travel as ages, never as readings of a host's clock. Requests go by the number that their own replica gave them.
"""

from __future__ import annotations

from math import isfinite, isnan
from typing import Annotated

import msgspec

from proxy.core.feedback import DelaySnapshot
from proxy.core.quota import QuotaLimits, QuotaReason
from proxy.core.request import RejectReason, Request
from proxy.core.stepmodel import StepModelSnapshot

Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""What is reckoned with here is a number of seconds: neither infinite nor none."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=2**53)]
Connections = Annotated[int, msgspec.Meta(ge=-(2**20), le=2**20)]
"""Each is told to the scheduler by itself."""


class _Note(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One thing told. As an array on the wire: a letter with the tokens of a step is sent for every step."""


# -- to the leader: what happened --


class Waits(_Note, frozen=True):
    """A request that waits at its replica for the leader's decision."""

    request: Request
    age_seconds: Seconds
    """Since its arrival."""
    claim: int = 0
    """Number of the claim that has to be granted first; 0: of none."""

    def __post_init__(self) -> None:
        _check(self.request)


class Runs(_Note, frozen=True):
    """A request that an engine has."""

    request: Request
    age_seconds: Seconds
    engine_id: str
    tokens: int
    """Of its answer, so far."""

    def __post_init__(self) -> None:
        _check(self.request)


class Claimed(_Note, frozen=True):
    """A claim of a request that its replica has, and what it was granted (see ``core.claims``)."""

    number: int
    key: str
    limits: QuotaLimits
    begun: bool
    prompt_tokens: Count | None
    """``None``: it has asked for no tokens yet."""
    max_tokens: Count | None
    granted_tokens: Count | None


class Spent(_Note, frozen=True):
    """What is used of the quotas of API keys that others would have to know if the leader were gone."""

    keys: dict[str, tuple[Amount, Amount, Amount]]
    """Requests, tokens, and the tokens that an answer usually has."""


class Announced(_Note, frozen=True):
    """What a replica has, or a part of that; all of it takes the place of all that was known."""

    waiting: tuple[Waits, ...]
    running: tuple[Runs, ...]
    passing: dict[str, Connections]
    """Requests that were given past the queue and are not over, by engine."""
    more: bool = False
    """Whether another part follows, in a letter of its own: so none is too long for anybody."""
    claims: tuple[Claimed, ...] = ()
    owed: dict[str, tuple[Amount, Amount]] = {}
    """Requests and tokens that were used while the replica decided alone, by the API key."""
    spent: Spent | None = None
    """What the leader before has told of all quotas."""


class Produced(_Note, frozen=True):
    """Tokens came: chunks by request, all that came since the last letter."""

    chunks: dict[str, int]


class Over(_Note, frozen=True):
    """See ``events.Ended``."""

    request_id: str
    tokens: int | None = None
    cached_tokens: int | None = None
    served: bool | None = None


class TurnedAway(_Note, frozen=True):
    """See ``events.NotStarted``."""

    request_id: str
    back_off_seconds: Seconds | None = None


class Counted(_Note, frozen=True):
    """See ``events.Tokenized``."""

    request_id: str
    prompt_tokens: int


class SliceOver(_Note, frozen=True):
    """See ``events.SliceEnded``; ``number`` is the leader's."""

    request_id: str
    number: int
    cached: bool
    found_tokens: int | None = None


class Passing(_Note, frozen=True):
    """See ``events.Passed``."""

    engine_id: str
    begins: bool


class Claims(_Note, frozen=True):
    """A request wants to be let in, by a quota of its API key."""

    number: int
    key: str
    limits: QuotaLimits


class Reserves(_Note, frozen=True):
    """A request wants to use tokens of its API key's quota."""

    number: int
    prompt_tokens: Count
    max_tokens: Count | None


class Settles(_Note, frozen=True):
    """A request with a claim is over, and has used so much."""

    number: int
    prompt_tokens: Count
    output_tokens: Count


class Leaves(_Note, frozen=True):
    """From a follower: it ends. From the leader: it leads no more, as it drains."""

    remains: bool = False
    """Whether it still has requests in flight, or that hold a part of a quota."""


# -- from the leader: what is to be done --


class Welcome(_Note, frozen=True):
    """The leader has all that was announced: so that the letter that acknowledges it goes at once."""


class Call(_Note, frozen=True):
    """The leader wants to know all that the replica has: it has just taken over, or a letter was lost."""


class Send(_Note, frozen=True):
    """See ``actions.Dispatch``."""

    request_id: str
    engine_id: str


class Refuse(_Note, frozen=True):
    """See ``actions.Reject``."""

    request_id: str
    reason: RejectReason
    retry_after_seconds: float | None = None
    estimated_wait_seconds: float | None = None


class SendSlice(_Note, frozen=True):
    """See ``actions.Slice``."""

    request_id: str
    engine_id: str
    tokens: int
    held_tokens: int
    number: int


class CutOff(_Note, frozen=True):
    """See ``actions.Cut``."""

    request_id: str
    engine_id: str


class Judged(_Note, frozen=True):
    """A claim is granted as far as it goes, or refused for a reason."""

    number: int
    granted_tokens: Count | None
    """``None``: it has asked for none."""
    requests: tuple[Count, Count, Seconds] | None
    """The key's limit, what is left of it, and when all of it is there again; the same of tokens."""
    tokens: tuple[Count, Count, Seconds] | None
    reason: QuotaReason | None = None
    limit: Count = 0
    retry_after_seconds: Seconds | None = None


class Learnt(_Note, frozen=True):
    """What the leader has learnt of an engine, which nobody else sees whole."""

    engine_id: str
    steps: StepModelSnapshot | None
    delay: DelaySnapshot | None


Note = (
    Waits
    | Announced
    | Produced
    | Over
    | TurnedAway
    | Counted
    | SliceOver
    | Passing
    | Claims
    | Reserves
    | Settles
    | Leaves
    | Welcome
    | Call
    | Send
    | Refuse
    | SendSlice
    | CutOff
    | Judged
    | Spent
    | Learnt
)


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """Notes from one replica to another, in the order in which they were made.

    A session between a follower and a leader begins with the follower's announcement. Its letters are numbered in each
    direction, so that a lost one is missed; then there is a new session.
    """

    sender: str
    to: str
    epoch: int
    """Of the leader, who is one of the two."""
    leads: bool
    """Whether the sender writes as that leader: to be posted only while the store says so, too."""
    session: int
    """The follower's number for it."""
    number: int
    """1, 2, 3, ... in this session from this sender; 0: of no session."""
    heard: int
    """Number of the last letter that the sender had from the other."""
    notes: tuple[Note, ...] = ()


def _check(request: Request) -> None:
    """Refuse what would upset the order of all requests.

    Raises:
        ValueError: there is such a thing.
    """
    promised = request.request_class
    limits = (promised.ttft_seconds, promised.tbt_seconds, promised.ttft_limit_seconds)
    if not isfinite(request.waited_before_seconds) or any(limit is not None and isnan(limit) for limit in limits):
        raise ValueError("a request's times are numbers")
    if request.prompt_tokens < 0 or request.sequences < 1 or request.size_bytes < 0:
        raise ValueError("a request's sizes are not negative")
