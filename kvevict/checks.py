"""What cannot work is refused when a cache is built, with an error that says what to do instead."""

from __future__ import annotations

from typing import Any

import torch

from kvevict import host
from kvevict.errors import OptionError, UnsupportedModelError
from kvevict.policies.base import ALL_QUERIES, Policy
from kvevict.spec import Spec


def check_budget(budget: int | float) -> int | float:
    """The budget, or OptionError: an int from 1, or a float above 0 and up to 1."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise OptionError(f"budget={budget!r}: give tokens per KV head (int) or a share of the tokens seen (float)")
    if isinstance(budget, float) and not 0 < budget <= 1:
        hint = f"; for {int(budget)} tokens write budget={int(budget)}" if 1 < budget < 1e9 else ""
        raise OptionError(f"budget={budget!r}: a float is a share of the tokens seen, above 0 and up to 1{hint}")
    if isinstance(budget, int) and budget < 1:
        raise OptionError(f"budget={budget!r}: give at least 1 token")
    return budget


def check_model(model: object) -> Any:
    """The decoder's config, or UnsupportedModelError naming what is in the way."""
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedModelError(
            f"model={type(model).__name__}: pass the model itself, a transformers causal language model"
        )
    config = host.decoder_config(model)
    name = type(model).__name__
    if getattr(config, "num_hidden_layers", None) is None:
        raise UnsupportedModelError(
            f"the config of {name} does not say how many layers its decoder has, so kvevict cannot tell what its cache "
            "holds: use transformers' own cache"
        )
    reason = host.reason_to_refuse(model, config)
    if reason is not None:
        raise UnsupportedModelError(f"{name} {reason}, which kvevict does not evict from: use transformers' own cache")
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise UnsupportedModelError(
            f"{name} does not use transformers' attention interface, so kvevict cannot see or mask its attention: use "
            "transformers' own cache"
        )
    if host.implementation(model) == "flex_attention":
        raise UnsupportedModelError(
            "attn_implementation='flex_attention' takes block masks, which cannot follow evicted tokens: call "
            "model.set_attn_implementation('sdpa') first"
        )
    host.check_layers(model, config)
    return config


def check_protection(spec: Spec) -> None:
    """Raises OptionError if some layer's budget cannot hold what the policy protects."""
    policy, budget = spec.policy, spec.budget
    if not policy.evicts:
        return
    if not isinstance(budget, int):
        if policy.protect_prompt == "whole" and budget < 1:
            raise OptionError(
                f"budget={budget} is a share of the tokens seen and cannot hold protect_prompt='whole': give the "
                "budget in tokens, or protect a share of it (protect_prompt=0.5)"
            )
        if policy.protect_prompt != "whole" and policy.protected_tokens(10**6, 0) > 10**6:
            raise OptionError(
                f"protect_prompt={policy.protect_prompt} with recent={policy.recent_for(100)} of 100 tokens protects "
                "more than any budget holds: lower one of them"
            )
        return
    smallest = min(spec.tokens(layer, budget + 1, None) for layer in range(spec.layers))
    recent = policy.recent_for(smallest)
    where = "" if smallest == budget else f" (its smallest layer gets {smallest})"
    needed = policy.sinks + int(recent)
    if needed > smallest:
        raise OptionError(
            f"budget={budget}{where} cannot hold sinks={policy.sinks} and recent={recent} ({needed} tokens): raise "
            f"budget to at least {needed + budget - smallest}, or lower one of them"
        )
    share = policy.protect_prompt
    if share is None or share == "whole":
        return
    needed = policy.protected_tokens(smallest, 0)
    if needed > smallest:
        raise OptionError(
            f"budget={budget}{where} cannot hold protect_prompt={share} with sinks={policy.sinks} and recent={recent} "
            f"({needed} tokens): lower one of them, or raise budget"
        )


def check_fused(fused: bool, policy: Policy, model: torch.nn.Module) -> None:
    """Raises OptionError if a pass over a prompt cannot be saved."""
    if not isinstance(fused, bool):
        raise OptionError(f"fused_prefill={fused!r}: expected True or False")
    if fused and (policy.queries != ALL_QUERIES or host.implementation(model) != "sdpa"):
        raise OptionError(
            f"fused_prefill=True with policy {policy.name!r} under {host.implementation(model)!r} attention: it is for "
            "policies that read the attention of every query, and for 'sdpa'. Leave it out, or call "
            "model.set_attn_implementation('sdpa') first"
        )
