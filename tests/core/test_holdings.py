"""What tenants hold of the queue, and who makes room in a full one."""

import pytest
from builders import make_request
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.holdings import Holdings
from proxy.core.lane import Waiting
from proxy.core.request import Request

sizes = st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 40))


def waiting(number: int, tenant: str, tokens: int = 0, size_bytes: int = 0) -> Waiting:
    return Waiting(request(tenant, tokens, size_bytes, number), float(number), 0.0, number)


def request(tenant: str, tokens: int = 0, size_bytes: int = 0, number: int = 0) -> Request:
    return make_request(f"r{number}", tokens, size_bytes=size_bytes, tenant=tenant)


def test_the_tenant_with_the_greatest_share_of_any_bound_makes_room() -> None:
    holdings = Holdings(10, 100, 1000)
    for one in (waiting(0, "many"), waiting(1, "many"), waiting(2, "large", size_bytes=30), waiting(3, "long", 250)):
        holdings.add(one)
    assert holdings.newest_of_greatest().number == 2
    holdings.remove(waiting(2, "large", size_bytes=30))
    assert holdings.newest_of_greatest().number == 3
    holdings.remove(waiting(3, "long", 250))
    assert holdings.newest_of_greatest().number == 1, "the newest of several"


@pytest.mark.parametrize("bounds", [(0, 100, None), (10, 0, None), (10, 100, 0)])
def test_nobody_has_a_part_of_nothing(bounds: tuple[int, int, int | None]) -> None:
    assert not Holdings(*bounds).has_even_part_for(request("a", 1, 1))


def test_all_of_it_is_one_tenant_s_while_there_is_no_other() -> None:
    holdings = Holdings(3, 100, None)
    holdings.add(waiting(0, "a"))
    holdings.add(waiting(1, "a"))
    assert holdings.has_even_part_for(request("a"))
    assert holdings.has_even_part_for(request("b")), "one of three"
    holdings.add(waiting(2, "b"))
    assert not holdings.has_even_part_for(request("a"))


@given(st.lists(sizes, max_size=30), sizes)
def test_whoever_makes_room_held_more_than_its_even_part(
    there: list[tuple[str, int, int]], newcomer: tuple[str, int, int]
) -> None:
    most_requests, most_bytes, most_tokens = 12, 150, 200
    holdings = Holdings(most_requests, most_bytes, most_tokens)
    held = [waiting(n, tenant, tokens, size_bytes) for n, (tenant, tokens, size_bytes) in enumerate(there)]
    for one in held:
        holdings.add(one)
    new = request(*newcomer)
    if not holdings.has_even_part_for(new):
        return
    tenants = len({one.request.tenant for one in held} | {new.tenant})
    while (
        len(held) >= most_requests
        or sum(one.request.size_bytes for one in held) + new.size_bytes > most_bytes
        or sum(one.request.prompt_tokens for one in held) + new.prompt_tokens > most_tokens
    ):
        gone = holdings.newest_of_greatest()
        own = [one.request for one in held if one.request.tenant == gone.request.tenant]
        assert gone.request.tenant != new.tenant
        assert gone.number == max(one.number for one in held if one.request.tenant == gone.request.tenant)
        assert (
            len(own) * tenants > most_requests
            or sum(r.size_bytes for r in own) * tenants > most_bytes
            or sum(r.prompt_tokens for r in own) * tenants > most_tokens
        )
        held.remove(gone)
        holdings.remove(gone)
    assert len(holdings) == len({one.request.tenant for one in held})


@given(st.data())
def test_who_holds_most_is_the_same_however_seldom_it_is_asked(data: st.DataObject) -> None:
    often, seldom = Holdings(12, 150, 200), Holdings(12, 150, 200)
    there: list[Waiting] = []
    for number in range(data.draw(st.integers(0, 40))):
        if data.draw(st.booleans()) and there:
            one = there.pop(data.draw(st.integers(0, len(there) - 1)))
            often.remove(one)
            seldom.remove(one)
        else:
            tenant, tokens, size_bytes = data.draw(sizes)
            there.append(waiting(number, tenant, tokens, size_bytes))
            often.add(there[-1])
            seldom.add(there[-1])
        if there:
            greatest = often.newest_of_greatest()
            if number % 7 == 0:
                assert seldom.newest_of_greatest() == greatest
    if there:
        assert seldom.newest_of_greatest() == often.newest_of_greatest()
