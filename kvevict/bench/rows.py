"""What the bench measured, as rows: how they are printed, written and read again."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvevict.cache import human_bytes
from kvevict.errors import OutputError

DYNAMIC = "DynamicCache"
"""The row that ratios are relative to: transformers' cache with the model's own attention, sdpa as a rule."""

FILE = "bench.json"


@dataclass(frozen=True)
class Measured:
    """One cache's times in one section.

    at:      what the section varies: tokens held, seen or of a prompt, the budget, rows of a batch, or layers.
    held:    tokens per KV head that the cache holds, at most over the layers.
    seconds: of each repetition, in the order measured.
    nbytes:  that the cache holds afterwards.
    """

    section: str
    name: str
    at: int
    held: int
    seconds: tuple[float, ...]
    nbytes: int

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


@dataclass(frozen=True)
class Memory:
    """What one prompt of ``tokens`` tokens allocated.

    peak_bytes:   the most that was allocated at a time beyond what was before, the new cache included.
    held_bytes:   that the cache holds afterwards.
    matrix_bytes: of one layer's float32 attention weights of all queries, what eager attention makes: a scale.
    """

    name: str
    tokens: int
    peak_bytes: int
    held_bytes: int
    matrix_bytes: int


@dataclass(frozen=True)
class Cost:
    """What a policy adds to one layer of a decode step at a full cache.

    seconds:       by layer, the median over the steps beyond that of a cache that only writes the token in place.
    layer_seconds: the median of the whole decoder layer with that plain cache.
    """

    name: str
    held: int
    seconds: tuple[float, ...]
    layer_seconds: float

    @property
    def microseconds(self) -> float:
        """Of the average layer and step."""
        return statistics.fmean(self.seconds) * 1e6

    @property
    def share(self) -> float:
        """Of the decoder layer's forward."""
        return statistics.fmean(self.seconds) / self.layer_seconds


