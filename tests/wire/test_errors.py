from __future__ import annotations

import json

import pytest

from proxy.core.request import RejectReason
from proxy.wire.errors import (
    ANSWERS,
    AccessFailure,
    ErrorAnswer,
    LocalFailure,
    Reason,
    UpstreamFailure,
    answer,
    bad_request,
    model_not_found,
)
from proxy.wire.openai import BadRequest, read_chunk
from proxy.wire.sse import EventSplitter

EVERY_REASON: list[Reason] = [*RejectReason, *UpstreamFailure, *LocalFailure, *AccessFailure]


def test_every_reason_has_an_answer_and_no_two_reasons_share_a_name() -> None:
    # Members of different string enumerations with one value would be one key.
    assert len(set(EVERY_REASON)) == len(EVERY_REASON)
    assert set(ANSWERS) == set(EVERY_REASON)


TABLE: dict[Reason, tuple[int, str, str | None, bool, bool | None]] = {
    # status, type, code, whether there is a Retry-After, x-should-retry
    RejectReason.QUEUE_FULL: (429, "rate_limit_error", "slow_down", True, True),
    RejectReason.QUEUE_TIMEOUT: (429, "rate_limit_error", "slow_down", True, True),
    RejectReason.TOO_LATE: (503, "service_unavailable_error", "server_is_overloaded", True, True),
    RejectReason.NO_QUEUE: (429, "rate_limit_error", "slow_down", True, False),
    RejectReason.NO_ENGINE: (503, "service_unavailable_error", "no_engines", True, True),
    RejectReason.DRAINING: (503, "service_unavailable_error", "server_is_overloaded", True, True),
    LocalFailure.BODY_TOO_SLOW: (408, "invalid_request_error", "request_timeout", False, False),
    LocalFailure.TARGET: (400, "invalid_request_error", None, False, None),
    AccessFailure.NO_KEY: (401, "invalid_request_error", "invalid_api_key", False, False),
    AccessFailure.UNKNOWN_KEY: (401, "invalid_request_error", "invalid_api_key", False, False),
    AccessFailure.PATH: (403, "invalid_request_error", "path_not_allowed", False, False),
    AccessFailure.MODEL: (403, "invalid_request_error", "model_not_allowed", False, False),
    AccessFailure.CLASS: (403, "invalid_request_error", "class_not_allowed", False, False),
    AccessFailure.REQUESTS_PER_MINUTE: (429, "requests", "rate_limit_exceeded", False, True),
    AccessFailure.TOKENS_PER_MINUTE: (429, "tokens", "rate_limit_exceeded", False, False),
    AccessFailure.CONCURRENCY: (429, "requests", "rate_limit_exceeded", False, True),
    RejectReason.UNKNOWN_MODEL: (404, "invalid_request_error", "model_not_found", False, None),
    RejectReason.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded", False, None),
    UpstreamFailure.CONNECT_FAILED: (502, "server_error", "upstream_error", True, True),
    UpstreamFailure.CUT_BEFORE_ANSWER: (502, "server_error", "upstream_error", False, False),
    UpstreamFailure.CUT_MID_STREAM: (502, "server_error", "upstream_error", False, False),
    UpstreamFailure.REMOVED: (502, "server_error", "upstream_error", False, False),
    UpstreamFailure.TIMED_OUT: (504, "timeout_error", "upstream_timeout", False, False),
    LocalFailure.BAD_REQUEST: (400, "invalid_request_error", None, False, None),
    LocalFailure.BODY_TOO_LARGE: (413, "invalid_request_error", "request_too_large", False, None),
    LocalFailure.MALFORMED: (400, "invalid_request_error", None, False, None),
    LocalFailure.HEAD_TOO_LARGE: (431, "invalid_request_error", "head_too_large", False, None),
    LocalFailure.UNKNOWN_CODING: (415, "invalid_request_error", "unsupported_content_encoding", False, None),
    LocalFailure.INTERNAL: (500, "server_error", "internal_error", False, False),
}


