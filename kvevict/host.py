"""What differs between transformers releases, and what we ask of its internals. Nothing else imports those.

5.17 - 5.22   the cache argument is ``past_key_values``
5.23 -        it is ``cache`` (``past_key_values`` warns), and ``layer_past`` in GPT-NeoX
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from kvevict.errors import UnsupportedModelError
from kvevict.masks import additive

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")
"""Names under which decoders hand a cache to their attention modules."""


def cache_argument(model: nn.Module) -> str:
    """The name of the cache argument of ``model.forward``: "cache" or "past_key_values"."""
    names = inspect.signature(unwrapped(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def unwrapped(model: Any) -> Any:
    """The model itself, where ``torch.compile(model)`` was given."""
    return getattr(model, "_orig_mod", model)


def decoder_config(model: nn.Module) -> PreTrainedConfig:
    """The configuration of the model's text decoder."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers config: pass a transformers causal language model"
        )
    return config.get_text_config(decoder=True)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that call ``cache.update``: attention modules with a layer index, innermost ones.

    Linear attention has no config, and cross-attention stores what belongs to another sequence: neither is ours.
    """

    def qualifies(module: nn.Module) -> bool:
        named = "Attention" in type(module).__name__ and isinstance(getattr(module, "layer_idx", None), int)
        return named and isinstance(getattr(module, "config", None), PreTrainedConfig)

    found = [m for name, m in model.named_modules() if qualifies(m) and not _CROSS_ATTENTION.search(name)]
    return [m for m in found if not any(qualifies(inner) for inner in m.modules() if inner is not m)]


_CROSS_ATTENTION = re.compile(r"(^|\.)(cross_?attn|cross_?attention|encoder_attn)(\.|$)")


def reason_to_refuse(model: nn.Module, config: PreTrainedConfig) -> str | None:
    """What about this model makes eviction wrong, or None; ``config`` is its decoder's."""
    layer_configs = getattr(config, "per_layer_config", [config])  # layers may differ in any attribute
    reasons = {
        "is an encoder-decoder": getattr(model.config, "is_encoder_decoder", False),
        "compresses its keys and values into latents (MLA)": any(
            getattr(layer, "kv_lora_rank", None) for layer in layer_configs
        ),
        "shares keys and values between layers": getattr(config, "num_kv_shared_layers", 0) or _shares_layers(config),
        "adds a bias that depends on how many tokens are stored (ALiBi)": getattr(config, "alibi", False),
    }
    return next((reason for reason, true in reasons.items() if true), REFUSED.get(config.model_type))


REFUSED = {
    "bloom": "adds a bias that depends on how many tokens are stored (ALiBi)",
    "diffllama": "attends to the values of one head with the keys of another",
    "doge": "builds its attention mask from the values that are stored",
    "dory": "copies the layers of its cache and reads them itself",
    "jetmoe": "repeats its keys and values for each of a token's experts",
    "minimax": "takes only a cache of its own kind",
    "mpt": "adds a bias that depends on how many tokens are stored (ALiBi)",
}
"""Why not, by model type, where neither config nor modules tell."""


def _shares_layers(config: PreTrainedConfig) -> bool:
    """Whether some layers store nothing although they attend."""
    kinds = getattr(config, "layer_types", None) or []
    dummies = [i for i, layer in enumerate(host_layers(config)) if type(layer).__name__ == "DummyLayer"]
    return any(i >= len(kinds) or kinds[i] not in ("moe", "mlp") for i in dummies)


def check_layers(model: nn.Module, config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError unless each layer that evicts belongs to one attention module that we can mask.

    ``config`` is the decoder's.
    """
    name, modules = type(model).__name__, attention_modules(model)
    if not modules:
        raise UnsupportedModelError(f"{name} has no attention modules that kvevict knows; use transformers' own cache")
    layers = host_layers(config)
    filled = [int(str(module.layer_idx)) for module in modules]
    if any(is_full_attention(layer) and filled.count(index) != 1 for index, layer in enumerate(layers)):
        raise UnsupportedModelError(
            f"{name} has {len(layers)} cache layers that are not filled by one self-attention module each, so kvevict "
            "cannot tell their attention apart: use transformers' own cache"
        )
    decoder = getattr(config, "is_decoder", False)  # BigBirdPegasus is one, and its modules do not say so
    if not decoder and any(getattr(module, "is_causal", True) is False for module in modules):
        raise UnsupportedModelError(
            f"{name} attends to tokens on both sides, as encoders do: load it as a decoder (is_decoder=True for "
            "BERT and its kin), or use transformers' own cache"
        )


def can_crop(layer: Any) -> bool:
    """Whether a layer of transformers can take tokens back now."""
    if getattr(layer, "is_sliding", False) and not getattr(layer, "record_past", False):
        return bool(layer.get_seq_length() < layer.sliding_window)
    return bool(getattr(layer, "is_croppable", False))


def head_size(config: PreTrainedConfig) -> int | None:
    """Numbers of one key or value of one head, if the decoder's config tells."""
    size = getattr(config, "head_dim", None)
    if size is None and getattr(config, "hidden_size", None):
        size = config.hidden_size // config.num_attention_heads
    return size if isinstance(size, int) else None


def implementation(model: nn.Module) -> str:
    """Name of the attention implementation that the model's decoder uses now."""
    return str(decoder_config(model)._attn_implementation or "eager")


def is_compiled(model: nn.Module) -> bool:
    """Whether calls are known to be compiled: torch.compile(model), model.compile() or a compiled model.forward."""
    inner = unwrapped(model)
    compiled = getattr(inner, "_compiled_call_impl", None), getattr(inner.forward, "_torchdynamo_orig_callable", None)
    return inner is not model or any(each is not None for each in compiled)


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


def is_plain(kernel: Callable[..., Any], query: Tensor, arguments: Mapping[str, object]) -> bool:
    """Whether this call of an attention function is softmax(q k) v, but for its mask, and nothing else."""
    return (
        kernel is sdpa_attention_forward
        and not query.requires_grad
        and not torch.is_autocast_enabled(query.device.type)  # it would compute our scores in half precision
        and not arguments.get("dropout")
        and all(arguments.get(name) is None for name in _BESIDES)
    )


_BESIDES = ("position_bias", "softcap", "s_aux", "head_mask")
"""Arguments of attention functions that change what comes out."""


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


def called_without_mask(depth: int) -> bool:
    """Whether the attention module whose forward called us, ``depth`` frames up, was given no mask.

    False where it cannot be told (another name, compiled code).
    """
    try:
        return sys._getframe(depth).f_locals.get("attention_mask", ...) is None
    except ValueError:
        return False


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


def generating_without_cache() -> bool:
    """Whether a generate() above us was told not to use a cache: some models tell their attention so in any case."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "transformers.generation.utils":
            arguments = frame.f_locals.get("model_kwargs")
            if isinstance(arguments, dict) and "use_cache" in arguments:
                return arguments["use_cache"] is False
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
