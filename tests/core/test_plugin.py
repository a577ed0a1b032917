"""Engines with our scheduler inside: what the proxy leaves to them, and what it does not."""

from typing import Any

import pytest
from builders import make_limits, make_request
from playbook import Play
from test_tiles import trained

from proxy.core.admission import GateConfig, admits
from proxy.core.events import EngineUp
from proxy.core.plugin import PluginPolicy
from proxy.core.reasons import shut_gates
from proxy.core.request import RELAXED, STRICT
from proxy.core.snapshot import view_state
from proxy.core.tbt import harm_seconds
from proxy.core.tiles import TileConfig

POLICIES = list(PluginPolicy)


def stage(plugin: PluginPolicy | None, *, budget: int = 512, max_num_seqs: int = 8, **config: Any) -> Play:
    """An engine with a strict stream whose first token came at .05."""
    play = Play(engines=(), **config)
    limits = make_limits(budget, max_num_seqs, caches_prefixes=True)
    play.handle(EngineUp("e0", limits, plugin=plugin))
    assert play.arrive("s", 16, request_class=STRICT) == ["dispatch s e0"]
    play.tokens("s", at=0.05)
    return play


@pytest.mark.parametrize("name", ["deadline", "slai", "rad"])
def test_the_policies_are_the_plugins_own(name: str) -> None:
    assert PluginPolicy.read(name).value == name


def test_a_policy_that_is_not_known_is_one_all_the_same() -> None:
    assert PluginPolicy.read("newer") is PluginPolicy.OTHER
    assert not PluginPolicy.OTHER.takes_deadlines
    assert not PluginPolicy.OTHER.lets_short_pass


def test_what_would_pass_all_that_the_engine_has_is_not_held_back() -> None:
    play = stage(PluginPolicy.DEADLINE)
    assert play.arrive("long", 5000, at=0.06) == ["dispatch long e0"]
    assert play.arrive("longer", 6000, at=0.061) == []
    assert play.arrive("short", 100, at=0.062) == ["dispatch short e0"]
    assert play.arrive("middle", 1000, at=0.063) == [], "the short one goes before it, so it would only queue"


@pytest.mark.parametrize("plugin", [None, PluginPolicy.SLAI, PluginPolicy.RAD, PluginPolicy.OTHER])
def test_an_engine_that_lets_nobody_pass_gets_what_the_gate_lets_through(plugin: PluginPolicy | None) -> None:
    play = stage(plugin)
    assert play.arrive("long", 5000, at=0.06) == ["dispatch long e0"]
    assert play.arrive("short", 100, at=0.062) == []


def test_who_passes_still_needs_a_slot_and_room_in_the_cache() -> None:
    play = stage(PluginPolicy.DEADLINE, max_num_seqs=3)
    assert play.arrive("long", 5000, at=0.06) == ["dispatch long e0"]
    assert play.arrive("a", 100, at=0.062) == ["dispatch a e0"]
    assert play.arrive("b", 50, at=0.063) == []
    assert "slots" in shut_gates(play.engine(), make_request("b", 50), play.scheduler.config, 0.063)[0]
    engine = play.engine()
    engine.limits = make_limits(512, 8, kv_tokens=5150)
    assert not admits(engine, 50, GateConfig(), 0.064)


def test_whose_turn_it_is_stays_with_the_proxy() -> None:
    play = stage(PluginPolicy.DEADLINE, tenant_weights={"a": 1.0, "b": 1.0})
    assert play.arrive("long", 5000, at=0.06, tenant="a") == ["dispatch long e0"]
    assert play.arrive("more", 6000, at=0.061, tenant="b") == []
    assert play.arrive("short", 100, at=0.062, tenant="a") == [], "it is the turn of the other tenant"


@pytest.mark.parametrize("plugin", POLICIES)
def test_prompts_are_not_cut_for_it(plugin: PluginPolicy) -> None:
    play = stage(plugin, budget=8192, tiles=TileConfig())
    play.engine().model = trained()
    assert play.arrive("long", 5000, sliceable=True, at=0.06) == ["dispatch long e0"]
    stock = stage(None, budget=8192, tiles=TileConfig())
    stock.engine().model = trained()
    assert stock.arrive("long", 5000, sliceable=True, at=0.06)[0].startswith("slice long e0")


def test_a_prompt_half_way_in_slices_goes_whole_when_the_engine_is_found_to_cut_itself() -> None:
    play = stage(None, budget=8192, tiles=TileConfig())
    play.engine().model = trained()
    (sent,) = play.arrive("long", 5000, sliceable=True, at=0.06)
    assert sent.startswith("slice long e0")
    play.handle(EngineUp("e0", play.engine().limits, plugin=PluginPolicy.DEADLINE))
    upto = play.engine().held_tokens("long")
    assert play.slice_ended("long", upto, at=0.09) == ["dispatch long e0"]


@pytest.mark.parametrize("plugin", POLICIES)
def test_nobody_asks_what_a_prompt_does_to_its_streams(plugin: PluginPolicy) -> None:
    play = stage(None, budget=4096, gate=GateConfig(keep_tbt=True))
    engine = play.engine()
    engine.model = trained()
    assert harm_seconds(engine, 4000, 0.06) > 0
    engine.plugin = plugin
    assert harm_seconds(engine, 4000, 0.06) == 0
    assert play.arrive("r", 4000, request_class=RELAXED, at=0.06) == ["dispatch r e0"]


def test_an_engine_may_lose_it_and_is_stock_from_then_on() -> None:
    play = stage(PluginPolicy.DEADLINE)
    assert play.arrive("long", 5000, at=0.06) == ["dispatch long e0"]
    play.handle(EngineUp("e0", play.engine().limits), 0.061)
    assert play.arrive("short", 100, at=0.062) == []
    assert "backlog" in shut_gates(play.engine(), make_request("short", 100), play.scheduler.config, 0.062)[0]
    assert view_state(play.scheduler, 0.062).engines[0].plugin is None
    play.handle(EngineUp("e0", play.engine().limits, plugin=PluginPolicy.DEADLINE), 0.063)
    assert not any(
        "backlog" in why for why in shut_gates(play.engine(), make_request("x", 50), play.scheduler.config, 0.063)
    )
    assert view_state(play.scheduler, 0.063).engines[0].plugin == "deadline"
