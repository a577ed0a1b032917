import hashlib

import pytest
from multidict import CIMultiDict

from proxy.wire.openai import BadRequest
from proxy.wire.tenants import Tenants, TenantSource

KEY = "sk-very-secret"


def told(source: TenantSource = TenantSource.KEY, secret: bytes = b"s", **names: str) -> Tenants:
    return Tenants(source, secret, {hashlib.sha256(key.encode()).hexdigest(): name for name, key in names.items()})


def of(tenants: Tenants, **headers: str) -> str:
    return tenants.of(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))


def test_one_key_is_one_tenant_however_it_is_sent() -> None:
    tenants = told()
    found = {
        of(tenants, authorization=f"Bearer {KEY}"),
        of(tenants, authorization=f"bearer  {KEY} "),
        of(tenants, x_api_key=KEY),
    }
    assert len(found) == 1
    assert found != {of(tenants, authorization="Bearer sk-other")}


def test_the_name_of_a_key_tells_nothing_of_it() -> None:
    name = of(told(), authorization=f"Bearer {KEY}")
    assert KEY not in name
    assert hashlib.sha256(KEY.encode()).hexdigest()[:8] not in name
    assert name != of(told(secret=b"another process"), authorization=f"Bearer {KEY}")
    assert "secret" not in repr(told(secret=b"secret"))


def test_a_configured_key_has_its_tenants_name() -> None:
    tenants = told(acme=KEY)
    assert of(tenants, authorization=f"Bearer {KEY}") == "acme"
    assert of(tenants, authorization="Bearer acme") != "acme"


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer "}, {"authorization": "Basic dTpw"}, {"x_api_key": ""}]
)
def test_without_a_key_it_is_the_nameless_tenant(headers: dict[str, str]) -> None:
    assert of(told(), **headers) == ""


def test_the_header_counts_only_where_it_is_trusted() -> None:
    assert of(told(), x_slai_tenant="acme") == ""
    assert of(told(TenantSource.HEADER), x_slai_tenant="acme", x_api_key=KEY) == "acme"
    assert of(told(TenantSource.HEADER, acme=KEY), x_api_key=KEY) == "acme", "without it, a named key counts"
    assert of(told(TenantSource.HEADER), x_api_key=KEY) == ""


def test_keys_that_nobody_named_are_one_tenant_unless_they_are_checked_elsewhere() -> None:
    by_name = told(TenantSource.NAMED, acme=KEY)
    assert of(by_name, authorization=f"Bearer {KEY}") == "acme"
    assert {of(by_name, x_api_key=f"made up {n}") for n in range(100)} == {""}
    assert len({of(told(TenantSource.KEY), x_api_key=f"known elsewhere {n}") for n in range(100)}) == 100


@pytest.mark.parametrize("name", ["", " ", "a b", "key:1", "a" * 65, "é", "a\tb"])
def test_a_name_that_is_no_plain_word_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="x-slai-tenant"):
        of(told(TenantSource.HEADER), x_slai_tenant=name)


def test_nobody_is_told_apart_where_that_is_off() -> None:
    assert of(told(TenantSource.NONE), x_slai_tenant="acme", authorization=f"Bearer {KEY}") == ""


def test_a_key_of_any_bytes_and_length_is_taken() -> None:
    assert of(told(), x_api_key="\udcff" * 10_000).startswith("key:")
