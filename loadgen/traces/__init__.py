"""Traces of real traffic: files of many formats, recognised by what is in them, as one kind of row.

``rows``
    What every format comes down to, and the account of the rows that were not usable.
``load``
    Which format a file has, and reading it.
``tables``
    CSV: lengths (as the SLAI paper's), Azure 2023 and 2024, BurstGPT 1 and 3.
``records``
    JSON lines: Mooncake, Qwen-Bailian.
``conversations``
    ShareGPT: turns of conversations, as JSON or JSON lines.
``servegen``
    ServeGen: rates and length histograms of clients, from which requests are drawn.
"""

from loadgen.traces.load import load
from loadgen.traces.rows import Format, Row, RowTrace

__all__ = ["Format", "Row", "RowTrace", "load"]
