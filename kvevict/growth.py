"""How memory and speed go on while tokens are generated: every step of every cache, taking turns in one process."""

from __future__ import annotations

import gc
import inspect
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.evaluation import cache_bytes, evaluation_mode, one_row
from kvevict.fidelity import full_cache
from kvevict.host import cache_argument
from kvevict.plan import FULL_CACHE
from kvevict.policies.base import Policy

MEASURE = "growth"
LAST = 4
"""Figures are of the last quarter of the steps."""


@dataclass
class Growth:
    """One cache's generation.

    tokens:     generated.
    seconds:    of the prompt, then of each step of one token: time for the forward alone.
    held_bytes: what the cache holds after the prompt, then after each step.
    prompt:     tokens of the prompt.
    """

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    prompt: int = 0


@torch.no_grad()
def growth(
    model: PreTrainedModel,
    ids: Tensor,
    caches: Mapping[str, tuple[Policy, int | float]],
    new: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Growth]:
    """Feeds ``ids`` (N,) or (1, N) as a prompt and generates ``new`` tokens greedily, with the full cache and others.

    caches: policy and budget by name. The full cache, transformers' own, comes first, as ``FULL_CACHE``.

    Each cache goes on with its own tokens. At every step all caches take their turn, in another order each time, so
    that whatever slows the machine down slows all of them. Raises OptionError.
    """
    ids = one_row(ids)[None].to(model.device)
    if new < 1:
        raise OptionError(f"new={new}: give at least 1 token to generate")
    if FULL_CACHE in caches:
        raise OptionError(f"a cache is called {FULL_CACHE!r}, as the full cache is: rename it")
    found = {name: Growth(prompt=ids.shape[1]) for name in (FULL_CACHE, *caches)}
    with evaluation_mode(model), ExitStack() as stack:
        held: dict[str, Cache] = {FULL_CACHE: full_cache(model)}
        for name, (policy, budget) in caches.items():
            held[name] = stack.enter_context(EvictingCache(model, policy, budget))
        following = dict.fromkeys(held, ids)
        _forward(model, full_cache(model), ids)  # the first forward of a process pays for what later ones reuse
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        for step in range(new + 1):
            for name in random.Random(step).sample(list(held), len(held)):
                seconds, following[name] = _forward(model, held[name], following[name])
                if step < new:
                    found[name].tokens.append(int(following[name]))
                found[name].seconds.append(seconds)
                found[name].held_bytes.append(cache_bytes(held[name]))
                if progress is not None:
                    progress(1)
    return found


def growth_rows(
    found: Mapping[str, Growth], cells: Mapping[str, Mapping[str, Any]], key: Mapping[str, Any]
) -> list[Any]:
    """Rows of results: ``key``, what ``cells`` says of each cache, its speed, figures of its end, its whole series.

    Seconds per step are the median of the last quarter of the steps, where the full cache is largest.
    """
    full = found[FULL_CACHE]
    last = max(1, (len(full.seconds) - 1) // LAST)
    step = {name: statistics.median(series.seconds[-last:]) for name, series in found.items()}
    return [
        {
            "measure": MEASURE,
            **key,
            **cells[name],
            "prefill_tokens_per_second": series.prompt / series.seconds[0],
            "prefill_of_full": series.seconds[0] / full.seconds[0],
            "decode_tokens_per_second": 1 / step[name],
            "end_bytes": series.held_bytes[-1],
            "peak_bytes": max(series.held_bytes),
            "end_bytes_of_full": series.held_bytes[-1] / full.held_bytes[-1],
            "step_seconds": step[name],
            "step_of_full": step[name] / step[FULL_CACHE],
            **vars(series),
        }
        for name, series in found.items()
    ]


def growth_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The rows as a table: its head and its lines."""
    head = ["cache", "budget", "MiB at the end", "of full", "most MiB", "prefill tokens/s", "time of full",
            "decode tokens/s", "ms a step", "time of full"]  # fmt: skip  # measures beside their ratios
    lines = [
        [
            row["policy"],
            "" if row["budget"] is None else str(row["budget"]),
            f"{row['end_bytes'] / 2**20:.1f}",
            f"{row['end_bytes_of_full']:.3f}",
            f"{row['peak_bytes'] / 2**20:.1f}",
            f"{row['prefill_tokens_per_second']:.1f}",
            f"{row['prefill_of_full']:.3f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['step_seconds'] * 1e3:.2f}",
            f"{row['step_of_full']:.3f}",
        ]
        for row in rows
    ]
    return head, lines


def _forward(model: PreTrainedModel, cache: Cache, ids: Tensor) -> tuple[float, Tensor]:
    """Seconds, and the next token (1, 1)."""
    arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # as generate() does
    _wait(ids)
    begin = time.perf_counter()
    logits = model(ids, **arguments).logits
    _wait(ids)
    return time.perf_counter() - begin, logits[:, -1:].argmax(-1)


def _wait(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
