"""Charts of results, drawn from what is stored; readable in black and white and by the colour-blind."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
    figure, axes = _empty(title_of(rows[0]))
    for number, (policy, line) in enumerate(lines.items()):
        means = [sum(line[budget]) / len(line[budget]) if budget in line else math.nan for budget in budgets]
        axes.plot(budgets, means, label=policy, **_style(number))
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
    _legend(axes)
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
    figure, axes = _empty(title)
    number = 0
    for name, documents in curves.items():
        middles, means = _binned(documents, width)
        if name == full:
            axes.plot(middles, means, label=name, color="black", linestyle="--", linewidth=1.6, zorder=5)
            continue
        axes.plot(middles, means, label=name, **_style(number), markevery=2)
        number += 1
    if isinstance(budget, int):
        axes.axvline(budget, color="0.4", linestyle=":", linewidth=1.6, label=f"budget: {budget}")
    axes.set_xlabel("Position in the text (tokens)")
    axes.set_ylabel(f"Loss (nats per token, mean of {width} positions)")
    axes.set_xlim(0, longest + 1)
    _legend(axes)
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
    figure, axes = _empty(f"{row['policy']}{budget}\n{title_of(row)}")
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


def picture(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file: "png" or "svg"."""
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=150)
    return stream.getvalue()


def _empty(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever backend is configured
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


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.3,
        "markersize": 5,
    }


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, handlelength=3.2)


def _scale(axes: Axes, values: Iterable[float]) -> bool:
    """Makes the y axis logarithmic where small values could not be told apart; returns whether it did."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) <= LOG_FROM * min(finite):
        return False
    axes.set_yscale("log")
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
    figure = Figure(figsize=(max(6.4, 1.0 + 0.85 * len(values)), 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever backend is configured
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
