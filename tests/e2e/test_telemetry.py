"""What a collector has of a process that has ended."""

import aiohttp
import pytest
from otlp_receiver import http_receiver
from serving_process import serving
from test_serve import FAST, JSON, body_of

pytestmark = pytest.mark.e2e


async def test_a_process_that_is_told_to_end_sends_what_it_has_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the spans' and the metrics' own times to be sent."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "600000")
    async with http_receiver() as received:
        arguments = ("--otlp-endpoint", received.url, "--drain-grace-seconds", "0", *FAST)
        async with serving(*arguments) as proxy, aiohttp.ClientSession() as client:
            for _ in range(3):
                async with client.post(f"{proxy.url}/v1/completions", data=body_of(proxy, 4), headers=JSON) as response:
                    assert response.status == 200
                    await response.read()
            assert (received.spans, received.metrics) == ([], {})
            proxy.stop()
            await client.close()
            assert await proxy.exit_code() == 0
    assert len(received.spans) == 6, "of the request and of its attempt"
    ended = [point.as_double for labels, point in received.points("slai.requests") if labels["outcome"] == "completed"]
    assert sum(ended) == 3
