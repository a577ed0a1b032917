from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_upstream import KIND, requests_at

from loadgen.schedule import Schedule, parse_schedule, quantised, read_schedule, write_schedule
from proxy.core.request import RequestClass
from proxy.sim.workload import ScheduledRequest, TraceError

HEADER = b'{"schedule":1,"classes":[{"name":"gold","ttft_s":2.0}]}\n'
LINE = b'{"index":0,"time_s":0.5,"prompt_tokens":3,"output_tokens":2,"seed":7}\n'

counts = st.integers(1, 2**31 - 1)
names = st.text(max_size=8)
kinds = st.sampled_from([KIND, RequestClass("free", tbt_seconds=0.5), RequestClass("best effort")])


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    times = sorted(draw(st.lists(st.floats(0, 1e7).map(quantised), min_size=1, max_size=8)))
    requests = []
    for index, at in enumerate(times):
        blocks = tuple(draw(st.lists(st.integers(0, 2**63 - 1), max_size=3)))
        prefix = draw(names)
        requests.append(
            ScheduledRequest(
                index,
                at,
                draw(counts),
                draw(counts),
                draw(kinds),
                draw(st.integers(0, 2**53)),
                prefix,
                draw(counts) if prefix else 0,
                draw(names),
                blocks,
                draw(counts) if blocks else 0,
                draw(names),
                draw(st.integers(0, index - 1)) if index and draw(st.booleans()) else None,
                quantised(draw(st.floats(0, 1e6))),
            )
        )
    return Schedule(tuple(requests), {"trace": draw(names)})


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz"])
@settings(deadline=None)
@given(schedule=schedules())
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, name: str, schedule: Schedule
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    write_schedule(path, schedule)
    read = read_schedule(path)
    assert read == schedule
    assert read.digest == schedule.digest
    first = path.read_bytes()
    write_schedule(path, read)
    assert path.read_bytes() == first


def test_the_digest_is_of_the_load_and_not_of_where_it_came_from() -> None:
    requests = tuple(requests_at([0.0, 0.1]))
    digest = Schedule(requests).digest
    assert Schedule(requests, {"trace": "x"}).digest == digest
    assert Schedule((requests[0], replace(requests[1], at_seconds=0.2))).digest != digest
    assert digest == "74e284fe28aca726f052dec4fd0d2549afe2045b0e7c3d4a386d66a10aefead5"


def test_what_a_line_leaves_out_is_empty() -> None:
    [request] = parse_schedule("s", HEADER + LINE + b"\n").requests
    assert request == ScheduledRequest(0, 0.5, 3, 2, RequestClass("default"), 7)
    [request] = parse_schedule("s", HEADER + LINE.replace(b"}", b',"class":"gold"}')).requests
    assert request.request_class == RequestClass("gold", ttft_seconds=2.0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "line 1: not the first line of a schedule"),
        (b'{"schedule":2}\n' + LINE, "line 1"),
        (HEADER, "without requests"),
        (HEADER + LINE[:-3], "line 2"),
        (HEADER + b"\xff\n", "line 2"),
        (HEADER + LINE.replace(b'"seed":7', b'"seed":7,"sede":8'), "line 2: Object contains unknown field `sede`"),
        (HEADER + LINE.replace(b'"prompt_tokens":3', b'"prompt_tokens":0'), "at least 1"),
        (HEADER + LINE.replace(b'"seed":7', b'"seed":7,"class":"x"'), "class 'x' is not among"),
        (HEADER + LINE.replace(b'"seed":7', b'"seed":7,"after":0'), "after is 0"),
        (HEADER + LINE.replace(b'"seed":7', b'"seed":7,"blocks":[1]'), "block_tokens"),
        (HEADER + LINE + LINE, "line 3: index is 0 and should be 1"),
        (HEADER + LINE + LINE.replace(b"0.5", b"0.4").replace(b'"index":0', b'"index":1'), "line 3: time_s 0.4"),
    ],
)
def test_a_wrong_line_is_named(content: bytes, told: str) -> None:
    with pytest.raises(TraceError, match="name") as caught:
        parse_schedule("name", content)
    assert told in str(caught.value)


def test_no_file_and_a_broken_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_schedule(tmp_path / "none")
    broken = tmp_path / "s.gz"
    broken.write_bytes(b"\x1f\x8b\x08garbage")
    with pytest.raises(TraceError, match="cannot read"):
        read_schedule(broken)
