import hashlib

import pytest
from multidict import CIMultiDict

from proxy.wire.headers import forward_request_headers
from proxy.wire.keys import Key, KeyRing, is_engine_administration, presented_key
from proxy.wire.ratelimit import duration


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer k"}, b"k"),
        ({"authorization": "bearer  k "}, b"k"),
        ({"x-api-key": "k"}, b"k"),
        ({"api-key": "k"}, b"k"),
        ({"Authorization": "Bearer k", "x-api-key": "other"}, b"k"),
        ({"Authorization": "Basic k"}, b""),
        ({"Authorization": "Bearer"}, b""),
        ({"Authorization": "Bearer \udcff"}, b"\xff"),
        ({}, b""),
    ],
)
def test_a_key_is_found_where_clients_send_it(headers: dict[str, str], key: bytes) -> None:
    assert presented_key(CIMultiDict(headers)) == key


def test_a_key_is_known_by_its_hash_alone() -> None:
    ring = KeyRing([Key("a", digest("ka"), "t"), Key("b", digest("kb"), "t")])
    found = ring.find(b"kb")
    assert found is not None
    assert found.name == "b"
    for wrong in (b"", b"k", b"kb ", b"KB", digest("kb").encode()):
        assert ring.find(wrong) is None
    assert digest("ka") not in repr(list(ring))


@pytest.mark.parametrize(
    ("models", "model", "may"),
    [
        ((), "m", True),
        ((), "", True),
        (("m",), "m", True),
        (("m",), "m2", False),
        (("m",), "", False),
        (("a", "llama-*"), "llama-7b", True),
        (("a", "llama-*"), "llam", False),
        (("*",), "m", True),
        (("*",), "", False),
    ],
)
def test_models(models: tuple[str, ...], model: str, may: bool) -> None:
    assert Key("a", "", "t", models=models).may_use(model) is may


@pytest.mark.parametrize(
    "path", ["/sleep", "/sleep/", "//sleep", "/./sleep", "/v1/load_lora_adapter", "/v1/../sleep", "/collective_rpc"]
)
def test_the_administration_of_engines_is_known(path: str) -> None:
    assert is_engine_administration(path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/sleep", "/sleepy", "/", "/version"])
def test_other_paths_are_for_everybody(path: str) -> None:
    assert not is_engine_administration(path)


def test_keys_of_clients_do_not_travel_on() -> None:
    sent = CIMultiDict({"Authorization": "Bearer k", "X-API-Key": "k", "api-key": "k", "Accept": "*/*"})
    assert forward_request_headers(sent, keep_credentials=False) == [("Accept", "*/*")]
    assert len(forward_request_headers(sent)) == 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"), (61.25, "1m1.25s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
