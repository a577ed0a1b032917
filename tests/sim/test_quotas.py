"""Tenants that are refused beyond so many tokens a minute, as API keys are by the live proxy."""

import pytest

from proxy.core.config import SchedulerConfig
from proxy.sim.quotas import parse_tokens
from proxy.sim.simulator import SimulationConfig, SimulationResult, simulate
from proxy.sim.workload import draw_workload, sharegpt_like

LIMIT = 60_000


def flooded(*, retries: int = 0) -> SimulationResult:
    drawn = draw_workload(sharegpt_like(2000), rate=5.5, requests=500, seed=1, tenants={"calm": 1.0, "flood": 10.0})
    return simulate(drawn, SimulationConfig(quotas={"flood": LIMIT}, retries=retries), SchedulerConfig())


def test_what_is_beyond_a_quota_is_refused_and_nobody_else() -> None:
    result = flooded()
    assert all(r.completed for r in result.records if r.request.tenant == "calm")
    flood = [r for r in result.records if r.request.tenant == "flood"]
    assert {r.error for r in flood} == {None, "tokens_per_minute"}
    used = sum(r.request.prompt_tokens + r.request.output_tokens for r in flood if r.completed)
    seconds = max(r.request.at_seconds for r in flood)
    bucket = LIMIT * (1 + seconds / 60)
    assert 0.8 * bucket < used < 1.1 * bucket, "the bucket, up to what answers were longer than expected"


def test_who_is_refused_comes_back_when_told() -> None:
    result = flooded(retries=2)
    flood = [r for r in result.records if r.request.tenant == "flood"]
    assert all(r.retries == min(2, r.refusals) for r in flood)
    assert sum(r.retries_let_in for r in flood) > 0


def test_tokens_are_read_by_tenant() -> None:
    assert parse_tokens("calm=60000, flood=5000") == {"calm": 60_000, "flood": 5000}


@pytest.mark.parametrize("text", ["", "a", "a=0", "a=1.5", "a=-1", "a=1,a=2", "=5"])
def test_what_is_no_table_of_tokens_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=TOKENS"):
        parse_tokens(text)
