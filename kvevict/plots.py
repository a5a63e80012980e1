"""Charts of results, drawn from what is stored; readable in black and white and by the colour-blind."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from kvevict.plan import FULL_CACHE

LOG_FROM = 8
"""Bars further apart than this ratio are drawn on a logarithmic axis, or the small ones could not be told apart."""


COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's palette (2008, https://jfly.uni-koeln.de/color/), without the yellow that is faint on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p", "d")
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
BINS = 32
"""Points of a curve over positions: single tokens' losses scatter too much to be seen."""


@dataclass(frozen=True)
class Measure:
    """How a column of results is named on an axis, and how its numbers are written."""

    name: str
    note: str
    form: str = ".2f"


MEASURED = {
    "perplexity": Measure("Perplexity", "lower is better"),
    "perplexity_after_budget": Measure("Perplexity after the budget", "lower is better"),
    "kl": Measure("KL from the full cache", "nats per token, lower is better", ".3f"),
    "top1_agreement": Measure("Top-1 agreement", "share, higher is better"),
    "match": Measure("Answers found", "share, higher is better"),
    "graded_recall": Measure("Graded recall", "0 without the fact, 1 full cache"),
    "retained": Measure("Retained attention mass", "share of all, higher is better", ".3f"),
    "recall": Measure("Heavy-hitter recall", "share of the most attended, higher is better", ".3f"),
    "missed_per_eviction": Measure("Future missed mass", "per evicted token, lower is better", ".3f"),
}
"""The columns that can be drawn."""


def by_budget(rows: Sequence[Mapping[str, Any]], value: str = "perplexity") -> Figure:
    """A measure against the budget, one line for each policy, and the full cache dashed.

    rows:  of results.jsonl, of one model, text, protocol and protection; rows of several seeds are drawn as their mean.
    value: the column to draw, of ``MEASURED``. Numbers that are not there leave a gap.
    """
    measure = MEASURED[value]
    lines: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["budget"] is not None:
            lines.setdefault(row["policy"], {}).setdefault(row["budget"], []).append(_number(row.get(value)))
    full = [_number(row.get(value)) for row in rows if row["budget"] is None]
    budgets = sorted({budget for line in lines.values() for budget in line})
    figure, axes = empty(title_of(rows[0]))
    for number, (policy, line) in enumerate(lines.items()):
        means = [sum(line[budget]) / len(line[budget]) if budget in line else math.nan for budget in budgets]
        axes.plot(budgets, means, label=policy, **curve_style(number))
    shown = [each for line in lines.values() for values in line.values() for each in values]
    if full and math.isfinite(full[0]):
        axes.axhline(
            full[0], color="black", linestyle="--", linewidth=1.2, label=f"full cache: {full[0]:{measure.form}}"
        )
        shown.append(full[0])
    if budgets and min(budgets) > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets], minor=False)
    axes.minorticks_off()
    shares = all(isinstance(budget, float) for budget in budgets)
    axes.set_xlabel("Budget (share of the tokens seen)" if shares else "Budget (tokens per KV head and layer)")
    scaled = _scale(axes, shown)
    axes.set_ylabel(_label(measure, scaled))
    legend(axes)
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[Sequence[float]]], budget: int | float, title: str, full: str = "full cache"
) -> Figure:
    """Loss against the position in the text, one line for each cache, with the budget marked.

    curves: for each name, the nats of the tokens from position 1 on, of each document. Positions are put in at most
        ``BINS`` bins; a point is the mean over the tokens of all documents in it, drawn at the bin's middle.
    full:   the name drawn dashed.
    """
    longest = max((len(nats) for documents in curves.values() for nats in documents), default=1)
    width = math.ceil(longest / BINS)
    figure, axes = empty(title)
    number = 0
    for name, documents in curves.items():
        middles, means = _binned(documents, width)
        if name == full:
            axes.plot(middles, means, label=name, color="black", linestyle="--", linewidth=1.6, zorder=5)
            continue
        axes.plot(middles, means, label=name, **curve_style(number), markevery=2)
        number += 1
    if isinstance(budget, int):
        axes.axvline(budget, color="0.4", linestyle=":", linewidth=1.6, label=f"budget: {budget}")
    axes.set_xlabel("Position in the text (tokens)")
    axes.set_ylabel(f"Loss (nats per token, mean of {width} positions)")
    axes.set_xlim(0, longest + 1)
    legend(axes)
    return figure


