"""How close a cache stays to the full cache: on the same tokens, and in what it generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvevict.errors import EvaluationError, OptionError
from kvevict.evaluation import LOGIT_ROWS, evaluation_mode, logits_of, one_row, opened, token_losses
from kvevict.protocols import Protocol, chunked


@dataclass(frozen=True)
class Fidelity:
    """What one reading gave beside the full cache's reading of the same tokens.

    kl:        (P,) float32, Kullback-Leibler divergence of the next-token distribution from the full cache's,
        KL(full || cache), in nats.
    agrees:    (P,) bool, whether both rank the same token first.
    nll:       (P,) float32, -log p of each predicted token, in nats.
    full_nll:  (P,) float32, the same by the full cache.
    positions: (P,) int64, the index in the text of each predicted token.
    seen:      (P,) int64, how many tokens its cache had seen before the forward that predicted it.
    """

    kl: Tensor
    agrees: Tensor
    nll: Tensor
    full_nll: Tensor
    positions: Tensor
    seen: Tensor

    @property
    def mean_kl(self) -> float:
        """Mean KL(full || cache) in nats; 0 for the full cache itself."""
        return float(self.kl.double().mean())

    @property
    def agreement(self) -> float:
        """The share of predictions that rank the same token first."""
        return float(self.agrees.double().mean())


@torch.no_grad()
def fidelity(
    model: PreTrainedModel,
    ids: Tensor,
    make_cache: Callable[[], Cache],
    *,
    protocol: Protocol | None = None,
    progress: Callable[[int], None] | None = None,
) -> Fidelity:
    """Reads ``ids`` (N,) or (1, N) through ``make_cache`` and through transformers' full cache, forward by forward.

    protocol: of ``kvevict.protocols``; ``chunked(32)`` if left out.
    progress: called with the number of tokens read since its last call.

    Every token is read twice, so this takes twice the time of a perplexity. Raises OptionError for ids that cannot
    be read, and EvaluationError if either reading predicts NaN.

    >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=4, vocab_size=64))
    >>> close = fidelity(model, torch.arange(20), DynamicCache)
    >>> close.mean_kl, close.agreement
    (0.0, 1.0)
    """
    protocol = protocol or chunked(32)
    ids = one_row(ids).to(model.device)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    with evaluation_mode(model):
        for span in protocol.spans(len(ids)):
            with opened(lambda: full_cache(model)) as full, opened(make_cache) as cache:
                for forward in protocol.forwards(span):
                    block = ids[forward.start : forward.stop]
                    scored = forward.first - forward.start - 1
                    expected = logits_of(model, block, full)[scored:]
                    logits = logits_of(model, block, cache)[scored:]
                    targets = ids[forward.first : forward.stop + 1]
                    kl, agrees = _apart(expected, logits)
                    parts.append((kl, agrees, token_losses(logits, targets), token_losses(expected, targets)))
                    if progress is not None:
                        progress(forward.stop - forward.start)
    kl, agrees, nll, full_nll = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    if kl.isnan().any():
        position = int(protocol.predicted(len(ids))[kl.isnan()][0])
        raise EvaluationError(f"the prediction of token {position} is NaN: try another dtype")
    return Fidelity(kl, agrees, nll, full_nll, protocol.predicted(len(ids)), protocol.seen(len(ids)))


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Tensor, cache: Cache, new: int, like: Tensor | None = None) -> Tensor:
    """Up to ``new`` tokens of greedy decoding after ``prompt`` (N,), which is fed in one forward: (new,) int64.

    The end-of-text token does not end it. It ends after the first token that differs from ``like`` (new,).
    """
    made: list[int] = []
    block = prompt.to(model.device)
    while len(made) < new and (like is None or made == like[: len(made)].tolist()):
        token = logits_of(model, block, cache)[-1].argmax()
        made.append(int(token))
        block = token[None]
    return torch.tensor(made)


@torch.no_grad()
def first_divergence(model: PreTrainedModel, prompt: Tensor, make_cache: Callable[[], Cache], new: int = 64) -> int:
    """How many tokens of greedy decoding after ``prompt`` (N,) equal the full cache's; ``new`` if all of them do.

    The prompt is attended in full and cut once, as in ``generate()``, so the first token is always the same.
    """
    if prompt.dim() != 1 or not len(prompt):
        raise OptionError(f"prompt of shape {tuple(prompt.shape)}: give a row of at least 1 token")
    if new < 1:
        raise OptionError(f"new={new}: give at least 1 token to generate")
    with evaluation_mode(model):
        expected = greedy(model, prompt, full_cache(model), new)
        with opened(make_cache) as cache:
            made = greedy(model, prompt, cache, new, like=expected)
    return int((made == expected[: len(made)]).sum())


def full_cache(model: PreTrainedModel) -> DynamicCache:
    """transformers' own cache, which forgets nothing."""
    return DynamicCache(config=model.config)


def _apart(expected: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(expected || logits) in float32, and whether the first ranks agree: (Q, V), (Q, V) -> (Q,), (Q,)."""
    kl, agrees = [], []
    for wanted, got in zip(expected.split(LOGIT_ROWS), logits.split(LOGIT_ROWS), strict=True):
        p, q = wanted.float().log_softmax(-1), got.float().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1).clamp_min(0))  # rounding may give -1e-8
        agrees.append(wanted.argmax(-1) == got.argmax(-1))
    return torch.cat(kl), torch.cat(agrees)
