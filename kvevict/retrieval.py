"""Whether a cache still finds a fact: what the model answers through it, and how likely it holds the right answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvevict.evaluation import evaluation_mode, logits_of, opened, token_losses
from kvevict.fidelity import full_cache, greedy
from kvevict.needles import Case, string_match

MORE = 16
"""Tokens generated beyond the length of the right answer: room for a few words before it."""


@dataclass(frozen=True)
class Recall:
    """How one case went through one cache.

    match:     the share of the answers in what was generated.
    logprob:   log p of the right answer after the question, in nats, summed over its tokens.
    generated: the greedy answer.
    tokens:    of the context.
    """

    match: float
    logprob: float
    generated: str
    tokens: int


@torch.no_grad()
def recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    case: Case,
    make_cache: Callable[[], Cache],
    *,
    question: str = "after",
    chunk: int | None = None,
) -> Recall:
    """Feeds the context, then the question, and scores the answer.

    question: "after" the context was fed and cut, so that nothing could know what would be asked; or "with" it, in
        the same forwards, so that the policy sees the question's attention.
    chunk:    tokens per forward of the prompt; None feeds it whole, as ``generate()`` does.

    The right answer is fed in one forward, the greedy one token by token, up to its length and 16 tokens more.
    """
    context = torch.tensor(tokenizer(case.context, verbose=False)["input_ids"])
    asked, answer = _ids(tokenizer, case.question, case.answer)
    prompts = [torch.cat([context, asked])] if question == "with" else [context, asked]
    with evaluation_mode(model), opened(make_cache) as cache:
        for prompt in prompts:
            last = _feed(model, prompt, cache, chunk)
        logprob = _logprob(model, last, answer, copy.deepcopy(cache))
        token = last.argmax()[None]
        rest = greedy(model, token, cache, len(answer) + MORE - 1)
    generated = str(tokenizer.decode(torch.cat([token.cpu(), rest])))
    return Recall(string_match(generated, case.answers), logprob, generated, len(context))


@torch.no_grad()
def logprob_without(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: Case) -> float:
    """log p of the right answer, in nats, by the full cache of a text that never held the fact."""
    context = torch.tensor(tokenizer(case.without, verbose=False)["input_ids"])
    asked, answer = _ids(tokenizer, case.question, case.answer)
    with evaluation_mode(model):
        cache = full_cache(model)
        return _logprob(model, _feed(model, torch.cat([context, asked]), cache, None), answer, cache)


def graded_recall(logprobs: list[float], full: list[float], without: list[float]) -> float:
    """Where the answers' log-probability lies between that without the fact (0) and that of the full cache (1).

    Sums over the same cases are divided, so that a case counts by how much the fact helps. NaN if the fact does not
    help even the full cache. Below 0 and above 1 are possible.

    >>> graded_recall([-3.0], [-2.0], [-6.0])
    0.75
    """
    known = sum(full) - sum(without)
    return (sum(logprobs) - sum(without)) / known if known > 0 else float("nan")


def _ids(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[Tensor, Tensor]:
    """The ids of the question, and of the answer as it continues it."""
    asked = tokenizer(question, add_special_tokens=False)["input_ids"]
    both = tokenizer(question + answer, add_special_tokens=False)["input_ids"]
    if both[: len(asked)] != asked:  # the last word of the question and the answer share a token
        both = asked + tokenizer(answer, add_special_tokens=False)["input_ids"]
    return torch.tensor(asked), torch.tensor(both[len(asked) :])


def _feed(model: PreTrainedModel, ids: Tensor, cache: Cache, chunk: int | None) -> Tensor:
    """Feeds ``ids`` (N,); returns the logits (vocabulary,) after the last."""
    for block in ids.to(model.device).split(chunk or len(ids)):
        last = logits_of(model, block, cache)[-1]
    return last


def _logprob(model: PreTrainedModel, last: Tensor, answer: Tensor, cache: Cache) -> float:
    """log p of ``answer`` (N,), whose first token ``last`` (vocabulary,) predicts."""
    answer = answer.to(model.device)
    logits = last[None]
    if len(answer) > 1:
        logits = torch.cat([logits, logits_of(model, answer[:-1], cache)])
    return -float(token_losses(logits, answer).double().sum())
