"""Who takes part: transformers' caches in all forms that compare, and ours, each with the model that runs it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvevict import host
from kvevict.bench.rows import DYNAMIC
from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.policies.base import ALL_QUERIES, Policy

EAGER = "DynamicCache, eager"
STATIC = "StaticCache"
SLIDING = "sliding layer"
"""transformers' sliding-window layers in place of the full ones, with the same weights."""
IN_PLACE = "in place"
"""Writes each token where the last one was: nothing is evicted, and nothing is copied to make room."""
LIMIT = "DynamicCache, budget"
"""A full cache that holds no more than the budget: what an evicting cache can reach at best."""

FUSED = ", fused"
"""After a policy's name: with ``fused_prefill``."""

BASELINES = {"eager": EAGER, "static": STATIC, "sliding": SLIDING, "in-place": IN_PLACE}
"""What may be compared beside DynamicCache, as the command calls it."""

CHUNK = 512
"""Tokens per forward while caches are filled."""


@dataclass(frozen=True)
class Entrant:
    """One cache of a comparison.

    fill: tokens that it has seen when the measurement begins.
    make: a new, empty cache with room for so many tokens.
    """

    name: str
    model: PreTrainedModel
    make: Callable[[], Cache]
    fill: int = 0


def entrants(
    model: PreTrainedModel,
    policies: Mapping[str, Policy],
    *,
    tokens: int,
    budget: int,
    limit: bool = False,
    baselines: Sequence[str] = (),
    fused: bool = False,
) -> list[Entrant]:
    """DynamicCache first, then the baselines, then the policies.

    tokens: that the full caches hold, and that the others have seen.
    budget: of the policies, and what the sliding layers hold.
    limit:  whether a full cache that holds no more than the budget takes part.
    fused:  whether policies that read every query take part a second time, with ``fused_prefill``.

    A baseline that cannot serve the model is left out: ``left_out`` says which and why.
    """
    check_baselines(baselines)
    config = host.decoder_config(model)
    reasons = left_out(model, baselines)
    found = [Entrant(DYNAMIC, model, lambda: DynamicCache(config=config), tokens)]
    if limit:
        found.append(Entrant(LIMIT, model, lambda: DynamicCache(config=config), budget))
    for name in (BASELINES[each] for each in baselines if BASELINES[each] not in reasons):
        if name == EAGER:
            found.append(Entrant(name, eager_twin(model), lambda: DynamicCache(config=config), tokens))
        elif name == STATIC:
            found.append(Entrant(name, model, lambda: StaticCache(config=config, max_cache_len=tokens + 1), tokens))
        elif name == SLIDING:
            found.append(Entrant(name, model, lambda: sliding_cache(model, budget), tokens))
        else:
            found.append(Entrant(name, model, lambda: in_place_cache(model), budget if limit else tokens))
    fused = fused and host.implementation(model) == "sdpa"
    for name, policy in policies.items():
        found.append(Entrant(name, model, _maker(model, policy, budget), tokens))
        if fused and policy.queries == ALL_QUERIES:
            found.append(Entrant(name + FUSED, model, _maker(model, policy, budget, fused=True), tokens))
    return found


def _maker(model: PreTrainedModel, policy: Policy, budget: int, fused: bool = False) -> Callable[[], Cache]:
    return lambda: EvictingCache(model, policy, budget=budget, fused_prefill=fused)


def check_baselines(names: Sequence[str]) -> None:
    """Raises OptionError for a name that is not in BASELINES."""
    for name in names:
        if name not in BASELINES:
            raise OptionError(f"baseline {name!r}: give some of {', '.join(BASELINES)}")


def left_out(model: PreTrainedModel, baselines: Sequence[str]) -> dict[str, str]:
    """Which baselines cannot serve this model, and why."""
    config = host.decoder_config(model)
    reasons = {}
    if host.implementation(model) == "eager":
        reasons[EAGER] = "the model runs eager attention already"
    if not all(host.is_full_attention(layer) for layer in host.host_layers(config)):
        mixed = "some of the model's layers are of another kind already"
        reasons |= {STATIC: mixed, SLIDING: mixed}
    return {name: why for name, why in reasons.items() if name in [BASELINES[each] for each in baselines]}


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights, which are not copied."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under eager attention. The model itself stays as it is."""
    twin = twin_of(model)
    twin.set_attn_implementation("eager")
    return twin


