from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from proxy.core.request import RELAXED, STRICT, RequestClass
from proxy.wire.headers import (
    forward_request_headers,
    forward_response_headers,
    may_wait,
    plain_head,
    request_class,
    request_id,
    retry_after_seconds,
)
from proxy.wire.openai import BadRequest

CLASSES = {"strict": STRICT, "relaxed": RELAXED}


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def test_request_headers_keep_order_case_and_repetition() -> None:
    sent = [
        ("Authorization", "Bearer key"),
        ("X-Tag", "a"),
        ("x-session-id", "s1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-tag", "b"),
        ("Content-Type", "application/json"),
        ("OpenAI-Beta", "realtime=v1"),
    ]
    assert forward_request_headers(headers(*sent)) == sent


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "TE", "Trailer"),
        *(
            "Transfer-Encoding",
            "Upgrade",
            "Host",
            "Content-Length",
            "Expect",
            "x-slo-class",
            "X-SLO-TTFT-ms",
            "X-SLAI-x",
        ),
    ],
)
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_request_headers_that_end_here(name: str, spell: type[str]) -> None:
    assert forward_request_headers(headers((spell(name), "x"), ("Accept", "*/*"))) == [("Accept", "*/*")]


class TestPlainHead:
    LENGTH = (b"Content-Length", b"2")

    def test_it_has_the_engines_headers_and_ours(self) -> None:
        sent = [(b"X-Odd", b"\xe9\t"), self.LENGTH, (b"date", b"today"), (b"X-Limit", b"its")]
        defaults = {b"server": b"Server: slai", b"date": b"Date: now"}
        assert plain_head(201, "Made", sent, defaults, {"x-limit": "ours"}) == (
            b"HTTP/1.1 201 Made\r\nX-Odd: \xe9\t\r\nContent-Length: 2\r\ndate: today\r\nx-limit: ours\r\n"
            b"Server: slai\r\n\r\n"
        )

    @pytest.mark.parametrize("name", ["Connection", "KEEP-ALIVE", "Transfer-Encoding", "trailer", "Upgrade"])
    def test_there_is_none_where_a_header_is_about_the_connection(self, name: str) -> None:
        assert plain_head(200, "OK", [self.LENGTH, (name.encode(), b"x")], {}, {}) is None

    @pytest.mark.parametrize("status", [204, 205, 304])
    def test_there_is_none_of_a_status_without_a_body(self, status: int) -> None:
        assert plain_head(status, "", [self.LENGTH], {}, {}) is None

    def test_there_is_none_without_a_length(self) -> None:
        assert plain_head(200, "OK", [(b"Content-Type", b"text/plain")], {}, {}) is None


def test_headers_named_in_connection_end_here() -> None:
    given = headers(
        ("Connection", "close, X-One"), ("X-One", "1"), ("connection", " x-TWO ,, "), ("X-Two", "2"), ("X-Three", "3")
    )
    assert forward_request_headers(given) == [("X-Three", "3")]
    assert forward_response_headers(given, keep_content_length=True) == [("X-Three", "3")]


