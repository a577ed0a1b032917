"""Events that are known by one before them."""

import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.wire.apis import APIS, CHAT, COMPLETIONS, MESSAGES, Api
from proxy.wire.openai import VISIBLE_TOKEN, read_chunk
from proxy.wire.repetition import Repetition
from proxy.wire.sse import EventSplitter


def chat(text: bytes) -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n' % text


def learnt(read: bytes) -> Repetition:
    repetition = Repetition()
    repetition.learn(read, 1)
    return repetition


texts = st.one_of(
    st.text(max_size=6).map(str.encode),
    st.text(max_size=6).map(lambda text: json.dumps(text)[1:-1].encode()),
    st.binary(max_size=6),
    st.lists(
        st.sampled_from(
            [*(b"\\", b'"', b"u", b"d8", b"D83D", b"00e9", b"n", b"a", b"/", b"\x7f", b"\x00", b"\n", b"\r")]
        )
    ).map(b"".join),
)


@given(texts, texts)
@settings(max_examples=1000, deadline=None)
@example(b"a", b"\\ud83d")
@example(b"a", b"\xed\xa0\xbd")
@example(b"a", b'x"},"finish_reason":"stop')
@example(b'"}', b"b")
@example(b"\\", b"b")
def test_what_fits_is_just_one_token_as_a_decoder_has_it(first: bytes, second: bytes) -> None:
    (payload,) = EventSplitter().feed(chat(first)) or [b""]
    if read_chunk(payload) is not VISIBLE_TOKEN:
        return
    repetition = learnt(chat(first))
    if repetition.known and repetition.fits(chat(second)):
        (payload,) = EventSplitter().feed(chat(second))
        assert read_chunk(payload) is VISIBLE_TOKEN


@pytest.mark.parametrize(
    "text", [" happy", "🙂", "é", "naïve \\n\\t", '\\"', "\\\\", "\\u00e9", "\\/", "x" * 4000, "\x7f"]
)
def test_any_text_fits(text: str) -> None:
    repetition = learnt(chat(b"All"))
    assert repetition.known
    assert repetition.fits(chat(text.encode()))


@pytest.mark.parametrize("text", ["", "\\", '"', "\\u12", "\\ud83d", "\n", "\t", '","role":"', "\\x41"])
def test_what_is_no_text_does_not_fit(text: str) -> None:
    assert not learnt(chat(b"All")).fits(chat(text.encode()))


@pytest.mark.parametrize(
    "read",
    [
        *(chat(b"x")[:-1], chat(b"x") + b"\n", chat(b"x") * 2, b"data: [DONE]\n\n", b": ping\n\n", b""),
        chat(b"x").replace(b"null", b'"length"'),
        chat(b"x").replace(b'"index":0', b'"index":1'),
    ],
)
def test_another_event_does_not_fit(read: bytes) -> None:
    assert not learnt(chat(b"All")).fits(read)


def test_what_stands_before_a_text_and_after_it_does_not_overlap() -> None:
    repetition = Repetition()
    repetition.learn(b'data: {"text":"a"}"text":"', 1)
    assert not repetition.fits(b'data: {"text":"')


@pytest.mark.parametrize(
    ("api", "read"),
    [
        (CHAT, chat(b"x")),
        (CHAT, chat(b"x").replace(b'"content"', b'"reasoning_content"')),
        (CHAT, chat(b"x").replace(b'":"', b'": "')),
        (COMPLETIONS, b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'),
        (MESSAGES, b'event: e\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}\n\n'),
    ],
)
def test_every_api_whose_events_repeat(api: Api, read: bytes) -> None:
    assert api in APIS.values()
    (payload,) = EventSplitter().feed(read)
    assert api.read_event(payload) is VISIBLE_TOKEN
    repetition = learnt(read)
    assert repetition.fits(read.replace(b'"x"', b'" any other"'))


def test_events_that_do_not_repeat_are_not_learnt_for_ever() -> None:
    repetition = Repetition()

    def numbered(number: int) -> bytes:
        return chat(b"x").replace(b'"c"', b'"%d"' % number)

    for number in range(100):
        repetition.learn(numbered(number), number)
    assert not repetition.fits(numbered(99))
    repetition.learn(numbered(200), 200)
    assert repetition.fits(numbered(200)), "what came meanwhile repeated itself"


def test_a_long_text_is_learnt_without_a_note_of_each_of_its_characters() -> None:
    read = chat(b"x" * 1_000_000)
    repetition = Repetition()
    tracemalloc.start()
    try:
        repetition.learn(read, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert repetition.known
    assert peak < 2 * len(read)
