"""The quotas of API keys over a fleet: one leads and counts for all, and what is counted outlives it."""

from typing import Any

import pytest
from fleet_net import FleetNet

from proxy.core.claims import Claim
from proxy.core.events import Ended
from proxy.core.fleet import Role
from proxy.core.fleet.letters import Announced, Claims, Judged, Reserves, Send, Waits
from proxy.core.quota import QuotaLimits, QuotaReason, Usage

BEAT, LIFE, PATIENCE, HOP = 0.5, 2.0, 1.0, 0.001


def a_fleet(replicas: int = 3, *, others: dict[str, QuotaLimits] | None = None, **limits: Any) -> FleetNet:
    """``r1`` leads, ``r2`` and so on follow. The key ``k`` has ``limits``."""
    net = FleetNet(quotas={"k": QuotaLimits(**limits)} | (others or {}))
    for _ in range(replicas):
        net.start()
    net.run(3.0)
    return net


def claim(net: FleetNet, name: str, prompt: int | None = None, most: int | None = None, *, key: str = "k") -> Claim:
    """Claim, and hear the answer if there is one soon."""
    found = net.claim(name, prompt, most, key=key)
    net.run(3 * HOP)
    return found


def refused(of: Claim) -> QuotaReason:
    assert of.refusal is not None, of
    return of.refusal.reason


def lead_over(net: FleetNet) -> str:
    """Wait until another one leads, and return its name."""
    net.run(LIFE + 2.0)
    (leader,) = net.leaders
    return leader.id


def used(net: FleetNet, name: str) -> Usage:
    return net.member(name).claims.quotas["k"].used(net.now)


def held(net: FleetNet, name: str) -> tuple[int, int]:
    quota = net.member(name).claims.quotas["k"]
    return quota.active, quota.reserved


# -- one leads --


def test_requests_at_once_are_counted_over_all_replicas() -> None:
    net = a_fleet(concurrency=2)
    first, second = claim(net, "r2"), claim(net, "r3")
    assert (first.begun, second.begun) == (True, True)
    assert refused(claim(net, "r1")) is QuotaReason.CONCURRENCY
    assert refused(claim(net, "r2")) is QuotaReason.CONCURRENCY
    net.settle(first)
    net.run(3 * HOP)
    assert claim(net, "r3").begun


def test_requests_per_minute_are_counted_over_all_replicas() -> None:
    net = a_fleet(requests_per_minute=4)
    found = [claim(net, f"r{number % 3 + 1}") for number in range(9)]
    assert [of.begun for of in found] == [True] * 4 + [False] * 5
    assert {refused(of) for of in found[4:]} == {QuotaReason.REQUESTS}
    waits = [of.refusal.retry_after_seconds or 0 for of in found[4:] if of.refusal]
    assert waits == pytest.approx([15.0, 30.0, 45.0, 60.0, 75.0], abs=0.1), "one after the other, wherever they came"
    net.run(30.0)
    assert [claim(net, name).begun for name in ("r1", "r2", "r3")] == [True, True, False]


def test_tokens_are_held_and_taken_over_all_replicas() -> None:
    net = a_fleet(tokens_per_minute=1000)
    first = claim(net, "r2", 300, 200)
    assert first.granted_tokens == 500
    assert refused(claim(net, "r3", 300, 300)) is QuotaReason.TOKENS
    net.settle(first, 300, 10)
    net.run(3 * HOP)
    assert claim(net, "r3", 300, 300).granted_tokens == 600
    assert refused(claim(net, "r1", 300, 300)) is QuotaReason.TOKENS


def test_a_replica_tells_its_clients_what_the_leader_counts() -> None:
    net = a_fleet(requests_per_minute=10, tokens_per_minute=1000)
    claim(net, "r1", 100, 100)
    found = claim(net, "r2", 100, 100)
    requests, tokens = net.member("r2").claims.quotas.left(found, net.now)
    assert requests is not None
    assert tokens is not None
    assert (requests.limit, requests.remaining) == (10, 8)
    assert (tokens.limit, tokens.remaining) == (1000, 600)
    prompt = claim(net, "r2", 2000, 1)
    assert prompt.refusal is not None
    assert prompt.refusal.retry_after_seconds is None, "never: it is longer than the limit"


def test_keys_have_quotas_of_their_own_and_those_without_limits_ask_nobody() -> None:
    net = a_fleet(concurrency=1, others={"other": QuotaLimits(concurrency=1), "free": QuotaLimits()})
    assert claim(net, "r2").begun
    assert claim(net, "r2", key="other").begun
    letters = net.letters
    assert net.claim("r2", 10, 10, key="free").begun
    assert net.letters == letters


