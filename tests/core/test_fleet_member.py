from typing import Any

from fleet_net import FleetNet

from proxy.core.fleet import Role


def a_fleet(replicas: int = 3, **more: Any) -> FleetNet:
    net = FleetNet(**more)
    for _ in range(replicas):
        net.start()
    net.run(3.0)
    return net


def test_one_leads_and_the_others_follow_it() -> None:
    net = a_fleet()
    assert [m.member.role for m in net.replicas.values()] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert {m.member.leader for m in net.replicas.values()} == {"r1"}


def test_a_follower_gets_its_request_out_by_the_leaders_decision() -> None:
    net = a_fleet()
    net.arrive("r2")
    assert net.running("x") == 0
    net.run(0.0021)
    assert net.running("x") == 1


def test_engines_fill_up_over_all_replicas_and_no_further() -> None:
    net = a_fleet(slots=2)
    for number in range(9):
        net.arrive(f"r{number % 3 + 1}")
    net.run(0.5)
    assert (net.running("x"), net.running("y")) == (2, 2)
