"""Maps of what caches hold: by layer and head, by age, by token, by step. Drawn from stored results, like ``plots``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from torch import Tensor

from kvevict.kept import held_after, survival
from kvevict.plots import canvas, curve_style, empty, legend

COLUMNS = 4
"""Panels side by side."""
CELLS = 256
"""Steps and positions of a raster at most; more are drawn as means."""
FONT = "DejaVu Sans Mono"
"""Comes with matplotlib; all its letters are equally wide."""
CHARACTERS = 96
"""Letters in a line of a token map."""
FEW = 16
"""Ages that fewer than one in so many tokens reached are not drawn: the first tokens of a text are not typical."""
TOKENS = 640
"""Tokens of a token map at most; of longer texts the beginning and the end are drawn."""


def retained_by_head(heads: Sequence[Mapping[str, Any]], title: str, value: str = "retained") -> Figure:
    """Retained mass of each layer and query head, a panel for each policy, all on one scale.

    heads: of heads.jsonl, at one budget. value: "retained" or "recall".
    """
    policies = list(dict.fromkeys(row["policy"] for row in heads))
    layers = sorted({row["layer"] for row in heads})
    number = 1 + max(row["head"] for row in heads)
    group = sum(1 for row in heads if row["kv_head"] == 0) // len(policies) // len(layers)
    lowest = math.floor(10 * min(row[value] for row in heads)) / 10
    figure, panels = _panels(policies, title, 0.55 + max(1.5, 0.085 * len(layers)))
    image = None
    for policy, axes in zip(policies, panels, strict=True):
        cells = {(row["layer"], row["head"]): row[value] for row in heads if row["policy"] == policy}
        grid = [[cells[layer, head] for head in range(number)] for layer in layers]
        image = axes.imshow(grid, cmap="cividis", vmin=lowest, vmax=1, aspect="auto", interpolation="nearest")
        for head in range(group, number, group):
            axes.axvline(head - 0.5, color="white", linewidth=0.8)  # query heads of another KV head
        axes.set_xticks(*_ticks(list(range(number)), 9))
        axes.set_yticks(*_ticks(layers, 8))
    name = {"retained": "Retained attention mass", "recall": "Heavy-hitter recall"}[value]
    _outer(panels, "Query head (index)", "Layer (index)")
    assert image is not None
    figure.colorbar(image, ax=panels, label=f"{name} (share, higher is better)", fraction=0.03, aspect=40)
    return figure


def survival_by_age(kept: Mapping[str, Tensor], budget: int, title: str) -> Figure:
    """The share of tokens of each age that are still held, one line for each policy, with the budget marked.

    kept: by policy, when each token left: (layers, KV heads, tokens), as ``kvevict.kept`` reads it. Ages that fewer
        than one in ``FEW`` tokens reached are left out.
    """
    figure, axes = empty(title)
    tokens = next(iter(kept.values())).shape[-1]
    length = max(2, tokens - tokens // FEW + 1)
    marked = [2**power - 1 for power in range(length.bit_length()) if 2**power < length]
    for number, (policy, left) in enumerate(kept.items()):
        shares = survival(left)[1:length].tolist()
        axes.plot(range(1, length), shares, label=policy, **curve_style(number), markevery=marked)
    axes.axvline(budget, color="0.4", linestyle=":", linewidth=1.6, label=f"budget: {budget}")
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, length)
    axes.set_ylim(0, 1.03)
    ages = [2**power for power in range(length.bit_length()) if 2**power <= length]
    axes.set_xticks(ages, [f"{age:,}" for age in ages])
    axes.set_xlabel("Age (tokens that came after, log scale)")
    axes.set_ylabel("Tokens of that age still held (share over all KV heads)")
    legend(axes)
    return figure


def raster(kept: Mapping[str, Tensor], title: str, layer: int | None = None, head: int | None = None) -> Figure:
    """Which positions are held after each step, a panel for each policy: the darker, the more KV heads hold them.

    kept: as for ``survival_by_age``. layer, head: of the trace, to draw one layer, or one KV head, alone.
    """
    figure, panels = _panels(list(kept), title, 2.5)
    image = None
    for left, axes in zip(kept.values(), panels, strict=True):
        left = left if layer is None else left[layer : layer + 1]
        left = left if head is None else left[:, head : head + 1]
        grid, length = held_grid(left), left.shape[-1]
        axes.patch.set(hatch="////", edgecolor="0.8", linewidth=0)  # seen where tokens have not come yet
        image = axes.imshow(
            grid, cmap="Greys", vmin=0, vmax=1, origin="lower", extent=(0, length, 0, length), aspect="auto",
            interpolation="nearest",
        )  # fmt: skip  # one picture
        ticks = [0, length // 2, length]
        axes.set_xticks(ticks, [f"{each:,}" for each in ticks])
        axes.set_yticks(ticks, [f"{each:,}" for each in ticks])
    _outer(panels, "Tokens seen (steps)", "Position (tokens)")
    assert image is not None
    label = "Held by (share of KV heads; hatched: still to come)"
    figure.colorbar(image, ax=panels, label=label, fraction=0.03, aspect=40)
    return figure


def held_grid(left: Tensor) -> numpy.ma.MaskedArray[Any, Any]:
    """The share of KV heads that hold each position (down) after each step (right), at most ``CELLS`` of both.

    left: (layers, KV heads, tokens). Masked where no token has come yet.
    """
    length = left.shape[-1]
    width = math.ceil(length / CELLS)
    steps = list(range(width, length + 1, width))
    held = numpy.stack([held_after(left, seen).double().mean((0, 1)).numpy() for seen in steps], 1)  # (length, steps)
    rows = [held[start : start + width].mean(0) for start in range(0, length, width)]
    came = [[start < seen for seen in steps] for start in range(0, length, width)]
    return numpy.ma.masked_array(numpy.stack(rows), ~numpy.array(came))


def token_map(tokens: Sequence[str], heads: Sequence[int], kv_heads: int, title: str) -> Figure:
    """The text, each token shaded by how many KV heads of all layers still hold it.

    tokens: the text, token by token; only the first ``len(heads)`` have been seen.
    heads:  how many KV heads hold each, of ``kv_heads``.
    """
    runs, starts = _laid_out([_printable(token) for token in tokens[: len(heads)]])
    lines = len(starts)
    tall, wide, room = lines * 0.165, CHARACTERS * 0.0675, max(1.4, lines * 0.165)  # inches
    size = (1.0 + wide + 1.15, 0.9 + room)
    figure = canvas(size)
    axes = figure.add_axes((1.0 / size[0], (0.1 + room - tall) / size[1], wide / size[0], tall / size[1]))
    axes.set_xlim(0, CHARACTERS)
    axes.set_ylim(lines, 0)
    shades = matplotlib.colormaps["Blues"]
    shares = [count / kv_heads for count in heads]
    boxes = [Rectangle((column + 0.05, line), len(letters) - 0.1, 0.96) for _, line, column, letters in runs]
    patches = PatchCollection(boxes, cmap=shades, edgecolor="none")
    patches.set_array(numpy.array([shares[token] for token, *_ in runs]))
    patches.set_clim(0, 1)
    axes.add_collection(patches)
    for token, line, column, letters in runs:
        ink = "white" if shares[token] > 0.6 else "black"
        axes.text(
            column, line + 0.55, letters, family=FONT, fontsize=8, color=ink, va="center_baseline", parse_math=False
        )
    axes.set_yticks([line + 0.5 for line in range(lines)], [f"{start:,}" if start >= 0 else "" for start in starts])
    axes.set_xticks([])
    if lines > 18:
        axes.set_ylabel("Position of the line's first token (tokens)")
    else:
        axes.set_ylabel("Position (tokens)", loc="top")
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, x=0.02, y=1 - 0.08 / size[1], ha="left", va="top", fontsize=10)
    bar = figure.add_axes((1 - 0.95 / size[0], 0.1 / size[1], 0.15 / size[0], room / size[1]))
    figure.colorbar(patches, cax=bar, label="Held by (share of KV heads)" if lines > 12 else "Held by\n(share)")
    return figure


# -- panels ------------------------------------------------------------------------------------------------------------


def _panels(names: Sequence[str], title: str, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for each name, ``height`` inches each."""
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    size = (1.7 + 2.1 * max(columns, 3), max(4.4, 0.9 + height * rows))  # room for what the colours mean
    figure = canvas(size, layout="constrained")
    panels = []
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)
        panels.append(axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure, panels


def _outer(panels: Sequence[Axes], x: str, y: str) -> None:
    """Names the axes of the outer panels; the others share them."""
    columns = min(COLUMNS, len(panels))
    for place, axes in enumerate(panels):
        if place % columns == 0:
            axes.set_ylabel(y, fontsize=9)
        if place + columns >= len(panels):
            axes.set_xlabel(x, fontsize=9)


def _ticks(values: Sequence[int], most: int) -> tuple[list[int], list[str]]:
    """Places and names of at most ``most`` ticks."""
    every = math.ceil(len(values) / most)
    places = list(range(0, len(values), every))
    return places, [str(values[place]) for place in places]


# -- text --------------------------------------------------------------------------------------------------------------


def _printable(token: str) -> str:
    """The token with a sign for each end of line, and for what the font cannot draw."""
    known = get_font(findfont(FONT)).get_char_index
    signs = {"\n": "↵", "\t": "→", "\r": "↵"}
    letters = [signs.get(letter, letter) for letter in token]
    return "".join(letter if letter.isprintable() and known(ord(letter)) else "□" for letter in letters) or "□"


def _laid_out(tokens: Sequence[str]) -> tuple[list[tuple[int, int, int, str]], list[int]]:
    """Where letters go: (token, line, column, letters); and the first token of each line, -1 for the gap's line.

    A line ends after an end of line, and where a token does not fit any more; longer tokens are cut. Where there are
    more than ``TOKENS``, those in the middle are left out.
    """
    runs: list[tuple[int, int, int, str]] = []
    starts: list[int] = []
    column = CHARACTERS  # a new line comes first
    for number in _shown(len(tokens)):
        if number < 0:
            starts.append(-1)
            column = CHARACTERS
            continue
        rest = tokens[number]
        if column + len(rest) > CHARACTERS or starts[-1] < 0:
            column = CHARACTERS
        while rest:
            if column >= CHARACTERS:
                starts.append(number)
                column = 0
            letters, rest = rest[: CHARACTERS - column], rest[CHARACTERS - column :]
            runs.append((number, len(starts) - 1, column, letters))
            column += len(letters)
        if tokens[number].endswith("↵"):
            column = CHARACTERS
    return runs, starts


def _shown(count: int) -> Iterable[int]:
    """The tokens to draw, with -1 for a gap."""
    if count <= TOKENS:
        return range(count)
    return [*range(TOKENS // 2), -1, *range(count - TOKENS // 2, count)]