def test_a_key_that_the_leader_does_not_know_yet_has_the_limits_that_its_replica_knows() -> None:
    net = a_fleet(concurrency=2)
    net.member("r1").claims.quotas.change({}, net.now)
    assert [claim(net, name).begun for name in ("r2", "r3", "r2")] == [True, True, False]


def test_other_limits_of_a_key_that_the_leader_does_not_know_hold_at_once() -> None:
    net = a_fleet(concurrency=1)
    net.member("r1").claims.quotas.change({}, net.now)
    assert [claim(net, "r2").begun for _ in range(2)] == [True, False]
    net.quotas = {"k": QuotaLimits(concurrency=2)}
    assert [claim(net, "r2").begun for _ in range(2)] == [True, False]


def test_a_request_and_its_claim_go_in_one_letter_and_come_back_in_one() -> None:
    net = a_fleet(2, tokens_per_minute=1000)
    net.sent_letters.clear()
    net.arrive("r2", claim=net.claim("r2", 100, 50))
    net.run(3 * HOP)
    there, back = ([type(note) for note in letter.notes] for letter in net.sent_letters)
    assert there == [Claims, Reserves, Waits]
    assert back == [Judged, Judged, Send]
    assert net.calls["r2", "1"].engine


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 100}, {"requests_per_minute": 1}, {"concurrency": 1}])
def test_a_request_whose_claim_is_refused_waits_nowhere(limits: dict[str, Any]) -> None:
    net = a_fleet(**limits)
    claim(net, "r3", 60, 30)
    net.arrive("r2", claim=net.claim("r2", 60, 30))
    net.run(HOP)
    assert not net.member("r1").scheduler.ledger.entries
    net.run(2 * HOP)
    assert net.calls["r2", "1"].outcome in limits
    assert not net.member("r2")._following.waiting


def test_a_client_that_leaves_before_its_claim_is_judged_leaves_nothing() -> None:
    net = a_fleet(concurrency=1)
    found = net.claim("r2", 10, 10)
    request_id = net.arrive("r2", claim=found)
    net.feed("r2", Ended(request_id))
    net.calls["r2", request_id].outcome = "gone"
    net.settle(found)
    net.run(3 * HOP)
    assert held(net, "r1") == (0, 0)
    assert claim(net, "r3").begun


# -- letters are lost, replicas come and go --


def test_a_claim_whose_letter_is_lost_is_made_again_and_counted_once() -> None:
    net = a_fleet(requests_per_minute=10, tokens_per_minute=1000)
    net.losing = 1
    found = net.claim("r2", 100, 100)
    net.run(2 * BEAT)
    assert found.granted_tokens == 200
    net.run(1.0)
    assert used(net, "r1").requests < 1.0
    assert held(net, "r1") == (1, 200)


def test_a_claim_whose_answer_is_lost_is_answered_again_and_counted_once() -> None:
    net = a_fleet(requests_per_minute=10, tokens_per_minute=1000)
    found = net.claim("r2", 100, 100)
    net.run(HOP / 2)
    net.losing = 1
    net.run(2 * BEAT)
    assert found.granted_tokens == 200
    assert held(net, "r1") == (1, 200)
    assert used(net, "r1").requests < 1.0


def test_what_a_replica_held_that_dies_counts_as_used() -> None:
    net = a_fleet(tokens_per_minute=1000, concurrency=1)
    assert claim(net, "r2", 100, 500).granted_tokens == 600
    net.kill("r2")
    net.run(2 * LIFE)
    assert held(net, "r1") == (0, 0)
    assert 500 < used(net, "r1").tokens <= 600


def test_a_replica_that_leaves_in_order_has_settled_all() -> None:
    net = a_fleet(tokens_per_minute=1000)
    found = claim(net, "r2", 100, 500)
    net.drain("r2")
    net.settle(found, 100, 20)
    net.finish("r2")
    net.run(3 * HOP)
    assert held(net, "r1") == (0, 0)
    assert 119 < used(net, "r1").tokens <= 120


def test_a_leader_that_drains_hands_all_that_it_has_counted_over() -> None:
    net = a_fleet(requests_per_minute=10, tokens_per_minute=6000)
    mine, other = claim(net, "r1", 100, 100), claim(net, "r2", 100, 100)
    net.settle(claim(net, "r3", 2000, 0), 2000, 0)
    net.run(3 * HOP)
    at = net.now
    net.drain("r1")
    net.run(1.0)
    (leader,) = net.leaders
    assert leader.id in {"r2", "r3"}
    assert held(net, leader.id) == (2, 400)
    found = used(net, leader.id)
    assert found.requests == pytest.approx(3 - (net.now - at) / 6, abs=0.01)
    assert found.tokens == pytest.approx(2000 - 100 * (net.now - at), abs=2)
    net.settle(mine, 100, 50)
    net.settle(other, 100, 50)
    net.run(3 * HOP)
    assert held(net, leader.id) == (0, 0)


