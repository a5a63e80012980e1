"""Bytes: what a prompt allocates at its peak, what a long prompt in pieces holds, and the largest batch that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, PreTrainedModel

from kvevict import host
from kvevict.bench.caches import Entrant, entrants, fill, forward, random_ids
from kvevict.bench.rows import Bounded, Fit, Memory
from kvevict.bench.timing import Progress, check_counts, prompt_entrants, shuffled, ticking, timed, wait
from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.evaluation import cache_bytes
from kvevict.policies.base import Policy


class Peak:
    """The most bytes that were allocated at a time beyond what was before; known once the measurement is over."""

    nbytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures what is allocated on ``device`` inside a ``with`` block.

    On CUDA the allocator counts. On the CPU torch's profiler records each allocation and release of torch's allocator,
    those inside kernels included; what libraries take elsewhere is not seen, nor is the release of what was there
    before. Raises OptionError for other devices.
    """
    peak = Peak()
    if device.type == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        wait(device)
        peak.nbytes = torch.cuda.max_memory_allocated(device) - before
        return
    if device.type != "cpu":
        raise OptionError(f"peak memory cannot be measured on {device}: use a CPU or a CUDA device")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    allocated = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        allocated += int(event.nbytes())
        peak.nbytes = max(peak.nbytes, allocated)


def prompt_memory(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    tokens: int,
    budget: int,
    *,
    baselines: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Memory]:
    """The peak of a prompt of ``tokens`` tokens in one forward, for each cache."""
    check_counts(2, tokens, budget)
    group = prompt_entrants(model, policies, tokens, budget, baselines)
    ids = random_ids(model, 1, tokens)
    matrix = int(host.decoder_config(model).num_attention_heads) * tokens * tokens * 4
    tick = ticking(progress, len(group))
    if model.device.type != "cpu":  # libraries on accelerators take their workspaces once
        forward(model, group[0].make(), ids)
    found = []
    for each in group:
        with peak_memory(model.device) as peak:
            cache = each.make()
            forward(each.model, cache, ids)
        found.append(Memory(each.name, tokens, peak.nbytes, cache_bytes(cache), matrix))
        del cache
        tick()
    return found


def bounded_prefill(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    tokens: int,
    chunk: int,
    budget: int,
    *,
    progress: Progress | None = None,
) -> list[Bounded]:
    """A prompt of ``tokens`` tokens, ``chunk`` of them per forward, read by each cache in turn."""
    check_pieces(tokens, chunk)
    check_counts(2, budget)
    group = entrants(model, policies, tokens=tokens, budget=budget)
    caches = {each.name: each.make() for each in group}
    watches = {name: _watch(cache) for name, cache in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    blocks = random_ids(model, 1, tokens).split(chunk, 1)
    tick = ticking(progress, len(blocks) * len(group))
    for number, block in enumerate(blocks):
        for each in shuffled(group, number):
            seconds[each.name].append(timed(each.model, caches[each.name], block))
            tick()
    found = []
    for each in group:
        watch, full = watches[each.name], each is group[0]
        expected = watch.token_bytes * (tokens if full else min(tokens, budget + chunk))
        held = cache_bytes(caches[each.name])
        found.append(Bounded(each.name, tokens, chunk, budget, tuple(seconds[each.name]), watch.nbytes, expected, held))
    return found


def check_pieces(tokens: int, chunk: int) -> None:
    """Raises OptionError unless a prompt can be cut into at least four equal pieces."""
    if chunk < 2 or tokens < 4 * chunk or tokens % chunk:
        raise OptionError(
            f"a prompt of {tokens} tokens in pieces of {chunk}: give a multiple of the piece, at least four of them, "
            "each of at least 2 tokens"
        )


class _Watch:
    """The most bytes that one layer's keys and values took at a time, and what one token takes."""

    nbytes = 0
    token_bytes = 0

    def see(self, keys: Tensor, values: Tensor) -> None:
        """Looks at what a layer hands to its attention, and keeps nothing of it."""
        self.nbytes = max(self.nbytes, sum(t.untyped_storage().nbytes() for t in (keys, values)))
        self.token_bytes = sum(t.nbytes for t in (keys, values)) // keys.shape[2]


def _watch(cache: Cache) -> _Watch:
    """Watches every ``update`` of this cache from now on."""
    watch, update = _Watch(), cache.update

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(*args, **kwargs)
        watch.see(keys, values)
        return keys, values

    cache.update = watched  # type: ignore[method-assign]  # of this object only
    return watch


# -- the largest batch -----------------------------------------------------------------------------------------


def largest_batches(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    seen: int,
    budget: int,
    *,
    limit: int = 4096,
    progress: Progress | None = None,
) -> list[Fit]:
    """The most rows for which a decode step after ``seen`` tokens fits, on an accelerator. Raises OptionError on a CPU.

    A policy's cache after any number of tokens is as large as one that has just been cut, so one row reads the budget
    and one token more, and is repeated.
    """
    if model.device.type == "cpu":
        raise OptionError("the largest batch that fits can only be measured on an accelerator: give --device cuda")
    check_counts(2, seen, budget)
    group = entrants(model, policies, tokens=seen, budget=budget)
    tick = ticking(progress, len(group))
    found = []
    for each in group:
        tokens = seen if each is group[0] else min(seen, budget + 1)
        nbytes: dict[int, int] = {}

        def fits(rows: int, each: Entrant = each, tokens: int = tokens, nbytes: dict[int, int] = nbytes) -> bool:
            size = _step_fits(each, tokens, rows)
            nbytes[rows] = size or 0
            return size is not None

        rows = largest(fits, limit)
        found.append(Fit(each.name, seen, rows, limit, nbytes.get(rows, 0)))
        tick()
    return found


def _step_fits(each: Entrant, tokens: int, rows: int) -> int | None:
    """The cache's bytes if filling it and one step have room, else None."""
    try:
        cache = each.make()
        if isinstance(cache, EvictingCache):
            fill(each.model, cache, tokens)
            cache.batch_repeat_interleave(rows)
        else:
            fill(each.model, cache, tokens, rows=rows)
        forward(each.model, cache, random_ids(each.model, rows, 1))
        wait(each.model.device)
        return cache_bytes(cache)
    except torch.OutOfMemoryError:
        return None
    finally:
        cache = None  # type: ignore[assignment]  # let go before the allocator's reserve is given back
        if each.model.device.type != "cpu":
            torch.accelerator.empty_cache()


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, 0 if none does; smaller ones fit where a larger one does.

    >>> largest(lambda rows: rows <= 37, 4096)
    37
    """
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, min(2 * bad, limit) if bad < limit else limit + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
