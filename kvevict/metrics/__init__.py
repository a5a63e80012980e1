"""Metrics for Hugging Face ``evaluate``: load one by its folder, ``evaluate.load(CACHED_PERPLEXITY)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvevict.cache import EvictingCache
from kvevict.errors import OptionError
from kvevict.evaluation import perplexity
from kvevict.fidelity import full_cache
from kvevict.models import load_model
from kvevict.protocols import chunked

CACHED_PERPLEXITY = str(Path(__file__).parent / "cached_perplexity")
"""The folder of the metric, for ``evaluate.load``."""


def text_perplexities(
    texts: Sequence[str],
    model_id: str,
    *,
    policy: str | None = None,
    budget: int | float | None = None,
    chunk: int = 32,
    add_start_token: bool = True,
    max_length: int | None = None,
    device: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The perplexity of each text through a cache of its own, and their mean, as ``evaluate``'s metric gives them.

    policy, budget, options: of ``EvictingCache``; without a policy it is transformers' full cache.
    chunk:           tokens per forward: what is fed at once is attended to in full.
    add_start_token: predict the first token too, after the tokenizer's start token.
    max_length:      the most tokens of a text, the start token included.

    Returns {"perplexities": one for each text, "mean_perplexity": their mean}. Raises OptionError for a text without
    anything to predict, or a start token that the tokenizer does not have.

    Source: https://huggingface.co/spaces/evaluate-metric/perplexity
    """
    if (policy is None) != (budget is None):
        raise OptionError(f"policy={policy!r} with budget={budget!r}: give both, or neither for the full cache")
    if options and policy is None:
        raise OptionError(f"{', '.join(options)} given without a policy: name one")
    model, tokenizer, _ = load_model(model_id, device=device)
    make: Callable[[], Cache] = partial(full_cache, model)
    if policy is not None and budget is not None:
        make = partial(EvictingCache, model, policy, budget, **options)
    start = _start(tokenizer) if add_start_token else []
    found = [_one(model, start + _ids(tokenizer, text, max_length, len(start)), text, make, chunk) for text in texts]
    if not found:
        raise OptionError("no texts: give at least one")
    return {"perplexities": found, "mean_perplexity": sum(found) / len(found)}


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.bos_token_id is None:
        raise OptionError("the tokenizer has no start token: pass add_start_token=False")
    return [int(tokenizer.bos_token_id)]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None, taken: int) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids if most is None else ids[: most - taken]


def _one(model: PreTrainedModel, ids: list[int], text: str, make: Callable[[], Cache], chunk: int) -> float:
    if len(ids) < 2:
        raise OptionError(f"text {text[:40]!r} has no token to predict: leave it out, or pass add_start_token=True")
    return perplexity(model, torch.tensor(ids), make, protocol=chunked(chunk)).perplexity