@dataclass(frozen=True)
class Bounded:
    """A long prompt in pieces of ``chunk`` tokens.

    seconds:         of each piece.
    peak_bytes:      the most that keys and values of any one layer took while it attended.
    expected_bytes:  of the budget and one piece, or of the whole prompt for a full cache.
    held_bytes:      that the cache holds afterwards.
    """

    name: str
    tokens: int
    chunk: int
    budget: int
    seconds: tuple[float, ...]
    peak_bytes: int
    expected_bytes: int
    held_bytes: int

    @property
    def growth(self) -> float:
        """The last third's median piece relative to the first third's, without the first piece: 1 is linear time."""
        third = max(1, (len(self.seconds) - 1) // 3)
        return statistics.median(self.seconds[-third:]) / statistics.median(self.seconds[1 : 1 + third])


@dataclass(frozen=True)
class Fit:
    """The most rows for which a decode step after ``seen`` tokens fits on the accelerator; ``limit`` was the last try.

    nbytes: that the cache of so many rows holds.
    """

    name: str
    seen: int
    rows: int
    limit: int
    nbytes: int


@dataclass(frozen=True)
class Waits:
    """How often one decode step made the host wait for the accelerator, by what made it wait."""

    name: str
    held: int
    calls: dict[str, int]


Row = TypeVar("Row", Measured, Memory, Cost, Bounded, Fit, Waits)


@dataclass
class Report:
    """Everything that one run of the bench measured, its settings, and what could not be measured."""

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    timings: list[Measured] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    policy_cost: list[Cost] = field(default_factory=list)
    bounded: list[Bounded] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    waits: list[Waits] = field(default_factory=list)

    def text(self) -> str:
        """Settings, a table for each kind of row, and the notes."""
        lines = [", ".join(f"{name} {value}" for name, value in self.settings.items())]
        tables = (
            timing_table(self.timings),
            memory_table(self.memory),
            cost_table(self.policy_cost),
            bounded_table(self.bounded),
            fit_table(self.fits),
            waits_table(self.waits),
        )
        return "\n\n".join([*lines, *(table for table in tables if table), *(f"Note: {note}" for note in self.notes)])

    def json(self) -> str:
        """The rows with their medians and ratios; ``read`` takes it back."""
        document = dataclasses.asdict(self)
        for row, plain in zip(self.timings, document["timings"], strict=True):
            plain |= {"median": row.median, "spread": row.spread, "ratio": ratio(row, self.timings)}
        for cost, plain in zip(self.policy_cost, document["policy_cost"], strict=True):
            plain |= {"microseconds": cost.microseconds, "share": cost.share}
        for bounded, plain in zip(self.bounded, document["bounded"], strict=True):
            plain |= {"growth": bounded.growth}
        return json.dumps(document, indent=1) + "\n"


def read(path: Path) -> Report:
    """The report of a bench.json. Raises OutputError if there is none that can be read."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return Report(
            document["settings"],
            document["notes"],
            _rows(Measured, document["timings"]),
            _rows(Memory, document["memory"]),
            _rows(Cost, document["policy_cost"]),
            _rows(Bounded, document["bounded"]),
            _rows(Fit, document["fits"]),
            _rows(Waits, document["waits"]),
        )
    except OSError as error:
        raise OutputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{str(path)!r} is not what kvevict bench of this release writes ({type(error).__name__}: {error}): give "
            f"its {FILE}, or the folder that another command wrote"
        ) from error


def _rows(kind: type[Row], plain: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows from their JSON, without what is computed from them."""
    names = [each.name for each in dataclasses.fields(kind)]
    return [kind(**{name: _tupled(row[name]) for name in names}) for row in plain]


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def ratio(row: Measured, rows: Sequence[Measured]) -> float | None:
    """The row's median relative to DynamicCache's in the same section at the same size; None if that is missing."""
    for base in rows:
        if (base.section, base.at, base.name) == (row.section, row.at, DYNAMIC):
            return row.median / base.median
    return None


def timing_table(rows: Sequence[Measured]) -> str:
    """Milliseconds, ratio to DynamicCache, spread, tokens and bytes held."""
    lines = []
    for row in rows:
        relative = ratio(row, rows)
        times = f"{row.median * 1e3:.2f}", "–" if relative is None else f"{relative:.3f}", f"{row.spread:.0%}"
        lines.append([row.section, str(row.at), row.name, *times, str(row.held), human_bytes(row.nbytes)])
    return _aligned(["section", "at", "cache", "ms", "ratio", "±", "held", "bytes"], lines)


def memory_table(rows: Sequence[Memory]) -> str:
    """Peaks, and how much they are beyond DynamicCache's."""
    base = {row.tokens: row.peak_bytes for row in rows if row.name == DYNAMIC}
    lines = []
    for row in rows:
        extra = row.peak_bytes - base.get(row.tokens, row.peak_bytes)
        more = f"{'-' if extra < 0 else '+'}{human_bytes(abs(extra))}"
        sizes = human_bytes(row.peak_bytes), more, human_bytes(row.held_bytes), human_bytes(row.matrix_bytes)
        lines.append(["memory", str(row.tokens), row.name, *sizes])
    return _aligned(["section", "at", "cache", "peak", "beyond full", "held after", "Q×L matrix"], lines)


def cost_table(rows: Sequence[Cost]) -> str:
    """Microseconds per layer and step, and the share of the layer's forward."""
    lines = [
        ["policy cost", str(row.held), row.name, f"{row.microseconds:.1f}", f"{row.share:.1%}",
         f"{row.layer_seconds * 1e6:.0f}"]
        for row in rows
    ]  # fmt: skip  # one row, two lines
    return _aligned(["section", "at", "cache", "µs per layer", "of the layer", "layer µs"], lines)


def bounded_table(rows: Sequence[Bounded]) -> str:
    """Bytes of the fullest layer, time of all pieces, and how it grew."""
    lines = []
    for row in rows:
        sizes = human_bytes(row.peak_bytes), f"{row.peak_bytes / row.expected_bytes:.3f}", human_bytes(row.held_bytes)
        times = f"{sum(row.seconds):.2f}", f"{row.growth:.2f}"
        lines.append(["bounded prefill", str(row.tokens), row.name, *sizes, *times])
    return _aligned(
        ["section", "at", "cache", "peak per layer", "of budget + chunk", "held after", "s", "last / first chunks"],
        lines,
    )


def fit_table(rows: Sequence[Fit]) -> str:
    """Rows of the largest batch."""
    lines = [
        ["largest batch", str(row.seen), row.name, f"{row.rows}{'+' if row.rows == row.limit else ''}",
         human_bytes(row.nbytes)]
        for row in rows
    ]  # fmt: skip  # one row, two lines
    return _aligned(["section", "at", "cache", "rows", "bytes"], lines)


def waits_table(rows: Sequence[Waits]) -> str:
    """Calls that made the host wait, in one step."""
    lines = [
        ["host waits", str(row.held), row.name, str(sum(row.calls.values())),
         ", ".join(f"{name} {count}" for name, count in row.calls.items()) or "–"]
        for row in rows
    ]  # fmt: skip  # one row, two lines
    return _aligned(["section", "at", "cache", "calls", "which"], lines)


def _aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned text, the first and third column to the left; nothing if there are no lines."""
    if not lines:
        return ""
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
