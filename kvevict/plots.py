"""Charts of results, readable in black and white."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LOG_FROM = 8
"""Bars further apart than this ratio are drawn on a logarithmic axis, or the small ones could not be told apart."""


def perplexity_bars(perplexities: Mapping[str, float], full: float, title: str) -> bytes:
    """A bar for each name with its value above, and the full cache's perplexity as a dashed line: a PNG.

    Values that are not finite are written as such, without a bar.
    """
    names = list(perplexities)
    values = list(perplexities.values())
    finite = [value for value in [*values, full] if math.isfinite(value)] or [1.0]
    figure = Figure(figsize=(max(6.4, 1.0 + 0.85 * len(names)), 5.2), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever backend is configured
    axes = figure.add_subplot()
    logarithmic = max(finite) > LOG_FROM * min(finite)
    bottom = min(finite) / 1.5 if logarithmic else 0.0
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(bottom, max(finite) * 1.6)
    else:
        axes.set_ylim(0, max(finite) * 1.12)
    heights = [value if math.isfinite(value) else bottom for value in values]
    axes.bar(range(len(names)), heights, color="0.75", edgecolor="black", zorder=2)
    for place, (value, height) in enumerate(zip(values, heights, strict=True)):
        axes.text(place, height, f"{value:.2f}", ha="center", va="bottom", fontsize=9, zorder=3)
    axes.axhline(full, color="black", linestyle="--", linewidth=1.2, zorder=4, label=f"full cache: {full:.2f}")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_ylabel("Perplexity (lower is better" + (", log scale)" if logarithmic else ")"))
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()
