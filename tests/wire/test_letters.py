from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from msgspec import msgpack

from proxy.core.feedback import DelaySnapshot
from proxy.core.fleet import Letter
from proxy.core.fleet import letters as notes
from proxy.core.prefix import PromptBlocks
from proxy.core.quota import QuotaLimits, QuotaReason
from proxy.core.request import RejectReason, Request, RequestClass
from proxy.core.stepmodel import OnlineStepModel
from proxy.wire.letters import LetterError, decode_letter, encode_letter

REQUEST = Request(
    "7",
    1234,
    model="m" * 1000,
    max_tokens=5,
    request_class=RequestClass("strict", 2.0, 0.1, weight=3.0, ttft_limit_seconds=inf),
    sliceable=True,
    size_bytes=1 << 40,
    streamed=False,
    blocks=PromptBlocks((2**64 - 1, 0), (128, 256)),
    tenant="städt ",
    fingerprint=b"\x00\xff",
    waited_before_seconds=1.5,
    sequences=3,
    may_wait=False,
)
LIMITS = QuotaLimits(60, None, 3)
EVERY_NOTE = (
    notes.Waits(REQUEST, 0.25, 7),
    notes.Announced(
        (notes.Waits(REQUEST, 1.0),),
        (notes.Runs(REQUEST, 2.0, "e", 17),),
        {"e": 2},
        claims=(notes.Claimed(7, "acme-1", LIMITS, True, 100, None, 356),),
        owed={"acme-1": (2.0, 3.5)},
        spent=notes.Spent({"acme-1": (2.0, 3.5, 256.0)}),
    ),
    notes.Produced({"7": 1, "8": 3}),
    notes.Over("7", None, 12, served=False),
    notes.TurnedAway("7", 1.5),
    notes.Counted("7", 1300),
    notes.SliceOver("7", -4, cached=True, found_tokens=256),
    notes.Passing("e", begins=True),
    notes.Claims(7, "acme-1", LIMITS),
    notes.Reserves(7, 100, None),
    notes.Settles(7, 98, 20),
    notes.Leaves(),
    notes.Welcome(),
    notes.Call(),
    notes.Send("7", "e"),
    notes.Refuse("7", RejectReason.TOO_LATE, 1.5, None),
    notes.SendSlice("7", "e", 512, 256, 9),
    notes.CutOff("7", "e"),
    notes.Judged(7, None, (60, 0, 1.5), None, QuotaReason.REQUESTS, 60, 1.0),
    notes.Spent({"acme-1": (1.5, 100.0, 256.0)}),
    notes.Learnt("e", OnlineStepModel().snapshot(), DelaySnapshot((0.0, 0.0), (0.005, 0.001), (0.0, 1.0))),
)


def replace_limits(requests_per_minute: int) -> QuotaLimits:
    """Limits that nobody could make."""
    limits = QuotaLimits(1)
    object.__setattr__(limits, "requests_per_minute", requests_per_minute)
    return limits


def letter(*told: notes.Note) -> Letter:
    return Letter(
        "replica-a", "replica-b", 1_764_500_000_123_456, leads=False, session=3, number=9, heard=8, notes=told
    )


def test_a_letter_comes_back_as_it_was_with_every_kind_of_note() -> None:
    assert {type(note) for note in EVERY_NOTE} == set(notes.Note.__args__)
    assert decode_letter(encode_letter(letter(*EVERY_NOTE))) == letter(*EVERY_NOTE)


def test_fields_that_a_later_release_adds_at_the_end_are_left_alone() -> None:
    told: list[Any] = msgpack.decode(encode_letter(letter(*EVERY_NOTE)))
    told[-1] = [[*note, "something", 7] for note in told[-1] if note[0] not in {"Announced", "Runs"}]
    found = decode_letter(msgpack.encode([*told, {"more": 1}]))
    assert found.notes == tuple(note for note in EVERY_NOTE if not isinstance(note, notes.Announced | notes.Runs))


def test_fields_that_an_earlier_release_does_not_write_have_their_defaults() -> None:
    told: list[Any] = msgpack.decode(encode_letter(letter(notes.Waits(REQUEST, 0.25), notes.Announced((), (), {}))))
    told[-1] = [told[-1][0][:3], told[-1][1][:4]]
    found = decode_letter(msgpack.encode(told))
    assert found.notes == (notes.Waits(REQUEST, 0.25), notes.Announced((), (), {}))


def test_a_kind_of_note_that_is_not_known_makes_a_letter_of_another_version() -> None:
    told: list[Any] = msgpack.decode(encode_letter(letter(notes.Call())))
    told[-1] = [["Sings", "a song"]]
    with pytest.raises(LetterError, match="no letter of this version"):
        decode_letter(msgpack.encode(told))


def test_long_names_survive() -> None:
    (note,) = decode_letter(encode_letter(letter(notes.Waits(REQUEST, 0.0)))).notes
    assert isinstance(note, notes.Waits)
    assert note.request.model == "m" * 1000


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x90", b"junk", encode_letter(letter(*EVERY_NOTE))[:-1], b"\xd9\x01\xff"]
)
def test_what_is_no_letter_is_told_as_such(data: bytes) -> None:
    with pytest.raises(LetterError):
        decode_letter(data)


def test_values_that_the_core_does_not_take_are_refused() -> None:
    good = encode_letter(letter(notes.Waits(Request("7", 1, request_class=RequestClass("c", weight=2.0)), 0.0)))
    with pytest.raises(LetterError):
        decode_letter(good.replace(b"\xcb\x40\x00\x00\x00\x00\x00\x00\x00", b"\xcb\xc0\x00\x00\x00\x00\x00\x00\x00"))


@pytest.mark.parametrize(
    "note",
    [
        notes.Waits(REQUEST, nan),
        notes.Waits(REQUEST, inf),
        notes.Announced((), (notes.Runs(REQUEST, -inf, "e", 1),), {}),
        notes.TurnedAway("7", inf),
        notes.Judged(7, None, None, (5, 1, nan)),
        notes.Spent({"k": (inf, 0.0, 0.0)}),
        notes.Announced((), (), {}, owed={"k": (-1.0, 0.0)}),
        notes.Announced((), (), {"e": 2**40}),
        notes.Claims(7, "k", replace_limits(0)),
        notes.Settles(7, -1, 0),
    ],
)
def test_times_that_nobody_can_reckon_with_are_refused(note: notes.Note) -> None:
    with pytest.raises(LetterError):
        decode_letter(encode_letter(letter(note)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": -1},
        {"sequences": 0},
        {"size_bytes": -1},
        {"waited_before_seconds": nan},
        {"request_class": RequestClass("c", ttft_limit_seconds=nan)},
    ],
)
def test_requests_that_would_upset_the_order_are_refused(wrong: dict[str, Any]) -> None:
    request = replace(REQUEST, **wrong)
    with pytest.raises(ValueError, match="request's"):
        notes.Waits(request, 0.0)
    good = encode_letter(letter(notes.Waits(REQUEST, 0.0)))
    with pytest.raises(LetterError):
        decode_letter(good.replace(msgpack.encode(REQUEST), msgpack.encode(request)))
