"""Perplexity of a model that reads a text through a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, PreTrainedModel

from kvevict.errors import EvaluationError, OptionError
from kvevict.host import cache_argument

LOGIT_ROWS = 64
"""Rows of logits turned to float32 at a time: 13 MB for a vocabulary of 50,000."""


@dataclass(frozen=True)
class Result:
    """What one reading of a text gave.

    nll:        (N - 1,) float32 on the CPU, -log p of each token after the first, in nats.
    held_bytes: what the cache holds after the last token.
    peak_bytes: the most it held after any forward.
    seconds:    for all forwards, building the cache included.
    chunk:      tokens per forward.
    """

    nll: Tensor
    held_bytes: int
    peak_bytes: int
    seconds: float
    chunk: int

    @property
    def perplexity(self) -> float:
        """exp of the mean nll; inf where that overflows."""
        return float(self.nll.double().mean().exp())

    @property
    def tokens_per_second(self) -> float:
        """Tokens read per second."""
        return len(self.nll) / self.seconds


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    make_cache: Callable[[], Cache],
    *,
    chunk: int = 32,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Reads ``ids`` (N,) or (1, N) through one cache, ``chunk`` tokens per forward, predicting every next token.

    ``chunk=1`` is the token-by-token protocol of StreamingLLM and TOVA. A cache that is a context manager is left
    at the end. ``progress`` is called with the number of tokens read since its last call.

    >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=4, vocab_size=64))
    >>> result = perplexity(model, torch.arange(20), DynamicCache, chunk=4)
    >>> len(result.nll), result.held_bytes  # 2 layers, keys and values, 19 tokens, 32 floats
    (19, 9728)
    """
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) < 2:
        raise OptionError(f"ids of shape {tuple(ids.shape)}: give one row of at least 2 tokens")
    if chunk < 1:
        raise OptionError(f"chunk={chunk}: give at least 1 token per forward")
    ids = ids.to(model.device)
    last = len(ids) - 1  # nothing follows the last token, so it is only a target
    argument = cache_argument(model)
    training = model.training
    losses: list[Tensor] = []
    peak = 0
    model.eval()
    try:
        with ExitStack() as stack:
            begin = time.perf_counter()
            cache = make_cache()
            if isinstance(cache, AbstractContextManager):
                stack.enter_context(cache)
            for start in range(0, last, chunk):
                stop = min(start + chunk, last)
                output = model(ids[None, start:stop], use_cache=True, **{argument: cache})
                losses.append(_losses(output.logits[0], ids[start + 1 : stop + 1]))
                peak = max(peak, cache_bytes(cache))
                if progress is not None:
                    progress(stop - start)
            nll = torch.cat(losses).cpu()  # waits for an accelerator, so the clock is right
            seconds = time.perf_counter() - begin
            held = cache_bytes(cache)
    finally:
        model.train(training)
    if nll.isnan().any():
        position = int(nll.isnan().nonzero()[0]) + 1
        raise EvaluationError(f"the model's prediction of token {position} is NaN: try another dtype")
    return Result(nll, held, peak, seconds, chunk)


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache really holds: each storage behind its tensors once, whole."""
    known = getattr(cache, "nbytes", None)
    if isinstance(known, int):
        return known
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax of the targets in float32: (Q, V), (Q,) -> (Q,)."""
    blocks = zip(logits.split(LOGIT_ROWS), targets.to(logits.device).split(LOGIT_ROWS), strict=True)
    return torch.cat([functional.cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in blocks])
