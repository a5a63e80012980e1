"""Perplexity of a model that reads a text through a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, PreTrainedModel

from kvevict.errors import EvaluationError, OptionError
from kvevict.host import cache_argument
from kvevict.protocols import Protocol, chunked, outgrown

LOGIT_ROWS = 64
"""Rows of logits turned to float32 at a time: 13 MB for a vocabulary of 50,000."""


@dataclass(frozen=True)
class Result:
    """What one reading of a text gave.

    nll:        (P,) float32 on the CPU, -log p of each predicted token, in nats.
    positions:  (P,) int64, the index in the text of each predicted token.
    seen:       (P,) int64, how many tokens its cache had seen before the forward that predicted it.
    held_bytes: what the cache holds after the last token; the most of any, where a text is read through several.
    peak_bytes: the most it held after any forward.
    seconds:    for all forwards, building the caches included.
    protocol:   how the text was read.
    """

    nll: Tensor
    positions: Tensor
    seen: Tensor
    held_bytes: int
    peak_bytes: int
    seconds: float
    protocol: Protocol

    @property
    def perplexity(self) -> float:
        """exp of the mean nll; inf where that overflows."""
        return float(self.nll.double().mean().exp())

    def perplexity_after(self, budget: int | float) -> float:
        """Perplexity of the tokens predicted after ``budget`` was exceeded; NaN if it never was."""
        return float(self.nll[outgrown(self.seen, budget)].double().mean().exp())

    @property
    def tokens_per_second(self) -> float:
        """Tokens predicted per second."""
        return len(self.nll) / self.seconds


@torch.no_grad()
def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    make_cache: Callable[[], Cache],
    *,
    chunk: int | None = None,
    protocol: Protocol | None = None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Reads ``ids`` (N,) or (1, N) as ``protocol`` says, with a fresh cache of ``make_cache`` for each of its spans.

    protocol: of ``kvevict.protocols``: ``streaming()``, ``chunked(32)`` (used if left out), ``windows(2048, 512)`` or
        ``blocks(2048)``. ``chunk=64`` is short for ``protocol=chunked(64)``.
    progress: called with the number of tokens read since its last call.

    A cache that is a context manager is left at the end of its span. Raises OptionError for ids, a chunk or a
    protocol that cannot work, and EvaluationError if the model predicts NaN.

    >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=4, vocab_size=64))
    >>> result = perplexity(model, torch.arange(20), DynamicCache, chunk=4)
    >>> len(result.nll), result.held_bytes  # 2 layers, keys and values, 19 tokens, 32 floats
    (19, 9728)
    """
    protocol = _protocol(chunk, protocol)
    ids = one_row(ids).to(model.device)
    losses: list[Tensor] = []
    held = peak = 0
    with evaluation_mode(model):
        begin = time.perf_counter()
        for span in protocol.spans(len(ids)):
            with opened(make_cache) as cache:
                for forward in protocol.forwards(span):
                    logits = logits_of(model, ids[forward.start : forward.stop], cache)
                    scored = forward.first - forward.start - 1  # a window predicts its first tokens for context only
                    losses.append(token_losses(logits[scored:], ids[forward.first : forward.stop + 1]))
                    peak = max(peak, cache_bytes(cache))
                    if progress is not None:
                        progress(forward.stop - forward.start)
                held = max(held, cache_bytes(cache))
        nll = torch.cat(losses).cpu()  # waits for an accelerator, so the clock is right
        seconds = time.perf_counter() - begin
    positions = protocol.predicted(len(ids))
    if nll.isnan().any():
        position = int(positions[nll.isnan()][0])
        raise EvaluationError(f"the model's prediction of token {position} is NaN: try another dtype")
    return Result(nll, positions, protocol.seen(len(ids)), held, peak, seconds, protocol)


def _protocol(chunk: int | None, protocol: Protocol | None) -> Protocol:
    if protocol is None:
        return chunked(32 if chunk is None else chunk)
    if chunk is not None:
        raise OptionError(f"chunk={chunk} given with the protocol {protocol}: give the chunk to the protocol")
    return protocol


def one_row(ids: Tensor) -> Tensor:
    """The ids as (N,), or OptionError if they are not one row of at least 2 tokens."""
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) < 2:
        raise OptionError(f"ids of shape {tuple(ids.shape)}: give one row of at least 2 tokens")
    return ids


@contextmanager
def evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Puts the model in evaluation mode, and afterwards in the mode it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def opened(make_cache: Callable[[], Cache]) -> Iterator[Cache]:
    """A new cache, left at the end if it is a context manager."""
    cache = make_cache()
    with cache if isinstance(cache, AbstractContextManager) else nullcontext():
        yield cache


def logits_of(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """The logits (Q, vocabulary) of one forward of ``ids`` (Q,) with ``cache``."""
    output = model(ids[None], use_cache=True, **{cache_argument(model): cache})
    logits: Tensor = output.logits[0]
    return logits


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache really holds: each storage behind its tensors once, whole."""
    known = getattr(cache, "nbytes", None)
    if isinstance(known, int):
        return known
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax of the targets in float32: (Q, V), (Q,) -> (Q,)."""
    blocks = zip(logits.split(LOGIT_ROWS), targets.to(logits.device).split(LOGIT_ROWS), strict=True)
    return torch.cat([functional.cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in blocks])
