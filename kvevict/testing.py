"""The slow, obvious reference: full attention under an explicit mask that hides the evicted tokens.

``replay`` feeds the same tokens to the same model with a ``DynamicCache`` that keeps everything, and hides from
every query what an evicting cache no longer held: per layer, KV head and batch row. If logits agree, eviction did
exactly what it says and nothing else. Use it to test a policy of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvevict import host
from kvevict.cache import EvictingCache


def run(
    model: PreTrainedModel,
    cache: EvictingCache,
    forwards: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    position_ids: bool = True,
    first: Mapping[str, Any] | None = None,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Feeds token blocks (B, Q) to ``model`` with ``cache``.

    attention_mask: (B, all tokens), 0 for pads. ``position_ids``: whether to pass them, counted over real tokens,
    to a model that takes them. ``first``: more arguments of the first forward, such as ``pixel_values``.
    Returns each forward's logits (B, Q, vocabulary), and what each evicting layer held before that forward.
    """
    logits: list[Tensor] = []
    held: list[list[Tensor]] = []
    done = 0
    for block in forwards:
        held.append([layer.kept_positions().clone() for layer in cache.evicting_layers])
        done += block.shape[1]
        logits.append(_forward(model, cache, block, attention_mask, position_ids, done, None if logits else first))
    return logits, held


def replay(
    model: PreTrainedModel,
    held: Sequence[Sequence[Tensor]],
    forwards: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    position_ids: bool = True,
    first: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """The logits of the same forwards by full attention under explicit masks. See ``run`` for the arguments.

    ``model`` must run eager attention and must not be prepared for an evicting cache. ``held[i][layer]`` is
    (B, H, L), the positions held before forward i, -1 for none.
    """
    if host.implementation(model) != "eager":
        raise ValueError("replay needs eager attention: model.set_attn_implementation('eager')")
    modules = {int(str(module.layer_idx)): module for module in host.attention_modules(model)}
    layers = host.host_layers(host.decoder_config(model))
    full = [modules[index] for index, layer in enumerate(layers) if host.is_full_attention(layer)]
    masks: dict[int, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs: (args, {**kwargs, "attention_mask": masks[id(m)]}), with_kwargs=True
        )
        for module in full
    ]
    cache = DynamicCache(config=host.decoder_config(model))
    heads = int(host.decoder_config(model).num_attention_heads)
    logits: list[Tensor] = []
    done = 0
    try:
        for before, block in zip(held, forwards, strict=True):
            batch, queries = block.shape
            real = torch.ones(batch, done + queries) if attention_mask is None else attention_mask[:, : done + queries]
            real = real.bool()
            ranks = real.long().cumsum(1) - 1  # position of each column
            for module, kept in zip(full, before, strict=True):
                kv_heads = max(kept.shape[1], 1)
                shown = torch.zeros(batch, kv_heads, queries, done + queries, dtype=torch.bool)
                for b in range(batch):
                    for h in range(kv_heads):
                        old = set(kept[b, h].tolist()) if kept.numel() else set()
                        for column in range(done + queries):
                            if not real[b, column] or (column < done and int(ranks[b, column]) not in old):
                                continue
                            shown[b, h, max(0, column - done) :, column] = True
                dtype = next(model.parameters()).dtype
                mask = torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
                if kept.numel():  # otherwise one mask serves all heads
                    # layers may have different numbers of query heads
                    mask = mask.repeat_interleave(getattr(module, "num_key_value_groups", heads // kv_heads), 1)
                masks[id(module)] = mask
            done += queries
            logits.append(_forward(model, cache, block, attention_mask, position_ids, done, None if logits else first))
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _forward(
    model: PreTrainedModel,
    cache: object,
    block: Tensor,
    attention_mask: Tensor | None,
    position_ids: bool,
    done: int,
    more: Mapping[str, Any] | None,
) -> Tensor:
    """The logits of the forward that ends at column ``done``."""
    arguments = {host.cache_argument(model): cache, "use_cache": True, **(more or {})}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask[:, :done]
    if position_ids and _takes_positions(model):
        arguments["position_ids"] = _positions(block, attention_mask, done)
    with torch.no_grad():
        logits: Tensor = model(block, **arguments).logits
    return logits


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model lets its caller say where tokens stand; some count tokens, pads included."""
    return "position_ids" in host.parameters(type(model).forward)


def _positions(block: Tensor, attention_mask: Tensor | None, done: int) -> Tensor:
    """Positions of the newest block's tokens, counted over real tokens."""
    if attention_mask is None:
        return torch.arange(done - block.shape[1], done)[None].expand(block.shape[0], -1)
    ranks = attention_mask[:, :done].long().cumsum(1) - 1
    return ranks.clamp_min(0)[:, -block.shape[1] :]
