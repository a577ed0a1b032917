"""Whatever the core is told, decides or is set to can be written down and read again."""

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from builders import make_limits, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core import codec
from proxy.core.actions import Action
from proxy.core.codec import LONGEST_TEXT, CodecError, decode, encode
from proxy.core.config import SchedulerConfig
from proxy.core.events import Arrived, EngineUp, Event
from proxy.core.feedback import DelaySnapshot
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.stepmodel import OnlineStepModel, StepLoad, StepModelSnapshot
from proxy.core.tiles import TileConfig

NAMES: dict[str, Any] = dict(codec._known().values) | dict(codec._known().enums)


def trained(steps: int) -> StepModelSnapshot:
    model = OnlineStepModel()
    for number in range(steps):
        model.observe(StepLoad(100 * number, 7, 900), 0.04)
    return model.snapshot()


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of the core, of every class that is part of it."""
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([of_type(argument) for argument in arguments])
    if hint is type(None):
        return st.none()
    if hint is float:
        return st.floats(0.001, 0.9)
    if hint is int:
        return st.integers(1, 1 << 40)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.text(max_size=20)
    if hint is bytes:
        return st.binary(max_size=20)
    if get_origin(hint) is Mapping:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if get_origin(hint) is frozenset:
        return st.frozensets(of_type(arguments[0]), max_size=3)
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
    if hint is StepModelSnapshot:
        return st.integers(0, 3).map(trained)
    if hint is DelaySnapshot:
        pairs = st.tuples(st.floats(0, 0.25), st.floats(0, 0.25))
        return st.builds(DelaySnapshot, pairs, pairs, st.tuples(st.floats(0, 1), st.floats(0, 1)))
    if hint is SchedulerConfig:  # not everything goes together in it
        weights = st.dictionaries(st.text(max_size=5), st.floats(0.1, 9.0), max_size=3)
        return st.builds(SchedulerConfig, max_wait_seconds=st.floats(0.001, 0.9), tenant_weights=weights)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint, localns=NAMES)
        return st.builds(hint, **{field.name: of_type(hints[field.name]) for field in fields(hint)})
    return st.sampled_from(list(hint))  # an enumeration


@pytest.mark.parametrize("cls", [*get_args(Event), *get_args(Action)], ids=lambda cls: cls.__name__)
@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(data=st.data())
def test_every_event_and_action_comes_back_as_it_went(cls: type, data: st.DataObject) -> None:
    value = data.draw(of_type(cls))
    text = json.dumps(encode(value), allow_nan=False)
    assert decode(json.loads(text)) == value


@pytest.mark.parametrize("ordering", [first_come_first_served(), shortest_prompt_first(7.5)])
@pytest.mark.parametrize("tiles", [None, TileConfig(margin=0.25)])
def test_the_whole_configuration_comes_back_as_it_went(ordering: Any, tiles: TileConfig | None) -> None:
    config = SchedulerConfig(ordering=ordering, tiles=tiles, max_queue_requests=7)
    told = encode(config)
    assert told.keys() == {"type"} | {field.name for field in fields(config)}
    assert decode(json.loads(json.dumps(told))) == config


def test_what_json_lacks() -> None:
    values = (inf, -inf, 0.1 + 0.2, 1 << 64, -(1 << 90), b"\x00\xff", {"a": 1, "b": (2,)}, frozenset({"x"}))
    assert decode(json.loads(json.dumps(encode(values), allow_nan=False))) == values


def test_text_of_clients_is_bounded_and_still_tells_models_apart() -> None:
    long, other = "x" * 10_000_000, "x" * 9_999_999
    arrived, again, different = (encode(Arrived(make_request(model=model))) for model in (long, long, other))
    assert len(json.dumps(arrived)) < 1000
    assert arrived == again != different
    models = encode(EngineUp("e", make_limits(), frozenset({long})))["models"]["items"]
    assert models == [arrived["request"]["model"]]
    short = "y" * LONGEST_TEXT
    assert decode(encode(short)) == short


@pytest.mark.parametrize("value", [object(), bytearray(b"x"), lambda: 1, {1, 2}, 1j, type("Arrived", (), {})])
def test_what_is_no_value_of_the_core_is_refused(value: object) -> None:
    with pytest.raises(CodecError):
        encode(value)
    with pytest.raises(CodecError):
        encode((1, value))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"type": "Nothing"},
        {"type": ["Arrived"]},
        {"type": "Arrived"},
        {"type": "Ended", "request_id": "a", "more": 1},
        {"type": "RejectReason", "value": "because"},
        {"type": "Scheduler"},
        {"type": "OnlineStepModel"},
        {"type": "EngineLimits", "token_budget": 0},
        {"type": "EngineLimits", "token_budget": "much"},
        encode(trained(9)) | {"gram": [1.0]},
        encode(trained(9)) | {"steps": -1},
        {"type": "ErrorFigures", "p95": {"type": "float", "value": "nan"}, "p99": 0.1, "mean": 0.1, "median": 0.1},
        {"type": "ErrorFigures", "p95": -0.1, "p99": 0.1, "mean": 0.1, "median": 0.1},
        {"type": "ErrorFigures", "p95": 0.1, "p99": -0.1, "mean": 0.1, "median": 0.1},
        encode(trained(9)) | {"moment": [{"type": "float", "value": "nan"}] * 6},
        encode(trained(9)) | {"gram": [1.0, 9.0, *encode(trained(9))["gram"][2:]]},
        {"type": "set", "items": 3},
        {"type": "map", "items": [[1]]},
        {"type": "float", "value": "none"},
        {"type": "int", "value": "1.5"},
        {"type": "bytes", "value": "xy"},
        {"type": "int", "value": "9" * 10_000},
        [{"type": "set", "items": [{"type": "map", "items": []}]}],
    ],
)
def test_what_is_no_encoding_is_refused(told: Any) -> None:
    with pytest.raises(CodecError):
        decode(told)


@pytest.mark.parametrize("number", [1 << 53, 1 << 62, -(1 << 63), 1 << 100])
def test_a_number_that_was_told_is_let_go_of(number: int) -> None:
    held = sys.getrefcount(number)
    for _ in range(10):
        encode(number)
    assert sys.getrefcount(number) == held
