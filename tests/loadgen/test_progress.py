import io
from array import array

from rich.console import Console

from loadgen.progress import open_display
from loadgen.runner import Counts

COUNTS = Counts(10, 6, 3, 1, 12.3, array("d", [0.1, 0.2, 0.9]), array("d", [0.05] * 99 + [0.25]))
LINE = "12 s: sent 6/10, running 2, done 3, failed 1, median TTFT 0.200 s, p99 TBT 52 ms"


def shown(console: Console) -> str:
    with open_display(console) as display:
        display.show(Counts(total=10))
        display.show(COUNTS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_one_plain_line_at_a_time() -> None:
    lines = shown(Console(file=io.StringIO(), width=40)).splitlines()
    assert lines == ["0 s: sent 0/10, running 0, done 0, failed 0, median TTFT -, p99 TBT -", LINE]


def test_a_terminal_gets_a_bar_that_is_redrawn() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    text = shown(console)
    assert LINE in text
    assert "\x1b[?25h" in text  # The cursor is back.
