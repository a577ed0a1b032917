"""The figures, as SVG: TTFT against rate, capacities, TBT by class, TTFT by prompt length."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from proxy.sim.paper.plan import BASELINE, POLICIES, TTFT_P50_SECONDS
from proxy.sim.paper.results import capacities_by_seed, label, of_paper, ttft

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Runs = Sequence[dict[str, Any]]

_SHOWN = (BASELINE, "sarathi-spf", "slai-engine", "gate", "tiles", "deadline")
_DEADLINES = {"strict": 0.1, "relaxed": 0.5}


def draw(folder: Path, runs: Runs) -> list[Path]:
    """Draw all figures into ``folder``; return their files, none without matplotlib."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - of the dependency group "paper"

        mpl.use("svg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
        return []
    plt.rcParams.update({"svg.hashsalt": "paper", "figure.figsize": (7, 4), "font.size": 10, "axes.grid": True})
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, one in (("ttft", _ttft), ("capacity", _capacity), ("tbt", _tbt), ("lengths", _lengths)):
        figure = one(plt, runs)
        files.append(folder / f"{name}.svg")
        figure.tight_layout()
        figure.savefig(files[-1], metadata={"Date": None})
        plt.close(figure)
    return files


def _ttft(plt: Any, runs: Runs) -> Any:
    figure, axes = plt.subplots()
    for policy in _SHOWN:
        rates = sorted({run["rate"] for run in of_paper(runs) if run["policy"] == policy})
        axes.plot(rates, [median(ttft(runs, policy, rate)) for rate in rates], marker="o", label=label(policy))
    axes.axhline(TTFT_P50_SECONDS, color="gray", linestyle="--")
    axes.set(xlabel="requests per second", ylabel="median TTFT (s)", ylim=(0, 2), title="Median TTFT against rate")
    axes.legend()
    return figure


def _capacity(plt: Any, runs: Runs) -> Any:
    found = capacities_by_seed(runs)
    names = [policy for policy in POLICIES if found.get(policy)]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    middles = [median(found[name].values()) for name in names]
    errors = [
        [m - min(found[n].values()) for n, m in zip(names, middles, strict=True)],
        [max(found[n].values()) - m for n, m in zip(names, middles, strict=True)],
    ]
    axes.barh([label(name) for name in names], middles, xerr=errors, color="tab:blue", alpha=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="requests per second", title="Capacity (median TTFT up to 0.5 s)")
    return figure


def _tbt(plt: Any, runs: Runs) -> Any:
    rate = _busy_rate(runs)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, (kind, deadline) in zip(panels, _DEADLINES.items(), strict=True):
        for policy in _SHOWN:
            curves = [
                run["tbt_quantiles"][kind] for run in of_paper(runs) if (run["policy"], run["rate"]) == (policy, rate)
            ]
            curves = [curve for curve in curves if curve]
            if curves:
                middle = [1e3 * median(points) for points in zip(*curves, strict=True)]
                axes.plot(middle, [i / (len(middle) - 1) for i in range(len(middle))], label=label(policy))
        axes.axvline(1e3 * deadline, color="gray", linestyle="--")
        axes.set(xlabel="TBT (ms)", title=f"{kind} users at {rate:g} requests per second", xlim=(0, 1.3e3 * deadline))
    panels[0].set_ylabel("share of gaps")
    panels[1].legend()
    return figure


def _lengths(plt: Any, runs: Runs) -> Any:
    rate = _busy_rate(runs)
    figure, axes = plt.subplots()
    for policy in _SHOWN:
        rows = [r["ttft_s_by_prompt_tokens"] for r in of_paper(runs) if (r["policy"], r["rate"]) == (policy, rate)]
        names = sorted({name for row in rows for name in row}, key=lambda name: int(name.rstrip("+").split("-")[0]))
        values = [
            [row[n]["p50"] for row in rows if n in row and row[n]["p50"] is not None and row[n]["requests"] > 5]
            for n in names
        ]
        shown = [(name, median(found)) for name, found in zip(names, values, strict=True) if found]
        axes.plot([name for name, _ in shown], [value for _, value in shown], marker="o", label=label(policy))
    axes.set(
        xlabel="prompt tokens",
        ylabel="median TTFT (s)",
        yscale="log",
        title=f"TTFT by prompt length at {rate:g} requests per second",
    )
    axes.legend()
    return figure


def _busy_rate(runs: Runs) -> float:
    """The highest rate but one: near saturation, and not beyond it."""
    rates = sorted({run["rate"] for run in of_paper(runs)})
    return float(rates[max(0, len(rates) - 2)])
