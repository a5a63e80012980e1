"""Charts of what ``kvevict bench`` measured: time and memory beside transformers' own cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvevict.bench import DYNAMIC, Measured, Report, ratio
from kvevict.plots import canvas, curve_style, legend

Lines = Mapping[str, Mapping[int, float]]
"""For each cache, a value at each size."""

MOST_SIZES = 8
"""With more, the axis is linear, and its marks are not at each size."""
RATIO = f"ratio to {DYNAMIC}"
STEP = "Time of a step"
SECTIONS = {
    "decode": (STEP, "Tokens held by every cache (per KV head and layer)"),
    "compiled": (STEP, "Tokens held by every cache (per KV head and layer)"),
    "after": (STEP, "Tokens seen (by every cache)"),
    "prefill": ("Time of a prompt", "Prompt (tokens)"),
    "seen": (STEP, "Tokens seen (by every cache)"),
    "budget": (STEP, "Budget (tokens per KV head and layer)"),
    "batch": (STEP, "Batch (rows)"),
    "layers": (STEP, "Depth (layers)"),
    "kvpress decode": (STEP, "Tokens held by every cache (per KV head and layer)"),
    "kvpress after": (STEP, "Tokens seen (by every cache)"),
}
"""What is timed in each section of times, and what varies."""


def charts_of(report: Report) -> Iterator[tuple[str, Figure]]:
    """A name for the file, and the figure, for each section of a report of the bench."""
    model = str(report.settings.get("model", "unknown model"))
    for section in dict.fromkeys(row.section for row in report.timings):
        rows = [row for row in report.timings if row.section == section]
        timed, varies = SECTIONS.get(section, (STEP, "Size"))
        yield section.replace(" ", "-"), against(f"{model}\n{section}, medians", varies, _times(rows, timed))
    if report.memory:
        peaks = _lines((row.name, row.tokens, row.peak_bytes / 2**20) for row in report.memory)
        held = _lines((row.name, row.tokens, row.held_bytes / 2**20) for row in report.memory)
        panels = {"Peak while it is read (MiB)": peaks, "Held afterwards (MiB)": held}
        yield "memory", against(f"{model}\nmemory of a prompt, caches included", "Prompt (tokens)", panels)
    if report.policy_cost:
        costs = _lines((row.name, row.held, row.microseconds) for row in report.policy_cost)
        panels = {"Cost of a policy (µs per layer and step)": costs}
        title = f"{model}\nbeyond a cache that only writes the token in place, medians"
        yield "policy-cost", against(title, "Tokens held (per KV head and layer)", panels)
    if report.bounded:
        pieces = _lines(
            (row.name, min((number + 1) * row.chunk, row.tokens), 1e3 * seconds)
            for row in report.bounded
            for number, seconds in enumerate(row.seconds)
        )
        chunk, budget = report.bounded[0].chunk, report.bounded[0].budget
        title = f"{model}\na long prompt in pieces of {chunk} tokens, budget {budget}"
        yield "bounded-prefill", against(title, "Tokens read (the piece included)", {"Time of a piece (ms)": pieces})
    if report.fits:
        panels = {"Batch (rows)": _lines((row.name, row.seen, row.rows) for row in report.fits)}
        title = f"{model}\nthe largest batch that fits"
        yield "largest-batch", against(title, "Tokens seen (by every row)", panels)
    if report.waits:
        waits = _lines((row.name, row.held, sum(row.calls.values())) for row in report.waits)
        panels = {"Waits for the accelerator (calls)": waits}
        yield "host-waits", against(f"{model}\nin one step", "Tokens held (per KV head and layer)", panels)


def against(title: str, varies: str, panels: Mapping[str, Lines]) -> Figure:
    """A panel for each measure, DynamicCache dashed: lines against the size, or bars where there is one size.

    varies: the size, with its unit. panels: by the label of the y axis, with its unit. A value that is not there leaves
        a gap.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    sizes = sorted({size for lines in panels.values() for line in lines.values() for size in line})
    figure = canvas((8.4, 1.2 + 2.7 * max(len(panels), 1.5)), "constrained")
    all_axes: list[Axes] = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    draw = _draw_lines if len(sizes) > 1 else _draw_bars
    for axes, (label, lines) in zip(all_axes, panels.items(), strict=True):
        draw(axes, [name for name in names if name != DYNAMIC], sizes, lines)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        if RATIO not in label:
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0] and (axes is all_axes[0] or len(sizes) == 1):
            legend(axes)  # beside bars it says what the dashed line is worth
    said = "" if len(sizes) > 1 else f"\n{varies[0].lower()}{varies[1:]}: {sizes[0]:,}"
    all_axes[0].set_title(f"{title}{said}", fontsize=10, loc="left")
    last = all_axes[-1]
    if len(sizes) > MOST_SIZES:  # the pieces of one text
        last.xaxis.set_major_formatter("{x:,.0f}")
    elif len(sizes) > 1:
        last.set_xscale("log", base=2)
        last.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45 * (len(sizes) > 6))
        last.minorticks_off()
    last.set_xlabel(varies if len(sizes) > 1 else "Cache")
    return figure


def _times(rows: Sequence[Measured], timed: str) -> dict[str, Lines]:
    ratios = [(row.name, row.at, value) for row in rows if (value := ratio(row, rows)) is not None]
    return {
        **({f"{timed}\n({RATIO})": _lines(ratios)} if ratios else {}),
        f"{timed} (ms)": _lines((row.name, row.at, 1e3 * row.median) for row in rows),
        "Memory held (MiB)": _lines((row.name, row.at, row.nbytes / 2**20) for row in rows),
    }


def _lines(values: Iterable[tuple[str, int, float]]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for name, size, value in values:
        found.setdefault(name, {})[size] = value
    return found


def _draw_lines(axes: Axes, names: Sequence[str], sizes: Sequence[int], lines: Lines) -> None:
    for name, line in lines.items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.6, "zorder": 5}
        if name != DYNAMIC:
            style = curve_style(names.index(name))
        axes.plot(sizes, [line.get(size, math.nan) for size in sizes], label=name, **style)


def _draw_bars(axes: Axes, names: Sequence[str], sizes: Sequence[int], lines: Lines) -> None:
    values = [lines.get(name, {}).get(sizes[0], math.nan) for name in names]
    axes.bar(range(len(names)), values, color="0.75", edgecolor="black", zorder=2)
    for place, value in enumerate(values):
        if math.isfinite(value):
            axes.text(place, value / 2, f"{value:.3g}", ha="center", va="center", fontsize=9, zorder=5)
    if DYNAMIC in lines:
        full = lines[DYNAMIC][sizes[0]]
        name = f"{DYNAMIC}: {full:.3g}"
        axes.axhline(full, color="black", linestyle="--", linewidth=1.6, zorder=4, label=name)
    axes.set_xticks(range(len(names)), list(names), rotation=35, ha="right", rotation_mode="anchor")
    axes.margins(y=0.15)