def test_who_leads_after_one_that_died_knows_what_was_used_before_its_last_beat() -> None:
    net = a_fleet(requests_per_minute=10, tokens_per_minute=6000)
    going_on = claim(net, "r2", 100, 100)
    net.settle(claim(net, "r1", 3000, 0), 3000, 0)
    net.run(BEAT + 2 * HOP)
    net.settle(claim(net, "r1", 700, 0), 700, 0)  # of this nobody hears
    net.settle(claim(net, "r3", 500, 0), 500, 0)
    net.run(3 * HOP)
    at = net.now
    net.kill("r1")
    leader = lead_over(net)
    assert held(net, leader) == (1, 200), "of those who live"
    assert used(net, leader).tokens == pytest.approx(3500 - 100 * (net.now - at), abs=400)
    assert used(net, leader).tokens < 3500
    net.settle(going_on, 100, 100)
    net.run(3 * HOP)
    assert held(net, leader) == (0, 0)


def test_who_has_just_come_and_leads_hears_from_the_others_what_was_used() -> None:
    net = a_fleet(2, tokens_per_minute=60_000)
    net.settle(claim(net, "r2", 50_000, 0), 50_000, 0)
    net.run(BEAT + 2 * HOP)
    net.kill("r1")
    net.pause("r2")
    net.start("new")
    net.run(1.5 * LIFE)
    net.resume("r2")
    net.run(3.0)
    (leader,) = net.leaders
    assert leader.id == "new"
    assert used(net, "new").tokens > 40_000


def test_what_ends_while_nobody_leads_is_charged_by_the_next_leader() -> None:
    net = a_fleet(tokens_per_minute=6000)
    found = claim(net, "r2", 1000, 1000)
    net.run(1.0)
    net.kill("r1")
    net.run(0.1)
    at = net.now
    net.settle(found, 1000, 800)
    leader = lead_over(net)
    assert held(net, leader) == (0, 0)
    assert 1800 - 100 * (net.now - at) - 1 <= used(net, leader).tokens <= 1800


def test_a_claim_that_is_made_while_nobody_leads_is_judged_by_the_next_leader() -> None:
    net = a_fleet(concurrency=2)
    net.kill("r1")
    found = [net.claim(name) for name in ("r2", "r3", "r2", "r3")]
    net.arrive("r3", claim=found[3])
    net.run(0.5)
    assert all(of.pending for of in found)
    lead_over(net)
    assert sum(of.begun for of in found) == 2
    assert sum(of.refusal is not None for of in found) == 2
    assert net.calls["r3", "1"].engine if found[3].begun else net.calls["r3", "1"].outcome == "concurrency"


def test_a_leader_that_has_stood_still_judges_nothing_when_it_wakes() -> None:
    net = a_fleet(concurrency=1)
    net.pause("r1")
    net.run(2 * LIFE)
    assert claim(net, "r2").begun
    replica = net.replicas["r1"]
    replica.paused = False
    found = net.claim("r1")
    assert found.pending
    net.run(2.0)
    assert refused(found) is QuotaReason.CONCURRENCY


# -- each alone --


def test_replicas_that_decide_alone_have_a_part_of_every_quota_each() -> None:
    net = a_fleet(requests_per_minute=30, tokens_per_minute=3000, concurrency=6)
    open_before = claim(net, "r2", 100, 100)
    net.store_up = False
    net.run(3.0)
    assert {r.member.role for r in net.replicas.values()} == {Role.LOCAL}
    found = {name: [net.claim(name) for _ in range(5)] for name in net.replicas}
    assert {name: sum(of.begun for of in claims) for name, claims in found.items()} == {"r1": 2, "r2": 1, "r3": 2}
    net.settle(open_before, 100, 0)
    for of in [of for claims in found.values() for of in claims]:
        net.settle(of)
    begun = [of for name in net.replicas for of in [net.claim(name, 150, 150) for _ in range(9)] if of.granted_tokens]
    assert len(begun) == 6, "two of each, by concurrency"
    assert len(net.let_in) <= 30 + 30 * net.now / 60
    for of in begun:
        net.settle(of, 150, 300)
    assert refused(net.claim("r1", 150, 0)) is QuotaReason.TOKENS
    assert net.claim("r1", 50, 0).granted_tokens == 50


