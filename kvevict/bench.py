"""Speed and memory of evicting caches beside transformers' own, measured in one process, taking turns."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvevict import host
from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.evaluation import cache_bytes
from kvevict.policies.base import Policy

DYNAMIC = "DynamicCache"
"""The row that ratios are relative to."""

LIMIT = "DynamicCache, budget"
"""A full cache that holds no more than the budget: what an evicting cache can reach at best."""

CHUNK = 256
"""Tokens per forward while caches are filled."""


@dataclass(frozen=True)
class Measured:
    """One thing's times in one section.

    held:    tokens per KV head that the cache holds, at most over the layers.
    seconds: of each repetition, in the order measured.
    nbytes:  that the cache holds afterwards.
    """

    section: str
    name: str
    tokens: int
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


Progress = Callable[[int], None]


def decode(
    model: PreTrainedModel, policies: Mapping[str, Policy], held: int, *, steps: int, progress: Progress | None = None
) -> list[Measured]:
    """A step of one token with ``held`` tokens in every cache; those of the policies evict one at each step."""
    _check(steps, held)
    caches: dict[str, Cache] = {DYNAMIC: DynamicCache(config=host.decoder_config(model))}
    caches |= {name: EvictingCache(model, policy, budget=held) for name, policy in policies.items()}
    for cache in caches.values():
        _fill(model, cache, held)
    return _steps(model, caches, "decode", held, steps, progress)


def against_full(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    seen: int,
    budget: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of one token after ``seen`` tokens: a full cache, one that holds ``budget`` tokens, and the policies."""
    _check(steps, seen, budget)
    config = host.decoder_config(model)
    caches: dict[str, Cache] = {DYNAMIC: DynamicCache(config=config), LIMIT: DynamicCache(config=config)}
    caches |= {name: EvictingCache(model, policy, budget=budget) for name, policy in policies.items()}
    for name, cache in caches.items():
        _fill(model, cache, budget if name == LIMIT else seen)
    return _steps(model, caches, "after", seen, steps, progress)


def prefill(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    tokens: int,
    budget: int,
    *,
    repeats: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A prompt of ``tokens`` tokens in one forward."""
    _check(repeats, tokens, budget)
    config = host.decoder_config(model)
    makers: dict[str, Callable[[], Cache]] = {DYNAMIC: lambda: DynamicCache(config=config)}
    makers |= {name: _maker(model, policy, budget) for name, policy in policies.items()}
    ids = _ids(model, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    held, nbytes = {}, {}
    for repeat in range(repeats + 1):  # the first one warms up
        for name in _shuffled(makers, repeat):
            cache = makers[name]()
            elapsed = _timed(model, cache, ids)
            if repeat:
                seconds[name].append(elapsed)
            held[name], nbytes[name] = _held(cache), cache_bytes(cache)
            del cache
            if progress is not None:
                progress(1)
    return [Measured("prefill", n, tokens, held[n], tuple(s), nbytes[n]) for n, s in seconds.items()]


def table(rows: Sequence[Measured]) -> str:
    """The rows as aligned text: milliseconds, ratio to the full cache, spread, tokens and bytes held."""
    base = {(row.section, row.tokens): row.median for row in rows if row.name == DYNAMIC}
    head = ("section", "tokens", "cache", "ms", "ratio", "±", "held", "MiB")
    lines = [head] + [
        (
            row.section,
            str(row.tokens),
            row.name,
            f"{row.median * 1e3:.2f}",
            f"{row.median / base[row.section, row.tokens]:.3f}",
            f"{row.spread:.0%}",
            str(row.held),
            f"{row.nbytes / 2**20:.1f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, 2) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


# -- how -----------------------------------------------------------------------------------------------------------


def _check(repeats: int, *tokens: int) -> None:
    if repeats < 2 or min(tokens) < 2:
        raise OptionError(f"repeats={repeats}, tokens={tokens}: give at least 2 of each")


def _maker(model: PreTrainedModel, policy: Policy, budget: int) -> Callable[[], Cache]:
    return lambda: EvictingCache(model, policy, budget=budget)


def _steps(
    model: PreTrainedModel,
    caches: Mapping[str, Cache],
    section: str,
    tokens: int,
    steps: int,
    progress: Progress | None,
) -> list[Measured]:
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    ids = _ids(model, steps + WARM_UP)
    gc.collect()
    gc.disable()
    try:
        for step in range(steps + WARM_UP):
            for name in _shuffled(caches, step):
                cache = caches[name]
                elapsed = _timed(model, cache, ids[:, step : step + 1])
                if step >= WARM_UP:
                    seconds[name].append(elapsed)
                if isinstance(cache, DynamicCache):
                    cache.crop(-1)  # the next step finds as many tokens as this one
                if progress is not None:
                    progress(1)
    finally:
        gc.enable()
    return [
        Measured(section, name, tokens, _held(cache), tuple(seconds[name]), cache_bytes(cache))
        for name, cache in caches.items()
    ]


WARM_UP = 3
"""Steps that are not counted: the first ones cut a prompt and allocate."""


def _shuffled(names: Mapping[str, Any], seed: int) -> list[str]:
    """Another order at every round, so that nobody always follows the same one."""
    return random.Random(seed).sample(list(names), len(names))


def _ids(model: PreTrainedModel, tokens: int) -> Tensor:
    vocabulary = int(host.decoder_config(model).vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, tokens), generator=generator).to(model.device)


def _fill(model: PreTrainedModel, cache: Cache, tokens: int) -> None:
    for block in _ids(model, tokens).split(CHUNK, 1):
        _forward(model, cache, block)


@torch.no_grad()
def _forward(model: PreTrainedModel, cache: Cache, ids: Tensor) -> None:
    options: dict[str, Any] = {host.cache_argument(model): cache, "use_cache": True}
    model(ids, logits_to_keep=1, **options)


def _timed(model: PreTrainedModel, cache: Cache, ids: Tensor) -> float:
    _wait(ids)
    begin = time.perf_counter()
    _forward(model, cache, ids)
    _wait(ids)
    return time.perf_counter() - begin


def _wait(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)


def _held(cache: Cache) -> int:
    """Tokens per KV head in the fullest layer."""
    if isinstance(cache, EvictingCache):
        return max(cache.stored)
    return max(int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length"))