def sliding_cache(model: PreTrainedModel, budget: int) -> Cache:
    """transformers' sliding-window layers that hold ``budget`` tokens, in place of all layers.

    A window counts the newest token, so it is one more than what is held between two steps.
    """
    layers = len(host.host_layers(host.decoder_config(model)))
    return Cache(layers=[DynamicSlidingWindowLayer(sliding_window=budget + 1) for _ in range(layers)])


class InPlaceLayer(DynamicLayer):
    """Holds what it was filled with; a single token goes into one more place, over the one before it."""

    spare = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Everything held and the new tokens: (B, H, L, D) twice."""
        if key_states.shape[-2] > 1 or not self.spare:
            self.spare = key_states.shape[-2] == 1
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        assert self.keys is not None and self.values is not None
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens without the one in the spare place."""
        return int(super().get_seq_length()) - self.spare


def in_place_cache(model: PreTrainedModel) -> Cache:
    """A cache whose full-attention layers write in place; for steps of one token after one filling."""
    layers = host.host_layers(host.decoder_config(model))
    own: Callable[[], Any] = InPlaceLayer  # transformers does not annotate its constructor
    return Cache(layers=[own() if host.is_full_attention(layer) else layer for layer in layers])


# -- filling them ----------------------------------------------------------------------------------------------


def random_ids(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    """(rows, tokens) token ids, the same every time."""
    vocabulary = int(host.decoder_config(model).vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (rows, tokens), generator=generator).to(model.device)


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache, ids: Tensor) -> None:
    """One forward of ``ids`` (B, Q) with the cache; only the last token's logits are computed."""
    options: dict[str, Any] = {host.cache_argument(model): cache, "use_cache": True}
    model(ids, logits_to_keep=1, **options)


def fill(model: PreTrainedModel, cache: Cache, tokens: int, *, rows: int = 1) -> None:
    """Brings the cache to ``tokens`` tokens seen.

    Evicting caches read them, ``CHUNK`` at a time. For transformers' own, whose speed does not depend on what they
    hold, the model reads a few and random keys and values follow.
    """
    seen = int(cache.get_seq_length())
    if seen >= tokens:
        return
    ids = random_ids(model, rows, tokens)[:, seen:]
    if isinstance(cache, EvictingCache) or not all(_plain(layer) for layer in cache.layers):
        for block in ids.split(CHUNK, 1):
            forward(model, cache, block)
        return
    first = 2 + ids.shape[1] % 2  # what follows is never one token, which would be a step
    forward(model, cache, ids[:, :first])
    generator = torch.Generator(model.device).manual_seed(0)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        more = []
        for held in (layer.keys, layer.values):  # (B, H, L, D)
            shape = (rows, held.shape[1], ids.shape[1] - ids[:, :first].shape[1], held.shape[3])
            more.append(torch.randn(shape, generator=generator, device=held.device).to(held.dtype))
        if more[0].shape[2]:
            cache.update(more[0], more[1], index)


def _plain(layer: object) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, InPlaceLayer, StaticLayer)


def rewind(cache: Cache) -> None:
    """Takes the newest token back where a cache has grown by it, so that the next step finds as many as this one."""
    if isinstance(cache, EvictingCache):
        if not cache.policy.evicts:
            cache.crop(-1)
        return
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) is DynamicLayer:
            layer.crop(-1)
        elif type(layer) is StaticLayer:
            layer.cumulative_length.sub_(1)  # what its crop does, which 5.17 does not have


def held_tokens(cache: Cache) -> int:
    """Tokens per KV head in the fullest layer, between two steps."""
    if isinstance(cache, EvictingCache):
        return max(cache.stored)
    return max(_held(layer) for layer in cache.layers if hasattr(layer, "get_seq_length"))


def _held(layer: Any) -> int:
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
        return int(layer.keys.shape[-2])
    return int(layer.get_seq_length())
