"""Who goes from a layer after a forward, and what must stay.

    evict()  down to the budget, once the attention was seen
    mark()   the same after a token of a draft, whose slots stay where they are
    votes()  what several layers would do

``selection`` puts slots in order; how many of them go is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from kvevict import selection
from kvevict.errors import OptionError
from kvevict.policies.base import Held, Policy

if TYPE_CHECKING:
    from kvevict.layer import EvictingLayer

Rescore = Callable[[Tensor], Tensor]
"""Scores in place of the policy's own."""


def evict(layer: EvictingLayer, held: Held, rescore: Rescore | None) -> None:
    """Evicts what is too many of ``held``, all that ``layer`` holds."""
    scores, protection = _judge(layer, held, rescore)
    if protection is not None and layer.spec.policy.protect_prompt is not None:
        _check_room(layer, held, protection)
    surplus = _surplus(layer)
    layer.ordered = False
    if surplus == 1 and not layer.uneven:
        layer.free = selection.pick_victim(scores, held.positions, protection, may_be_empty=layer.gaps)
        held.positions.scatter_(2, layer.free, -1)
        layer.dead = max(0, layer.dead - 1)  # an empty slot goes first
        return
    order = selection.eviction_order(scores, held.positions, protection)
    if layer.uneven:
        going = _going(layer, held, order, protection)
        held.positions.masked_fill_(torch.zeros_like(going).scatter_(2, order, going), -1)
        layer.gaps = True
    if surplus > 1:
        layer.compact(order[:, :, surplus:])
    elif surplus:
        layer.free = order[:, :, :1]
        layer.dead = max(0, layer.dead - 1)


def mark(layer: EvictingLayer) -> None:
    """Evicts, but leaves what goes as empty slots where it is."""
    held = layer.held()
    scores, protection = _judge(layer, held)
    if protection is not None and layer.spec.policy.protect_prompt is not None:
        _check_room(layer, held, protection)
    order = selection.eviction_order(scores, held.positions, protection)
    surplus = _surplus(layer)
    going = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, _going(layer, held, order, protection))
    held.positions.masked_fill_(going, -1)
    layer.dead = 0 if layer.uneven else max(layer.dead, surplus)
    layer.gaps, layer.ordered = True, False


def votes(layers: Iterable[EvictingLayer]) -> Tensor:
    """How many heads of how many layers would evict each slot: (B, L) int64."""
    total: Tensor | None = None
    for layer in layers:
        held = layer.held()
        scores, protection = _judge(layer, held)
        order = selection.eviction_order(scores, held.positions, protection)
        going = _going(layer, held, order, protection)
        cast = torch.zeros_like(order).scatter_(-1, order, going.long()).sum(1)
        total = cast if total is None else total + cast.to(total.device)
    assert total is not None
    return total


def _judge(layer: EvictingLayer, held: Held, rescore: Rescore | None = None) -> tuple[Tensor, Tensor | None]:
    """Scores, (B, H | 1, slots), and which slots may not go, (B, H, slots) bool or None."""
    policy = layer.spec.policy
    scores = layer.scores(held)
    if rescore is not None:
        scores = rescore(scores)
    layer.check_scores(scores)
    return scores, selection.protected(
        held.positions,
        seen=held.seen,
        sinks=policy.sinks,
        recent=policy.recent_for(held.budget),
        prompt=held.prompt,
        ends=policy.prompt_ends(held.budget, held.prompt),
        may_be_empty=layer.gaps,
    )


# -- how many --------------------------------------------------------------------------------------------------


def _surplus(layer: EvictingLayer) -> int:
    """How many slots are too many for every row."""
    bound = layer.bound()
    if layer.slots <= bound:
        return 0
    live = layer.slots - layer.dead
    if layer.uneven:
        return layer.slots - bound
    if layer.spec.one_by_one:
        return max(layer.slots - bound, layer.dead)  # a bound that has grown since may have room for empty slots
    if live <= bound:
        return max(layer.slots - bound, layer.dead)
    policy = layer.spec.policy
    prompt = layer.seen if layer.prompt is None else layer.prompt
    keep = max(live - int(policy.at_once(bound)), int(_staying(policy, layer.seen, bound, prompt)))
    return layer.slots - min(bound, keep)


def _going(layer: EvictingLayer, held: Held, order: Tensor, protection: Tensor | None) -> Tensor:
    """Which ranks of ``order``, the first to go first, must go: (B, H, slots) bool."""
    rank = torch.arange(layer.slots, device=order.device)
    if not layer.uneven:
        return (rank < _surplus(layer)).expand_as(order)
    policy = layer.spec.policy
    live = (held.positions >= 0).sum(-1, keepdim=True)  # (B, H, 1)
    stay = torch.minimum(live - policy.at_once(held.budget), torch.as_tensor(held.budget))
    if protection is not None:
        stay = torch.maximum(stay, _staying(policy, held.seen, held.budget, held.prompt))
    return rank < layer.slots - torch.where(live > held.budget, stay, live)


def _staying(policy: Policy, seen: int | Tensor, budget: int | Tensor, prompt: int | Tensor) -> Tensor:
    """How many tokens the common protections keep."""
    return selection.count_protected(
        seen=seen,
        sinks=policy.sinks,
        recent=policy.recent_for(budget),
        prompt=prompt,
        ends=policy.prompt_ends(budget, prompt),
    )


# -- protected prompts -----------------------------------------------------------------------------------------


def check_whole_prompt(layer: EvictingLayer, tokens: int) -> None:
    """A prompt that may not be cut must fit every layer. Padded batches are looked at when their pads are known."""
    spec, policy = layer.spec, layer.spec.policy
    over = layer.prompt is not None or (tokens == 1 and layer.seen > 0)
    if policy.protect_prompt != "whole" or not policy.evicts or over or layer.row_seen is not None:
        return
    prompt = layer.seen + tokens
    later = max(prompt, spec.average(prompt)) + 1  # once more than an average budget was seen
    budget = min(spec.tokens(index, later, prompt) for index in range(spec.layers))
    if tokens > 1 and isinstance(spec.budget, int) and policy.protected_tokens(budget, prompt) > budget:
        _room_error(policy, budget, f"a prompt of {prompt} tokens")


def _check_room(layer: EvictingLayer, held: Held, protection: Tensor) -> None:
    """A protected prompt that outgrew its row's budget is the user's error, never a silent eviction."""
    if layer.fresh == 1:
        return  # the prompt is over, and was looked at when it came
    over = protection.sum(-1, keepdim=True) > held.budget
    if bool(over.any()):
        budget = held.budget if isinstance(held.budget, int) else int(held.budget[over.any(1, keepdim=True)].min())
        if layer.slots == layer.fresh:
            layer.clear()  # nothing was held before: leave it so
        _room_error(layer.spec.policy, budget, "this prompt")


def _room_error(policy: Policy, budget: int, what: str) -> NoReturn:
    raise OptionError(
        f"protect_prompt={policy.protect_prompt!r} with sinks={policy.sinks} and recent="
        f"{policy.recent_for(budget)} cannot hold {what} in budget={budget}: raise budget, or protect a share "
        "of it (protect_prompt=0.5)"
    )