def needle_map(row: Mapping[str, Any], value: str = "match") -> Figure:
    """A needle's row of results as a map: depth down, length to the right, each cell with its number.

    value: "match", the share of answers found, or "graded_recall".
    """
    from kvevict.retrieval import graded_recall

    cells: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for case in row["cases"]:
        cells.setdefault((case["depth"], case["length"]), []).append(case)
    depths = sorted({depth for depth, _ in cells})
    lengths = sorted({length for _, length in cells})

    def shown(cases: list[Mapping[str, Any]]) -> float:
        if value == "match":
            return float(sum(case["match"] for case in cases) / len(cases))
        columns = ([case[name] for case in cases] for name in ("logprob", "full_logprob", "without_logprob"))
        return graded_recall(*columns)

    grid = [[shown(cells[depth, length]) for length in lengths] for depth in depths]
    budget = "" if row["budget"] is None else f", budget {row['budget']}"
    figure, axes = empty(f"{row['policy']}{budget}\n{title_of(row)}")
    image = axes.imshow(grid, cmap="Greys_r", vmin=0, vmax=1, aspect="auto")
    for down, line in enumerate(grid):
        for right, each in enumerate(line):
            ink = "black" if not each <= 0.5 else "white"  # on light and dark cells; a cell without a number is white
            axes.text(right, down, f"{each:.2f}" if math.isfinite(each) else "–", ha="center", va="center", color=ink)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("Length of the prompt (tokens)")
    axes.set_ylabel("Depth of the needle (0%: the start)")
    figure.colorbar(image, ax=axes, label=_label(MEASURED[value]))
    return figure