def test_what_was_used_alone_is_charged_when_they_are_one_again() -> None:
    net = a_fleet(tokens_per_minute=3000)
    net.store_up = False
    net.run(3.0)
    for name in net.replicas:
        net.settle(net.claim(name, 900, 0), 900, 0)
    going_on = net.claim("r2", 50, 0)
    net.store_up = True
    at = net.now
    net.run(3.0)
    (leader,) = net.leaders
    assert used(net, leader.id).tokens == pytest.approx(2700 - 50 * (net.now - at), abs=50)
    assert held(net, leader.id) == (1, 50)
    too_much = claim(net, "r3", 900, 0)
    assert refused(too_much) is QuotaReason.TOKENS
    net.settle(too_much)
    net.settle(going_on, 50, 0)
    net.run(3 * HOP)
    assert held(net, leader.id) == (0, 0)


@pytest.mark.parametrize("apart", [{"r2"}, {"r1", "r2"}])
def test_what_was_used_before_replicas_were_apart_counts_once(apart: set[str]) -> None:
    net = a_fleet(2, tokens_per_minute=6000)
    net.settle(claim(net, "r1", 4000, 0), 4000, 0)
    net.run(BEAT + 2 * HOP)
    at = net.now
    net.cut_off = set(apart)
    net.run(1.6)
    assert {name for name in net.replicas if net.member(name).role is Role.LOCAL} == apart
    net.settle(net.claim("r2", 500, 0), 500, 0)
    net.cut_off.clear()
    net.run(3.0)
    (leader,) = net.leaders
    assert used(net, leader.id).tokens == pytest.approx(4500 - 100 * (net.now - at), abs=100)


def test_what_was_used_alone_is_charged_once_though_the_leader_is_not_heard() -> None:
    net = a_fleet(2, tokens_per_minute=6000)
    net.cut_off = {"r2"}
    net.run(1.6)
    net.settle(net.claim("r2", 2000, 0), 2000, 0)
    at = net.now
    net.sent_letters.clear()
    net.cut_off.clear()
    while not any(isinstance(note, Announced) for letter in net.sent_letters for note in letter.notes):
        net.run(HOP / 4)
    net.losing = 1
    net.run(3.0)
    assert net.member("r2").lost_letters == 1
    assert used(net, "r1").tokens == pytest.approx(2000 - 100 * (net.now - at), abs=100)


def test_what_a_replica_granted_alone_holds_though_the_leader_had_refused_it() -> None:
    net = a_fleet(2, tokens_per_minute=3000)
    claim(net, "r1", 1000, 1000)
    found = net.claim("r2", 100, 1000)
    net.run(HOP / 2)
    net.losing = 1
    net.run(HOP)
    net.cut_off = {"r2"}  # before it hears that it may not
    net.run(1.6)
    assert net.member("r2").role is Role.LOCAL
    assert found.granted_tokens == 1100
    net.cut_off.clear()
    net.run(3.0)
    assert held(net, "r1") == (2, 3100)
    net.settle(found, 100, 0)
    net.run(3 * HOP)
    assert held(net, "r1") == (1, 2000)


def test_a_small_quota_serves_one_at_a_time_at_each_that_decides_alone() -> None:
    net = a_fleet(requests_per_minute=1, concurrency=1)
    net.store_up = False
    net.run(3.0)
    assert [net.claim(name).begun for name in net.replicas for _ in range(2)] == [True, False] * 3


def test_a_prompt_that_is_longer_than_a_part_waits_until_the_part_is_full_and_is_paid_back() -> None:
    net = a_fleet(tokens_per_minute=3000)
    net.settle(claim(net, "r1", 300, 0), 300, 0)
    net.store_up = False
    net.run(3.0)
    found = net.claim("r1", 2000, 100)
    assert found.refusal is not None
    assert found.refusal.retry_after_seconds == pytest.approx(3.0, abs=3.0)
    net.run(10.0)
    long = net.claim("r1", 2000, 100)
    assert long.granted_tokens == 1000
    net.settle(long, 2000, 100)
    net.run(60.0)
    assert refused(net.claim("r1", 1, 0)) is QuotaReason.TOKENS
    net.run(10.0)
    assert net.claim("r1", 1, 0).granted_tokens == 1


def test_other_limits_hold_at_once_for_all_when_the_leader_reads_them() -> None:
    net = a_fleet(concurrency=1)
    assert claim(net, "r2").begun
    for name in net.replicas:
        net.member(name).claims.quotas.change({"k": QuotaLimits(concurrency=2)}, net.now)
    assert claim(net, "r3").begun
    assert refused(claim(net, "r3")) is QuotaReason.CONCURRENCY
