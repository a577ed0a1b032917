import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from samples import failed, result

from loadgen.record_file import _COLUMNS, RecordFileError, row_of, write_records


def test_a_row_has_every_moment_of_a_request(tmp_path: Path) -> None:
    records = [result(1.0, ttft=0.5, gaps=[0.1, 0.2], chunk_tokens=[1, 2, 1]), failed(2.0)]
    path = tmp_path / "out.jsonl"
    write_records(str(path), records)
    served, refused = (json.loads(line) for line in path.read_text().splitlines())
    assert served["intended_at_s"] == 1.0
    assert served["chunk_times_s"] == pytest.approx([1.5, 1.6, 1.8])
    assert (served["chunk_tokens"], served["tokens"], served["class"]) == ([1, 2, 1], 4, "gold")
    assert (refused["error"], refused["ttft_s"], refused["attained"]) == ("http 503", None, False)
    assert tuple(row_of(records[0])) == _COLUMNS


def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    records = [result(1.0, gaps=[0.1]), failed(2.0)]
    path = tmp_path / "out.parquet"
    write_records(str(path), records)
    assert pq.read_table(path).to_pylist() == [row_of(record) for record in records]


def test_without_pyarrow_parquet_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    real = builtins.__import__

    def no_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("pyarrow")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pyarrow)
    with pytest.raises(RecordFileError, match=r"slai-proxy\[parquet\]"):
        write_records(str(tmp_path / "out.parquet"), [])
