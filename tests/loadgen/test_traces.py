import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.schedule import Schedule
from loadgen.traces import Format, Row, RowTrace, load
from loadgen.traces.rows import Window
from proxy.sim.workload import SHAREGPT_LIKE, TraceError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:59.9999999,374,44\r
2023-11-17 00:00:00.0000001,396,109\r
2023-11-17 00:00:01,0,5\r
2023-11-17 00:00:01.5,7,x\r
yesterday,7,7\r
2023-11-17 00:00:02,7"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 01:00:00.509930+01:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
45,GPT-4,417,0,417,API log
118,GPT-4,"12,3
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,7,2.5,ChatGPT,100,20,120,Conversation log
19440111.0,,1.0,GPT-4,30,5,35,API log
19440120.0,7,,ChatGPT,150,20,170,Conversation log
19440121.0,7,3,ChatGPT,160,30,190,Conversation log
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27000, "input_length": 1024, "output_length": 9, "hash_ids": [46, 47, 99]}
{"timestamp": 30500, "input_length": 600, "output_length": 9}
{"timestamp": 30500, "input_length": 600, "output_length": 0, "hash_ids": [1, 2]}
{"timestamp": 30500, "input_length": "many", "output_length": 1, "hash_ids": []}
{"timestamp": 30500,
"""
BAILIAN = """{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 13, \
"type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 161, "parent_chat_id": 159, "timestamp": 65.0, "input_length": 60, "output_length": 9, "type": "text", \
"turn": 2, "hash_ids": [1, 2, 3, 4]}
{"chat_id": 162, "parent_chat_id": 55, "timestamp": 64.0, "input_length": 16, "output_length": 9, "type": "text", \
"turn": 2, "hash_ids": [9]}
"""
SHAREGPT: list[Any] = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "h" * 90},
            {"from": "gpt", "value": "g" * 45},
            '{"from": "human", "value": "' + "h" * 9 + '"}',
            {"from": "gpt", "value": "g" * 18},
        ],
    },
    {"messages": [{"role": "user", "content": "u" * 45}, {"role": "assistant", "content": "a" * 45}]},
    {"conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "?"}]},
    {"conversations": [{"from": "human", "value": "?" * 9}, {"from": "gpt", "value": ""}]},
    {"conversations": [{"from": "human", "value": "?"}]},
    {"conversations": "none"},
    7,
]


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., RowTrace]:
    def read(content: str | bytes, **more: Any) -> RowTrace:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        found = load(str(path), **more)
        assert isinstance(found, RowTrace)
        assert found.rows_read == found.emitted + found.dropped.total()
        return found

    return read


Read = Callable[..., RowTrace]


def test_azure_with_its_carriage_returns_seven_digits_and_no_last_line_end(trace: Read) -> None:
    found = trace(AZURE)
    assert found.format is Format.AZURE
    assert [(r.prompt_tokens, r.output_tokens) for r in found.rows] == [(374, 44), (396, 109)]
    assert [r.time_s for r in found.rows] == pytest.approx([0.0, 2e-7], abs=2e-11)
    assert found.dropped == {
        "empty prompt or output": 1,
        "not a number": 1,
        "no usable time": 1,
        "a field is missing": 1,
    }


def test_azure_of_2024_has_time_zones(trace: Read) -> None:
    assert [r.time_s for r in trace(AZURE_2024).rows] == pytest.approx([0.0, 0.5])


def test_burstgpt_is_read_by_the_names_of_its_columns(trace: Read) -> None:
    found = trace(BURSTGPT)
    assert found.format is Format.BURSTGPT
    assert found.rows == (Row(472, 18, 0.0), Row(1087, 230, 40.0))
    assert found.dropped == {"empty prompt or output": 1, "a field is missing": 1}


def test_burstgpt_3_links_the_turns_of_a_session(trace: Read) -> None:
    rows = trace(BURSTGPT_3).rows
    assert [(r.time_s, r.session, r.after, r.think_s) for r in rows] == [
        (0.0, "7", None, None),
        (1.0, "", None, None),
        (10.0, "7", 0, 7.5),
        (11.0, "7", 2, 1.0),
    ]


def test_mooncake_counts_milliseconds_and_has_blocks_of_512(trace: Read) -> None:
    found = trace(MOONCAKE)
    assert found.format is Format.MOONCAKE
    assert found.rows == (
        Row(1200, 52, 0.0, (46, 47, 48), 512),
        Row(1024, 9, 0.0, (46, 47), 512),  # the third name has no place in its prompt
        Row(600, 9, 3.5),
    )
    assert found.dropped == {
        "empty prompt or output": 1,
        "a field is missing or of a wrong kind": 1,
        "not JSON": 1,
    }


def test_bailian_counts_seconds_and_has_blocks_of_16_and_conversations(trace: Read) -> None:
    found = trace(BAILIAN)
    assert found.format is Format.BAILIAN
    assert [r.time_s for r in found.rows] == pytest.approx([0.0, 2.886, 3.886])
    assert [(r.session, r.after, r.blocks, r.block_tokens) for r in found.rows] == [
        ("159", None, (1, 2, 3), 16),
        ("55", None, (9,), 16),
        ("159", 0, (1, 2, 3, 4), 16),
    ]
    assert len(found.notes) == 2  # one row was out of order, one has lost its parent


@pytest.mark.parametrize("lines", [False, True])
def test_sharegpt_gives_every_answer_with_what_came_before_it(trace: Read, lines: bool) -> None:
    content = "\n".join(map(json.dumps, SHAREGPT)) if lines else json.dumps(SHAREGPT)
    found = trace(content)
    assert found.format is Format.SHAREGPT
    assert [(r.prompt_tokens, r.output_tokens, r.session, r.after) for r in found.rows] == [
        (20, 10, "0", None),
        (32, 4, "0", 0),
        (10, 10, "1", None),
    ]
    assert all(r.grows for r in found.rows)
    assert found.dropped == {
        "an answer with nothing before it": 1,
        "empty prompt or output": 1,
        "a conversation without an answer": 1,
        "no list of turns under 'conversations' or 'messages'": 2,
    }


def test_a_lone_surrogate_spoils_nothing(trace: Read) -> None:
    found = trace(rb'[{"conversations":[{"from":"human","value":"\ud83d aaaaaaaaa"},{"from":"gpt","value":"b"}]}]')
    assert found.emitted == 1


def servegen(folder: Path) -> None:
    trace = "0,2.0,1.5,Gamma,0.25,4.0\n600,0,,,0,0\n1200,1,0.5,Weibull,2.1,0.2\n1800,x,1,Gamma,1,1\n"
    (folder / "chunk-0-trace.csv").write_text(trace)
    lengths = {"0": {"input_tokens": "{100: 0.5, 200: 0.5, 0: 0.1}", "output_tokens": "{7: 1.0}"}}
    (folder / "chunk-0-dataset.json").write_text(json.dumps(lengths))


@pytest.mark.parametrize("name", ["", "chunk-0-trace.csv"])
def test_servegen_draws_requests_at_the_rate_and_burstiness_of_its_clients(tmp_path: Path, name: str) -> None:
    servegen(tmp_path)
    found = load(str(tmp_path / name), seed=1)
    assert isinstance(found, RowTrace)
    assert found.format is Format.SERVEGEN
    assert (found.rows_read, found.emitted) == (4, 2)
    assert found.dropped == {"a stretch of time without requests": 1, "not a number": 1}
    early = [r for r in found.rows if (r.time_s or 0) < 601]
    assert len(early) == pytest.approx(1200, rel=0.2)
    assert len(found.rows) - len(early) == pytest.approx(600, rel=0.1)
    assert {r.prompt_tokens for r in found.rows} == {100, 200}
    again, other = load(str(tmp_path), seed=1), load(str(tmp_path), seed=2)
    assert isinstance(again, RowTrace)
    assert isinstance(other, RowTrace)
    assert (again.rows == found.rows, other.rows == found.rows) == (True, False)


def test_servegen_without_its_lengths_says_what_it_needs(tmp_path: Path) -> None:
    servegen(tmp_path)
    (tmp_path / "chunk-0-dataset.json").unlink()
    with pytest.raises(TraceError, match=r"chunk-0-dataset\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,20,30,0.5\n11.0,21,32,0.5\n1.5,2,3,1\n",
        "\ufefforder,output_tokens,prompt_tokens\n\nx,20,10\nx,21,11\nx,1,nan\n",
    ],
)
def test_lengths_are_found_under_several_names(trace: Read, content: str) -> None:
    found = trace(content)
    assert (found.format, found.timed, found.rows) == (Format.LENGTHS, False, (Row(10, 20), Row(11, 21)))
    assert found.dropped.total() == 1


def test_lengths_may_have_times(trace: Read) -> None:
    found = trace("arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,20\n0.5,11,21\n")
    assert [(r.time_s, r.prompt_tokens) for r in found.rows] == [(0.0, 11), (1.0, 10)]
    assert found.notes == ("1 rows came earlier than the row above them; the rows were sorted by time",)


def test_gzip_makes_no_difference(trace: Read) -> None:
    plain, packed = trace(AZURE), trace(gzip.compress(AZURE.encode()))
    assert plain.rows == packed.rows
    assert plain.sha256 != packed.sha256


def test_a_window_is_cut_out_and_begins_at_zero(trace: Read) -> None:
    found = trace(BURSTGPT_3, window=Window(5.0, 11.0))
    assert [(r.time_s, r.after) for r in found.rows] == [(5.0, None)]
    assert found.dropped == {"outside the window": 3}
    with pytest.raises(TraceError, match="has no times"):
        trace("prompt_tokens,output_tokens\n1,1\n", window=Window(0.0, 5.0))


def test_a_schedule_comes_back_as_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text('{"schedule":1}\n{"index":0,"time_s":0,"prompt_tokens":3,"output_tokens":2,"seed":7}\n')
    assert isinstance(load(str(path)), Schedule)


def test_the_built_in_trace_needs_no_file() -> None:
    found = load(SHAREGPT_LIKE)
    assert isinstance(found, RowTrace)
    assert (found.format, found.emitted) == (Format.BUILT_IN, 20_000)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "found nothing"),
        ("a,b\n1,2\n", "found a,b"),
        ('{"x": 1}', "JSON of no known kind"),
        ("[1", "not valid JSON"),
        (AZURE.splitlines()[0], "no usable row"),
        (b"\x1f\x8b\x08broken", "broken gzip"),
        (b"\x00\xff\xfe" * 9, "no known kind"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_of_no_use_is_told(trace: Read, content: str | bytes, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        trace(content)


def test_no_file_is_told(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "a\0b"):
        with pytest.raises(TraceError, match="cannot read the trace"):
            load(name)
    with pytest.raises(TraceError, match="folder without"):
        load(str(tmp_path))


numbers = st.sampled_from(["1", "17", "0", "-3", "2.5", "1e9", "nan", "inf", "", "x", '"', "2024-01-01 00:00:00"])
noise = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=12)
json_values = st.sampled_from([1, 40, 0, -1, 2.5, 1e30, None, True, "7", [], [1, 2], [-1], {"a": 1}])
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id")
records = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, json_values)).map(json.dumps) | noise
lines_of = {
    AZURE.splitlines()[0]: st.lists(numbers | noise, min_size=1, max_size=5).map(",".join),
    BURSTGPT_3.splitlines()[0]: st.lists(numbers | noise, min_size=1, max_size=9).map(",".join),
    MOONCAKE.splitlines()[0]: records,
    BAILIAN.splitlines()[0]: records,
}


@settings(deadline=None)
@given(st.data())
def test_every_row_is_emitted_or_counted_under_a_reason(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    first = data.draw(st.sampled_from(sorted(lines_of)))
    lines = data.draw(st.lists(lines_of[first], max_size=8))
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes("\n".join([first, *lines]).encode())
    is_table = not first.startswith("{")
    blank = sum(not line.strip(' ",\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0') for line in lines)
    found: RowTrace | Schedule | str
    try:
        found = load(str(path))
    except TraceError as error:
        found = str(error)
    if isinstance(found, str):
        assert is_table
        assert "no usable row" in found
        return
    assert isinstance(found, RowTrace)
    assert found.rows_read == found.emitted + found.dropped.total()
    assert found.emitted == len(found.rows) >= 1
    assert len(lines) + (not is_table) - blank <= found.rows_read <= len(lines) + (not is_table)
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in found.rows)
    times = [r.time_s for r in found.rows if r.time_s is not None]
    assert times == sorted(times)
    assert all(r.after is None or r.after < index for index, r in enumerate(found.rows))
