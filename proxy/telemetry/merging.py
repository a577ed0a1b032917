"""One exposition for Prometheus from those of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL = "worker"
_END = b"# EOF\n"  # of OpenMetrics


def merge(expositions: Mapping[str, bytes]) -> bytes:
    """Return all series of ``expositions``, with their keys as the label ``worker``.

    All are in Prometheus' text format, or all in OpenMetrics.

    They are not added up: sums of counters that begin anew with each process would fall, and only who asks knows
    whether a gauge is to be added.
    """
    families: dict[str, list[bytes]] = {}  # what explains a family, and its samples, by its name
    for worker, exposition in expositions.items():
        label = b'%s="%s"' % (LABEL.encode(), worker.encode())
        family = families.setdefault("", [])
        for line in exposition.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ", b"# UNIT ")):
                name = line.split(b" ", 3)[2].decode()
                family = families.setdefault(name, [])
                if any(known.startswith(line[:7]) for known in family):
                    continue  # another process has said so
                family.append(line)
            elif line and not line.startswith(b"#"):
                family.append(_labelled(line, label))
    lines = [line for family in families.values() for line in family]
    if any(exposition.endswith(_END) for exposition in expositions.values()):
        lines.append(_END.rstrip())
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
    name, _, value = sample.partition(b" ")
    return name + b"{" + label + b"} " + value
