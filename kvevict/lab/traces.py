"""Attention to replay: what each query gives to every token before it, with nothing evicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import TraceError
from kvevict.lab.decode import decode_rows
from kvevict.lab.patterns import PATTERNS, pattern_rows

CATALOGUE_SOURCE = "policybook kv-cache catalogue"
PUBLISHED_SEED = 7
PATTERN_LENGTH = 200
LONGEST = 2**20
"""Tokens of a trace made by a formula. Time grows with their square, and a few times as many fill any memory."""


@dataclass(frozen=True)
class Block:
    """The attention of consecutive queries.

    start:   position of the first query.
    weights: (T, H, G, q, W), T = layers x runs, the layer outermost; zero where a query may not look.
    keys, values: (T, H, q, D) of the queries' own tokens, or None.
    """

    start: int
    weights: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class Trace:
    """Attention over ``length`` tokens, as blocks that can be read any number of times.

    make:   starts reading from the first query.
    runs:   independent texts or seeds, stepped side by side; all have the same length.
    layers, heads, group: evicting layers, KV heads of each, query heads per KV head.
    own:    True if a query attends to its own token, as in a model. Else its row covers the tokens before it
        only, and the token joins after its query was seen.
    dtype:  of the attention statistics.
    about:  what is worth keeping with results.
    """

    name: str
    length: int
    make: Callable[[], Iterator[Block]]
    runs: int = 1
    layers: int = 1
    heads: int = 1
    group: int = 1
    own: bool = True
    dtype: torch.dtype = torch.float64
    has_keys: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    def blocks(self) -> Iterator[Block]:
        """All blocks, oldest query first."""
        return self.make()

    @property
    def first(self) -> int:
        """Position of the first query: 0, or 1 where queries do not see themselves."""
        return 0 if self.own else 1

    @property
    def steps(self) -> int:
        """How many queries there are."""
        return self.length - self.first


def decode_trace(length: int = 4096, seeds: Sequence[int] = (PUBLISHED_SEED,)) -> Trace:
    """The trace ``decode-4096`` of the policybook catalogue, at any length and for any seeds, which become runs.

    Its weights are float32, and everything computed from them is float64.
    """
    _check_length(length)
    seeds = _check_seeds(seeds, 2**32)

    def make() -> Iterator[Block]:
        for several in zip(*(decode_rows(seed, length) for seed in seeds), strict=True):
            rows = torch.stack([rows for _, rows in several])  # (T, q, W)
            yield Block(several[0][0], rows[:, None, None])

    about = {"source": CATALOGUE_SOURCE, "seeds": list(seeds), "length": length}
    return Trace(f"decode-{length}", length, make, runs=len(seeds), own=False, about=about)


def pattern_trace(name: str, length: int = PATTERN_LENGTH, seeds: Sequence[int] = (0,)) -> Trace:
    """One of the adaptive-EMA note's six patterns, with eight query heads over one KV head."""
    _check_length(length)
    seeds = _check_seeds(seeds, 2**63)
    if name not in PATTERNS:
        raise TraceError(f"no pattern is named {name!r}{_near(name, list(PATTERNS))}; there are: {', '.join(PATTERNS)}")

    def make() -> Iterator[Block]:
        rows = torch.stack([pattern_rows(name, length, seed) for seed in seeds])  # (T, G, q, W)
        yield Block(0, rows[:, None])

    about = {"source": "adaptive-EMA design note", "seeds": list(seeds), "length": length}
    return Trace(name, length, make, runs=len(seeds), group=8, about=about)


def named_trace(name: str, *, length: int | None = None, seeds: Sequence[int] | None = None) -> Trace:
    """A trace by name: "decode-N", a pattern of ``kvevict.lab.patterns``, or the folder of a captured model.

    length, seeds: instead of the trace's own; a captured trace has no seeds, and ``length`` reads its beginning.
    Raises TraceError.
    """
    number = re.fullmatch(r"decode-(\d+)", name)
    if number:
        return decode_trace(int(number[1]) if length is None else length, (PUBLISHED_SEED,) if seeds is None else seeds)
    if name in PATTERNS:
        return pattern_trace(name, PATTERN_LENGTH if length is None else length, (0,) if seeds is None else seeds)
    path = Path(name).expanduser()
    if path.exists():
        from kvevict.lab.captured import captured_trace

        if seeds is not None:
            raise TraceError(f"trace {name!r} was captured from a model and has no seeds: leave them out")
        return captured_trace(path, length)
    known = ["decode-4096", *PATTERNS]
    raise TraceError(
        f"no trace is named {name!r}{_near(name, known)}, and there is no such folder; there are: "
        f"{', '.join(known)} (any decode-N), or the folder that kvevict capture wrote"
    )


def _near(given: str, names: list[str]) -> str:
    close = get_close_matches(given, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _check_length(length: int) -> None:
    if type(length) is not int or length < 2:
        raise TraceError(f"length={length!r}: a trace has at least 2 tokens")
    if length > LONGEST:
        raise TraceError(f"length={length}: a trace made by a formula has at most {LONGEST} tokens")


def _check_seeds(seeds: Sequence[int], below: int) -> list[int]:
    for seed in seeds:
        if type(seed) is not int or not 0 <= seed < below:
            raise TraceError(f"seed={seed!r}: give an integer from 0 to {below - 1}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise TraceError(f"seeds={list(seeds)}: give at least one, and each once")
    return list(seeds)
