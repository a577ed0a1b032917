"""The deadline that is told to an engine with our plugin: added, and not a byte changed beside it."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.xargs import tell_tbt

_KEYS = st.sampled_from(["vllm_xargs", "slai_tbt_ms", "model", "prompt", 'a"b', "x}", "{"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["vllm_xargs", '{"vllm_xargs": {', "é\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


def without(whole: bytes, told: bytes) -> set[bytes]:
    """What is left of ``told`` when one piece is cut out of it, of whatever length makes it as long as ``whole``."""
    extra = len(told) - len(whole)
    return {told[:at] + told[at + extra :] for at in range(len(whole) + 1)}


@given(st.dictionaries(_KEYS, _VALUES, max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_it_is_told_where_the_client_tells_none_and_all_else_stays(
    fields: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    told = tell_tbt(body, 0.1)
    own = fields.get("vllm_xargs", {})
    if not isinstance(own, dict) or "slai_tbt_ms" in own:
        assert told == body
    else:
        assert json.loads(told) == fields | {"vllm_xargs": own | {"slai_tbt_ms": 100}}
        assert body in without(body, told)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a":1}', b'{"vllm_xargs":{"slai_tbt_ms":100},"a":1}'),
        (b' { "a" : 1 } ', b' {"vllm_xargs":{"slai_tbt_ms":100}, "a" : 1 } '),
        (b"{ }", b'{"vllm_xargs":{"slai_tbt_ms":100} }'),
        (b'{"vllm_xargs" : { }}', b'{"vllm_xargs" : {"slai_tbt_ms":100 }}'),
        (b'{"vllm_xargs":{"a":[{}]}}', b'{"vllm_xargs":{"slai_tbt_ms":100,"a":[{}]}}'),
        (b'{"vllm_xargs":{},"a":"vllm_xargs"}', b'{"vllm_xargs":{"slai_tbt_ms":100},"a":"vllm_xargs"}'),
        (b'{"vllm_xargs":null}', b'{"vllm_xargs":null}'),
        (b'{"vllm_xargs":{"slai_tbt_ms":7}}', b'{"vllm_xargs":{"slai_tbt_ms":7}}'),
        (b'{"vllm_xargs":{"slai\\u005ftbt_ms":7}}', b'{"vllm_xargs":{"slai\\u005ftbt_ms":7}}'),
        # The last one holds, for an engine as for us.
        (b'{"vllm_xargs":{},"vllm_xargs":{}}', b'{"vllm_xargs":{},"vllm_xargs":{"slai_tbt_ms":100}}'),
        (b'{"vllm_xargs":{},"vllm_xargs":0}', b'{"vllm_xargs":{},"vllm_xargs":0}'),
        (b'{"p":"say \\"vllm_xargs\\": {"}', b'{"vllm_xargs":{"slai_tbt_ms":100},"p":"say \\"vllm_xargs\\": {"}'),
        (b'{"vllm_xargs":', b'{"vllm_xargs":'),
    ],
)  # fmt: skip
def test_where_it_goes(body: bytes, told: bytes) -> None:
    assert tell_tbt(body, 0.1) == told


def test_another_spelling_of_the_name_comes_last_and_so_holds() -> None:
    body = b'{"vllm\\u005fxargs":{"slai_tbt_ms":7}}'
    assert json.loads(tell_tbt(body, 0.1))["vllm_xargs"] == {"slai_tbt_ms": 7}


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.1, 100), (0.0333, 33.3), (1.5, 1500), (7200.0, 7_200_000)])
def test_it_is_told_in_milliseconds(seconds: float, milliseconds: float) -> None:
    assert json.loads(tell_tbt(b"{}", seconds)) == {"vllm_xargs": {"slai_tbt_ms": milliseconds}}


def test_a_long_prompt_takes_no_more_than_its_copies() -> None:
    body = b'{"vllm_xargs":{"a":1},"prompt":"%b"}' % (b"x" * 1_000_000)
    tracemalloc.start()
    try:
        told = tell_tbt(body, 0.05)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert json.loads(told)["vllm_xargs"] == {"a": 1, "slai_tbt_ms": 50}
    assert peak < 8 * len(body)