def test_response_headers_lose_what_concerns_the_connection() -> None:
    given = headers(
        ("Transfer-Encoding", "chunked"),
        ("Trailer", "x-sum"),
        ("Keep-Alive", "timeout=5"),
        ("Content-Type", "text/event-stream"),
        ("Content-Encoding", "gzip"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Server", "uvicorn"),
    )
    assert forward_response_headers(given, keep_content_length=True) == [
        ("Content-Type", "text/event-stream"),
        ("Content-Encoding", "gzip"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("Server", "uvicorn"),
    ]


def test_the_length_of_an_answer_is_kept_only_where_it_is_true() -> None:
    plain = headers(("content-length", "5"))
    both = headers(("Content-Length", "5"), ("transfer-encoding", "chunked"))
    assert forward_response_headers(plain, keep_content_length=True) == [("content-length", "5")]
    assert forward_response_headers(plain, keep_content_length=False) == []
    assert forward_response_headers(both, keep_content_length=True) == []


@pytest.mark.parametrize("value", ["a", "A-b_9", "0af76519-16cd-43dd-8448-eb211c80319c", "x" * 128])
def test_a_harmless_request_id_is_taken(value: str) -> None:
    assert request_id(headers(("x-request-id", value))) == value


@pytest.mark.parametrize(
    "value",
    ["", "x" * 129, "a b", "a\n", "a\r\nSet-Cookie: x", "a\\n", "é", "\u0661", "a/b", "a.b", "\udcff", "\x1b[31m"],
)
def test_any_other_request_id_is_not(value: str) -> None:
    assert request_id(headers(("X-Request-Id", value))) is None


def test_no_request_id() -> None:
    assert request_id(headers()) is None


def test_without_headers_the_default_class_itself() -> None:
    assert request_class(headers(("Accept", "*/*")), CLASSES, RELAXED) is RELAXED


def test_a_configured_class_by_name() -> None:
    assert request_class(headers(("X-SLO-Class", "strict")), CLASSES, RELAXED) is STRICT


@pytest.mark.parametrize("name", ["", "Strict", "gold", "x" * 5000, "\udcff"])
def test_an_unknown_class_is_refused_with_the_known_ones_named(name: str) -> None:
    with pytest.raises(BadRequest, match=r"x-slo-class.*relaxed, strict") as caught:
        request_class(headers(("x-slo-class", name)), CLASSES, RELAXED)
    assert caught.value.param == "x-slo-class"
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"x-slo-ttft-ms": "500"}, RequestClass("strict", 0.5, 0.1)),
        ({"x-slo-tbt-ms": "40"}, RequestClass("strict", None, 0.04)),
        ({"x-slo-tpot-ms": "40.5"}, RequestClass("strict", None, 0.0405)),
        ({"x-slo-tpot-ms": "40", "x-slo-tbt-ms": "30"}, RequestClass("strict", None, 0.03)),
        ({"X-SLO-TTFT-MS": "3600000", "x-slo-tbt-ms": "1e2"}, RequestClass("strict", 3600.0, 0.1)),
    ],
)
def test_deadlines_override_those_of_the_class_and_its_name_stays(sent: dict[str, str], expected: RequestClass) -> None:
    assert request_class(headers(("x-slo-class", "strict"), *sent.items()), CLASSES, RELAXED) == expected


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tbt-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "3600001",
        "soon",
        "100ms",
        "1_000",
        "\u0661\u0660\u0660",
        "0x10",
        "1,5",
        "1e-323",
    ],
)
def test_a_deadline_that_is_no_positive_time_is_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        request_class(headers((name, value)), CLASSES, RELAXED)
    assert caught.value.param == name


def test_a_limit_on_ttft_is_the_requests_own() -> None:
    found = request_class(headers(("x-slo-ttft-limit-ms", "1500")), CLASSES, RELAXED)
    assert found == RequestClass("relaxed", tbt_seconds=0.5, ttft_limit_seconds=1.5)
    with pytest.raises(BadRequest, match="x-slo-ttft-limit-ms"):
        request_class(headers(("x-slo-ttft-limit-ms", "-1")), CLASSES, RELAXED)


def test_a_client_can_forbid_us_to_queue_its_request() -> None:
    assert may_wait(headers())
    assert may_wait(headers(("x-slai-no-queue", "0")))
    assert not may_wait(headers(("X-SLAI-No-Queue", "1")))


@pytest.mark.parametrize("value", ["", "yes", "2", "1 1", "\u0661"])
def test_it_does_so_in_one_way_only(value: str) -> None:
    with pytest.raises(BadRequest, match="x-slai-no-queue"):
        may_wait(headers(("x-slai-no-queue", value)))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ((), None),
        ((("Retry-After", "3"),), 3.0),
        ((("Retry-After", "0.5"),), 0.5),
        ((("retry-after-ms", "250"), ("Retry-After", "1")), 0.25),
        ((("retry-after-ms", "soon"), ("Retry-After", "1")), 1.0),
        ((("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT"),), None),
        ((("Retry-After", "-1"),), None),
        ((("Retry-After", "inf"),), None),
        ((("Retry-After", "nan"),), None),
    ],
)
def test_what_an_engine_asks_for(given: tuple[tuple[str, str], ...], seconds: float | None) -> None:
    assert retry_after_seconds(headers(*given)) == seconds
