"""The eviction policies, by name. Each is one file, named like the policy."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from typing import Any

from kvevict.errors import OptionError
from kvevict.policies.adaptive_ema import AdaptiveEMA
from kvevict.policies.attention import Attention
from kvevict.policies.base import Column, Held, Policy, Rows
from kvevict.policies.full import Full
from kvevict.policies.h2o import H2O
from kvevict.policies.key_norm import KeyNorm
from kvevict.policies.pyramidkv import PyramidKV
from kvevict.policies.random import Random
from kvevict.policies.scissorhands import Scissorhands
from kvevict.policies.sliding_window import SlidingWindow
from kvevict.policies.snapkv import SnapKV
from kvevict.policies.streaming_llm import StreamingLLM
from kvevict.policies.tova import TOVA

__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "AdaptiveEMA",
    "Attention",
    "Column",
    "Full",
    "Held",
    "KeyNorm",
    "Policy",
    "PyramidKV",
    "Random",
    "Rows",
    "Scissorhands",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "make_policy",
]

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "sliding_window": SlidingWindow,
    "streaming_llm": StreamingLLM,
    "attention": Attention,
    "h2o": H2O,
    "tova": TOVA,
    "scissorhands": Scissorhands,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adaptive_ema": AdaptiveEMA,
    "random": Random,
    "key_norm": KeyNorm,
}


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """A policy from its name and options, or the instance itself.

    Raises OptionError for a name or an option that does not exist, saying which do.

    >>> make_policy("h2o", recent=32)
    H2O(sinks=0, recent=32, protect_prompt=None, evict_every=1, group='mean')
    """
    if isinstance(policy, Policy):
        if options:
            given = ", ".join(options)
            raise OptionError(f"{given} given with a finished {policy!r}: set options where that policy is made")
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise OptionError(f"policy={policy.__name__} is a class: pass an instance, {policy.__name__}()")
    if not isinstance(policy, str):
        raise OptionError(f"policy={policy!r}: expected a policy such as H2O(), or a name: {', '.join(POLICIES)}")
    if policy not in POLICIES:
        near = _near(policy.lower().replace("-", "_").replace(" ", "_"), list(POLICIES))
        raise OptionError(f"no policy is named {policy!r}{near}; there are: {', '.join(POLICIES)}")
    accepted = [option.name for option in dataclasses.fields(POLICIES[policy])]
    for option in options:
        if option not in accepted:
            raise OptionError(
                f"policy {policy!r} has no option {option!r}{_near(option, accepted)}; it takes: {', '.join(accepted)}"
            )
    return POLICIES[policy](**options)


def _near(given: str, names: list[str]) -> str:
    close = get_close_matches(given, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
