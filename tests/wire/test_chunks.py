"""A read that is one chunk."""

from contextlib import suppress

import httptools
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.wire.chunks import chunk, of_one_chunk

sizes = st.one_of(st.integers(1, 40), st.integers(240, 270), st.integers(2040, 2050))


class Parser:
    """What llhttp makes of the body of a chunked answer."""

    def __init__(self, data: bytes) -> None:
        self.body = b""
        self.chunks = 0
        parser = httptools.HttpResponseParser(self)
        parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(httptools.HttpParserError):
            parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_chunk_complete(self) -> None:
        self.chunks += 1


@given(sizes)
def test_what_was_written_is_read(size: int) -> None:
    data = b"x" * size
    assert Parser(chunk(data)).body == data
    assert of_one_chunk(chunk(data)) == (data if size <= 2048 else None)


@given(
    sizes,
    st.lists(
        st.tuples(st.integers(-30, 6), st.sampled_from([b"", b"\r", b"\n", b"0", b"1", b"a", b"A", b";", b" ", b"+"])),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 1),
)
@settings(max_examples=1000, deadline=None)
def test_nothing_is_read_but_what_the_parser_takes_for_one_whole_chunk(
    size: int, edits: list[tuple[int, bytes]], taken_out: int
) -> None:
    """Whatever is put in for, or between, the bytes of a chunk."""
    read = chunk(b"\r\n0" * size)
    for at, put in edits:
        read = read[:at] + put + read[at:][taken_out:]
    data = of_one_chunk(read)
    if data is not None:
        parsed = Parser(read)
        assert (parsed.body, parsed.chunks) == (data, 1)
        assert read == chunk(data)
