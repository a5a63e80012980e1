"""What differs between transformers releases, and what we ask of its internals. Nothing else imports those.

5.17 - 5.22   the cache argument is ``past_key_values``
5.23 -        it is ``cache`` (``past_key_values`` warns), and ``layer_past`` in GPT-NeoX
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import eager_mask, sdpa_mask

from kvevict.errors import UnsupportedModelError
from kvevict.masks import additive

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")
"""Names under which decoders hand a cache to their attention modules."""


def cache_argument(model: nn.Module) -> str:
    """The name of the cache argument of ``model.forward``: "cache" or "past_key_values"."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def decoder_config(model: nn.Module) -> PreTrainedConfig:
    """The configuration of the model's text decoder."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers config: pass a transformers causal language model"
        )
    return config.get_text_config(decoder=True)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that call ``cache.update``: attention modules with a layer index, innermost ones."""

    def qualifies(module: nn.Module) -> bool:
        return "Attention" in type(module).__name__ and isinstance(getattr(module, "layer_idx", None), int)

    found = [m for m in model.modules() if qualifies(m)]
    return [m for m in found if not any(qualifies(inner) for inner in m.modules() if inner is not m)]


def implementation(model: nn.Module) -> str:
    """Name of the attention implementation that the model's decoder uses now."""
    return str(decoder_config(model)._attn_implementation or "eager")


def attention_function(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function called ``name`` as ``module`` itself would look it up: modeling files may override it."""
    registry = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", None)
    function: Callable[..., tuple[Tensor, Tensor | None]] = (registry or AttentionInterface())[name]
    return function


def masked_attention(module: nn.Module, kwargs: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function that takes a mask per head: sdpa, or the model's own eager one if sdpa cannot do it.

    Raises UnsupportedModelError if the model has learned sinks or a soft cap, and no eager attention.
    """
    if kwargs.get("s_aux") is None and kwargs.get("softcap") is None:
        return attention_function("sdpa", module)
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention sinks or a soft cap, and no eager attention to use where a mask "
            "per head is needed: call model.set_attn_implementation('eager') before building the cache"
        )

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor | None] = eager(module, query, key, value, additive(mask, query.dtype), **kwargs)
        return result

    return attention


def takes_matrix_masks(name: str) -> bool:
    """Whether the attention function ``name`` accepts a (B, heads, Q, L) mask."""
    return name == "eager" or AttentionMaskInterface().get(name) in (sdpa_mask, eager_mask)


def host_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers makes for this decoder."""
    return list(DynamicCache(config=config).layers)


def is_full_attention(layer: object) -> bool:
    """Whether a cache layer holds plain keys and values of every token."""
    return type(layer) is DynamicLayer


def find_cache(arguments: Mapping[str, object]) -> tuple[str, object] | None:
    """The name and value of the cache among an attention module's keyword arguments."""
    return next(((name, arguments[name]) for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


@functools.cache
def parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters of a module class's forward."""
    return frozenset(inspect.signature(forward).parameters)


def assisted_prompt() -> int | None:
    """How many columns the prompt has, if generate() is decoding with drafts somewhere above us; otherwise None.

    Its first forward brings the prompt and the first draft together, and does not say where one ends.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_assisted_decoding" and isinstance(frame.f_locals.get("input_ids"), Tensor):
            return int(frame.f_locals["input_ids"].shape[1])
    return None


def calling_module(depth: int) -> tuple[nn.Module | None, bool]:
    """The module whose forward called us, ``depth`` frames up, and whether it was told not to use a cache.

    transformers does not say which module updates a cache, and a cache that serves the wrong model must not
    go unnoticed. (None, False) where it cannot be told (compiled code).
    """
    if torch.compiler.is_compiling():
        return None, False
    try:
        local = sys._getframe(depth).f_locals
    except ValueError:
        return None, False
    caller = local.get("self")
    return (caller, unused(local)) if isinstance(caller, nn.Module) else (None, False)


def unused(arguments: Mapping[str, Any]) -> bool:
    """Whether ``use_cache=False`` is among an attention module's arguments."""
    return arguments.get("use_cache", (arguments.get("kwargs") or {}).get("use_cache")) is False


def inside_generate() -> bool:
    """Whether generate() is somewhere above us."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            return True
    return False


def about_to_drop(limit: int, seen: int) -> bool:
    """Whether the caller's caller is generate() putting a new cache in the place of one that holds ``seen`` tokens.

    Phi-3 and its kin recompute everything once the text outgrows the length that the short RoPE factors are for, and
    say nothing about it.
    """
    frame = sys._getframe(2)
    ids = frame.f_locals.get("input_ids")
    return (
        frame.f_code.co_name == "prepare_inputs_for_generation"
        and isinstance(ids, Tensor)
        and ids.shape[1] > limit >= seen
    )
