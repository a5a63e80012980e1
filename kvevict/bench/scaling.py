"""How a decode step's time scales: with the tokens seen, the budget, the rows of a batch, and the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import Cache, PreTrainedModel

from kvevict import host
from kvevict.bench.caches import entrants
from kvevict.bench.rows import Measured
from kvevict.bench.shapes import Shape, random_model
from kvevict.bench.timing import Progress, check_counts, decode, time_steps
from kvevict.cache import EvictingCache
from kvevict.policies.base import Policy


def by_seen(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    budget: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step after so many tokens: evicting caches read on from size to size, full ones hold everything."""
    check_counts(steps, budget, *sizes)
    found: list[Measured] = []
    caches: dict[str, Cache] = {}
    for seen in sorted(set(sizes)):
        group = entrants(model, policies, tokens=seen, budget=budget, limit=True)
        part = None if progress is None else _share(progress, seen, sizes)
        found += time_steps(group, "seen", seen, steps=steps, caches=caches, progress=part)
        caches = {name: cache for name, cache in caches.items() if isinstance(cache, EvictingCache)}
    return found


def by_budget(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step at a full cache of so many tokens, against DynamicCache holding as many."""
    found: list[Measured] = []
    for size in sorted(set(sizes)):
        part = None if progress is None else _share(progress, size, sizes)
        found += decode(model, policies, size, steps=steps, section="budget", progress=part)
    return found


def by_batch(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    held: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of so many rows with ``held`` tokens in each."""
    found: list[Measured] = []
    for rows in sorted(set(sizes)):
        part = None if progress is None else _share(progress, rows, sizes)
        found += decode(model, policies, held, steps=steps, rows=rows, section="batch", at=rows, progress=part)
    return found


def by_layers(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    sizes: Sequence[int],
    held: int,
    *,
    steps: int,
    progress: Progress | None = None,
) -> list[Measured]:
    """A step of random-weight Llamas of the model's widths and so many layers, with ``held`` tokens."""
    found: list[Measured] = []
    for layers in sorted(set(sizes)):
        part = None if progress is None else _share(progress, layers, sizes)
        deep = random_model(shape_of(model, layers), device=str(model.device), dtype=model.dtype)
        found += decode(deep, policies, held, steps=steps, section="layers", at=layers, progress=part)
        del deep
    return found


def shape_of(model: PreTrainedModel, layers: int) -> Shape:
    """The model's widths with another number of layers."""
    config = host.decoder_config(model)
    heads = int(config.num_attention_heads)
    return Shape(
        layers=layers,
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocabulary=int(config.vocab_size),
    )


def _share(progress: Progress, size: int, sizes: Sequence[int]) -> Progress:
    """Progress of one size among several: each is taken to last as long as it is large, and a little longer."""
    rest = max(sizes) / 4
    weight = (size + rest) / sum(each + rest for each in set(sizes))
    return lambda done: progress(done * weight)