def headroom(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Each policy's retained mass between the random control and the oracle, with its head-room written beside.

    rows: of kvevict diagnose's results.jsonl, at one budget, and the full cache's.
    """
    whole = next(row for row in rows if row["kind"] == "full")["retained"]
    bounds = {row["policy"]: row["retained"] for row in rows if row["kind"] == "bound"}
    policies = sorted((row for row in rows if row["kind"] == "policy"), key=lambda row: float(row["retained"]))
    budget = rows[-1]["budget"]
    said = f"budget {budget}, budget head-room (full cache - oracle) {whole - bounds['oracle']:.3f}"
    figure, axes = empty(f"{title_of(rows[-1])}\n{said}")
    for place, row in enumerate(policies):
        axes.plot([row["retained"], bounds["oracle"]], [place, place], color="0.6", linewidth=3, solid_capstyle="butt")
        axes.plot(row["retained"], place, color="black", marker="o", markersize=7, linestyle="none")
        axes.annotate(
            f"{row['retained']:.3f}, head-room {row['policy_headroom']:.3f}",
            (min(row["retained"], bounds["oracle"]), place), (-9, 0), textcoords="offset points", ha="right",
            va="center", fontsize=8.5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip  # one note
    dashes = {"random": (0, (1, 1)), "oracle": "-", "ceiling": (0, (5, 1, 1, 1)), FULL_CACHE: "--"}
    for (name, dash), colour in zip(dashes.items(), ("#D55E00", "#0072B2", "#009E73", "black"), strict=True):
        value = whole if name == FULL_CACHE else bounds[name]
        axes.axvline(value, color=colour, linestyle=dash, linewidth=1.6, label=f"{name}: {value:.3f}", zorder=0)
    least = min([*bounds.values(), *(row["retained"] for row in policies)])
    axes.set_xlim(least - 0.45 * (whole - least), whole + 0.02 * (whole - least))  # room for what is written
    axes.set_yticks(range(len(policies)), [row["policy"] for row in policies])
    axes.set_xlabel(_label(MEASURED["retained"]))
    axes.set_ylabel("Policy (the best on top)")
    legend(axes)
    return figure


def growth_curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Bytes held, time per step, and that time beside the full cache's, against the tokens generated.

    rows: of kvevict growth's results.jsonl, the full cache first; it is dashed. Times are medians of at most ``BINS``
        groups of steps, and so are the ratios, of steps that were measured one after the other. The prompt, which is
        not a step of one token, counts for the bytes alone.
    """
    figure = canvas((8.4, 8.6), "constrained")
    memory, speed, ratio = figure.subplots(3, 1, sharex=True)
    steps = len(rows[0]["held_bytes"]) - 1
    width = math.ceil(steps / BINS)
    full = rows[0]["seconds"][1:]
    for number, row in enumerate(rows):
        name = row["policy"] if row["budget"] is None else f"{row['policy']} at {row['budget']}"
        style = curve_style(number - 1)
        if row["budget"] is None:
            style = {"color": "black", "linestyle": "--", "linewidth": 1.6, "zorder": 5}
        held = [each / 2**20 for each in row["held_bytes"]]
        memory.plot(range(steps + 1), held, label=name, **style, markevery=max(1, steps // 12))
        seconds = row["seconds"][1:]
        speed.plot(*_medians([1e3 * each for each in seconds], width), label=name, **style)
        ratio.plot(*_medians([one / other for one, other in zip(seconds, full, strict=True)], width), **style)
    memory.set_title(title_of(rows[-1]), fontsize=10, loc="left")
    memory.set_ylabel("Memory held (MiB)")
    speed.set_ylabel("Time of a step (ms)")
    ratio.set_ylabel("Time of a step (ratio to full)")
    every = f"; times are medians of {width} steps" if width > 1 else ""
    ratio.set_xlabel(f"Tokens generated (after a prompt of {rows[0]['prompt']}{every})")
    for axes in (memory, speed):
        axes.set_ylim(bottom=0)
    for axes in (memory, speed, ratio):
        axes.spines[["top", "right"]].set_visible(False)
    legend(memory)
    return figure


def _medians(values: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """The middles of groups of ``width`` steps, counted from 1, and the medians in them."""
    groups = [values[start : start + width] for start in range(0, len(values), width)]
    middles = [place * width + (len(each) + 1) / 2 for place, each in enumerate(groups)]
    return middles, list(map(statistics.median, groups))


def picture(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file: "png" or "svg"."""
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=150)
    return stream.getvalue()


def canvas(size: tuple[float, float], layout: Literal["constrained"] | None = None) -> Figure:
    """An empty figure of that many inches, that opens no window, whatever backend is configured."""
    figure = Figure(figsize=size, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def empty(title: str) -> tuple[Figure, Axes]:
    """A figure with one empty, titled panel."""
    figure = canvas((8.4, 5.2), "constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def title_of(row: Mapping[str, Any]) -> str:
    """The model, the text, the protocol, and the protection of a row."""
    protection = ", ".join(f"{name}={value}" for name, value in row["protection"].items())
    kept = f", all keep {protection}" if protection else ""
    return f"{row['model']} on {row['text']}\n{row['protocol']}{kept}"


def _label(measure: Measure, logarithmic: bool = False) -> str:
    return f"{measure.name} ({measure.note}{', log scale' if logarithmic else ''})"


def curve_style(number: int) -> dict[str, Any]:
    """How the n-th line is drawn: told apart without colour too."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.3,
        "markersize": 5,
    }


def legend(axes: Axes) -> None:
    """A legend beside the panel."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, handlelength=3.2)


def _scale(axes: Axes, values: Iterable[float]) -> bool:
    """Makes the y axis logarithmic where small values could not be told apart; returns whether it did."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) <= LOG_FROM * min(finite):
        return False
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    return True


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _binned(documents: Sequence[Sequence[float]], width: int) -> tuple[list[float], list[float]]:
    """The middles of the bins, in positions from 1 on, and the means in them."""
    sums: dict[int, list[float]] = {}
    for nats in documents:
        for place, value in enumerate(nats):
            sums.setdefault(place // width, []).append(value)
    bins = sorted(sums)
    return [1 + each * width + (width - 1) / 2 for each in bins], [sum(sums[each]) / len(sums[each]) for each in bins]


def bars(values: Mapping[str, float], full: float, title: str, value: str = "perplexity") -> Figure:
    """A bar for each name with its value above, and the full cache's as a dashed line.

    value: what is drawn, of ``MEASURED``. Values that are not finite are written as such, without a bar.
    """
    measure = MEASURED[value]
    finite = [each for each in [*values.values(), full] if math.isfinite(each)] or [1.0]
    figure = canvas((max(6.4, 1.0 + 0.85 * len(values)), 5.2), "constrained")
    axes = figure.add_subplot()
    logarithmic = _scale(axes, finite)
    bottom = min(finite) / 1.5 if logarithmic else min(0.0, *finite)
    axes.set_ylim(bottom, max(finite) * 1.6 if logarithmic else max(max(finite) * 1.12, 1e-9))
    heights = [each if math.isfinite(each) else bottom for each in values.values()]
    axes.bar(range(len(values)), heights, color="0.75", edgecolor="black", zorder=2)
    for place, (each, height) in enumerate(zip(values.values(), heights, strict=True)):
        axes.text(place, height, f"{each:{measure.form}}", ha="center", va="bottom", fontsize=9, zorder=3)
    if math.isfinite(full):
        name = f"full cache: {full:{measure.form}}"
        axes.axhline(full, color="black", linestyle="--", linewidth=1.2, zorder=4, label=name)
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    axes.set_xticks(range(len(values)), list(values), rotation=35, ha="right", rotation_mode="anchor")
    axes.set_ylabel(_label(measure, logarithmic))
    figure.suptitle(title, x=0.02, ha="left", fontsize=10)  # above the legend
    axes.spines[["top", "right"]].set_visible(False)
    return figure
