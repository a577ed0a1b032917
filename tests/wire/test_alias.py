"""A model's other name is replaced in a body, and not a byte beside it."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.alias import rename_model


@pytest.mark.parametrize(
    ("body", "renamed"),
    [
        (b'{"model": "a", "x": 1}', b'{"model": "b", "x": 1}'),
        (b'{"x":1e400 , "model"  :\n"a"}', b'{"x":1e400 , "model"  :\n"b"}'),
        (
            b'{"messages":[{"model":"a","content":"\\"model\\": \\"a\\""}],"model":"a"}',
            b'{"messages":[{"model":"a","content":"\\"model\\": \\"a\\""}],"model":"b"}',
        ),
        (b'{"x":"model","model":"a","y":"model"}', b'{"x":"model","model":"b","y":"model"}'),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"b"}'),
        (b'{"model":"x","model":"a"}', b'{"model":"b","model":"b"}'),
        (b'{"model":null}', b'{"model":null}'),
        (b'{"x":{"model":"a"}}', b'{"x":{"model":"a"}}'),
        (b'["model","a"]', b'["model","a"]'),
        (b'{"model":"a', b'{"model":"a'),
        (b"", b""),
    ],
)
def test_just_the_name_is_replaced(body: bytes, renamed: bytes) -> None:
    assert rename_model(body, "b") == renamed


def test_a_name_with_quotes_stays_json() -> None:
    assert json.loads(rename_model(b'{"model":"a"}', 'b"\u00e9\\')) == {"model": 'b"\u00e9\\'}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("model"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "x", 'a"', "\\"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["model", "messages", "x\\", '"', "é"]), values, max_size=5), st.text(max_size=8)
)
def test_any_body_means_the_same_but_for_the_name(fields: dict[str, object], model: str) -> None:
    renamed = json.loads(rename_model(json.dumps(fields).encode(), model))
    expected = fields | ({"model": model} if isinstance(fields.get("model"), str) else {})
    assert renamed == expected


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.binary(max_size=60))
def test_nothing_is_too_odd(body: bytes) -> None:
    assert isinstance(rename_model(body, "b"), bytes)


def test_a_long_prompt_takes_no_more_than_its_copies() -> None:
    body = b'{"model":"a","prompt":"%b"}' % (b"x" * 1_000_000)
    tracemalloc.start()
    try:
        renamed = rename_model(body, "b")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert renamed == body.replace(b'"a"', b'"b"')
    assert peak < 4 * len(body)