@pytest.mark.parametrize("reason", EVERY_REASON)
def test_the_table(reason: Reason) -> None:
    found = answer(reason)
    waits = "Retry-After" in found.headers()
    assert (found.status, found.type, found.code, waits, found.should_retry) == TABLE[reason]


@pytest.mark.parametrize("reason", EVERY_REASON)
def test_the_body_has_the_shape_of_the_openai_api(reason: Reason) -> None:
    error = json.loads(answer(reason).body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert answer(reason).headers()["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "message", ['say "no"', "two\nlines\r\n\r\n", "data: [DONE]\n\n", "😀\u2028", "\udcff", "\x00"]
)
def test_a_frame_is_one_event_whatever_the_message_says(message: str) -> None:
    frame = answer(UpstreamFailure.CUT_MID_STREAM, message=message).sse_frame()
    splitter = EventSplitter()
    (payload,) = splitter.feed(frame)
    assert splitter.at_boundary
    assert frame.endswith(b"\n\n")
    assert json.loads(payload)["error"]["message"] == message
    view = read_chunk(payload)
    assert (view.error, view.done, view.tokens) == (True, False, 0)


@pytest.mark.parametrize(
    ("wait", "seconds", "milliseconds"),
    [(0.2, "1", "200"), (1, "1", "1000"), (1.0001, "2", "1001"), (30, "30", "30000"), (0, "0", "0"), (-3, "0", "0")],
)
def test_waits_are_whole_and_rounded_up(wait: float, seconds: str, milliseconds: str) -> None:
    found = answer(RejectReason.QUEUE_FULL, retry_after_seconds=wait).headers()
    assert (found["Retry-After"], found["retry-after-ms"]) == (seconds, milliseconds)


@pytest.mark.parametrize("wait", [float("inf"), float("nan")])
def test_a_wait_that_is_no_time_is_left_out(wait: float) -> None:
    found = answer(RejectReason.QUEUE_FULL, retry_after_seconds=wait, estimated_wait_seconds=wait).headers()
    assert set(found) == {"Content-Type", "x-should-retry", "x-slai-reason"}


@pytest.mark.parametrize("reason", EVERY_REASON)
def test_the_reason_is_told_in_a_header_too(reason: Reason) -> None:
    assert answer(reason).headers()["x-slai-reason"] == str(reason)
    assert answer(reason, message="other").headers()["x-slai-reason"] == str(reason)
    assert "x-slai-estimated-wait-ms" not in answer(reason, retry_after_seconds=1.0).headers()


def test_the_estimated_wait_is_told_where_it_is_known() -> None:
    found = answer(RejectReason.TOO_LATE, retry_after_seconds=30.0, estimated_wait_seconds=12.3456)
    assert found.headers()["x-slai-estimated-wait-ms"] == "12346"
    assert found.headers()["Retry-After"] == "30"


@pytest.mark.parametrize(("should_retry", "value"), [(True, "true"), (False, "false"), (None, None)])
def test_the_retry_hint(should_retry: bool | None, value: str | None) -> None:
    found = ErrorAnswer(500, "server_error", None, "x", should_retry=should_retry)
    assert found.headers().get("x-should-retry") == value


def test_a_bad_request_tells_what_is_wrong_and_where() -> None:
    found = bad_request(BadRequest("stream must be a boolean", param="stream", code="wrong_type"))
    assert found.status == 400
    assert json.loads(found.body()) == {
        "error": {
            "message": "stream must be a boolean",
            "type": "invalid_request_error",
            "param": "stream",
            "code": "wrong_type",
        }
    }


def test_an_unknown_model_is_named_but_not_at_any_length() -> None:
    assert "'gpt-9'" in model_not_found("gpt-9").message
    assert model_not_found("gpt-9").status == 404
    assert len(model_not_found("x" * 10_000).body()) < 500
