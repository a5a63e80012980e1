"""What a policy adds to a decode step: microseconds per layer, and waits for the accelerator."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, PreTrainedModel

from kvevict import host
from kvevict.bench.caches import Entrant, entrants, fill, forward, random_ids, rewind
from kvevict.bench.rows import DYNAMIC, Cost, Waits
from kvevict.bench.timing import WARM_UP, Progress, check_counts, shuffled, ticking, wait
from kvevict.policies.base import Policy


def policy_cost(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    held: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Cost]:
    """What every layer's attention module takes beyond one whose cache only writes the token in place.

    Whatever kvevict does happens inside the attention module: finding a slot, computing the rows that the policy
    reads, scoring and evicting. So the difference holds all of it and nothing else. It can be negative where the
    attention itself is done in a faster way.
    """
    check_counts(steps, held)
    group = entrants(model, policies, tokens=held, budget=held, baselines=["in-place"])
    group = [each for each in group if each.name != DYNAMIC]
    tick = ticking(progress, (steps + WARM_UP + 1) * len(group))
    caches: dict[str, Cache] = {}
    for each in group:
        caches[each.name] = each.make()
        fill(model, caches[each.name], held)
        tick()
    attention = _full_attention(model)
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in attention]
    modules = [model.get_submodule(name) for name in attention]
    ids = random_ids(model, 1, steps + WARM_UP)
    spent: dict[str, list[tuple[list[float], list[float]]]] = {each.name: [] for each in group}
    gc.collect()
    gc.disable()
    try:
        for step in range(steps + WARM_UP):
            for each in shuffled(group, step):
                with stopwatch(modules, model.device) as inner, stopwatch(layers, model.device) as outer:
                    forward(model, caches[each.name], ids[:, step : step + 1])
                if step >= WARM_UP:
                    spent[each.name].append((inner, outer))
                rewind(caches[each.name])
                tick()
    finally:
        gc.enable()
    plain, *others = (each.name for each in group)
    base = _medians([inner for inner, _ in spent[plain]])
    layer = statistics.median(seconds for _, outer in spent[plain] for seconds in outer)
    costs = {name: _medians([inner for inner, _ in spent[name]]) for name in others}
    return [
        Cost(name, held, tuple(own - other for own, other in zip(medians, base, strict=True)), layer)
        for name, medians in costs.items()
    ]


def _medians(steps: list[list[float]]) -> list[float]:
    """By layer, over the steps."""
    return [statistics.median(layer) for layer in zip(*steps, strict=True)]


def _full_attention(model: PreTrainedModel) -> list[str]:
    """The names of the attention modules whose layers evict, by layer."""
    kinds = host.host_layers(host.decoder_config(model))
    ours = {id(module): int(str(module.layer_idx)) for module in host.attention_modules(model)}
    found = {ours[id(module)]: name for name, module in model.named_modules() if id(module) in ours}
    return [name for index, name in sorted(found.items()) if host.is_full_attention(kinds[index])]


@contextmanager
def stopwatch(modules: list[nn.Module], device: torch.device) -> Iterator[list[float]]:
    """The seconds of each module's forward, with all hooks that others put on it, in the order of the calls."""
    seconds: list[float] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        wait(device)
        seconds.append(-time.perf_counter())

    def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        wait(device)
        seconds[-1] += time.perf_counter()

    handles = [module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True) for module in modules]
    handles += [module.register_forward_hook(end, with_kwargs=True) for module in modules]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Profiler events that make the host wait; the last is what ``.item()``, ``bool()`` and ``int()`` of a tensor call."""


def host_waits(
    model: PreTrainedModel, policies: Mapping[str, Policy], held: int, *, progress: Progress | None = None
) -> list[Waits]:
    """How often a step at a full cache makes the host wait, counted by torch's profiler.

    On a CPU there is nothing to wait for: the calls that would wait on an accelerator are counted.
    """
    check_counts(2, held)
    group = entrants(model, policies, tokens=held, budget=held)
    ids = random_ids(model, 1, WARM_UP + 1)
    tick = ticking(progress, len(group))
    found = []
    for each in group:
        cache = each.make()
        fill(model, cache, held)
        for step in range(WARM_UP):
            forward(model, cache, ids[:, step : step + 1])
        wait(model.device)
        found.append(Waits(each.name, held, _waits(each, cache, ids[:, WARM_UP:])))
        tick()
    return found


def _waits(each: Entrant, cache: Cache, ids: torch.Tensor) -> dict[str, int]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ids.device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        forward(each.model, cache, ids)
    counted = Counter(event.name for event in profiler.events() or () if event.name in WAITING)
    # leaving the profiler waits for the accelerator once
    if ids.device.type == "cuda" and counted["cudaDeviceSynchronize"]:
        counted["cudaDeviceSynchronize"] -= 1
    return {name: count for name, count in sorted(counted.items()) if count}
