import pytest

from proxy.wire.targets import is_forwardable


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/v1/models/llama-3.1", "/a//b", "/...", "/..a", "/a%20b", "/.well"]
)
def test_paths_that_lead_nowhere_else(path: str) -> None:
    assert is_forwardable("GET", path)


@pytest.mark.parametrize(
    "path",
    [
        *("/..", "/../x", "/a/../x", "/a/./x", "/%2e%2e/x", "/%2E./x", "/%252e%252e/x", "/a/..%2fx", "/a%2f..%2fx"),
        *("/..\\x", "/..%5cx", "/..;/x", "/..;a=b/x", "*", "", "host:80", "x/y"),
    ],
)
def test_paths_that_may_lead_elsewhere(path: str) -> None:
    assert not is_forwardable("GET", path)


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "CONNECT"])
def test_methods_that_are_not_for_engines(method: str) -> None:
    assert not is_forwardable(method, "/v1/models")
