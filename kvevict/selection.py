"""Who goes: a pure function of scores, protection and budget.

Ties evict the lower position. Protected tokens leave the race by index, never by a large score, so that no
score a policy invents can evict them (kvpress #226). Empty slots (position -1) always go first.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def protected(
    positions: Tensor,
    *,
    seen: int | Tensor,
    sinks: int,
    recent: int | Tensor,
    prompt: int | Tensor = 0,
    ends: tuple[int | Tensor, int | Tensor] | None = None,
    may_be_empty: bool = True,
) -> Tensor | None:
    """Which slots may not be evicted: (B, H, L) bool, or None when none is protected.

    ``positions`` is (B, H, L); the numbers are ints or (B, 1, 1).
    ``ends``: how many tokens stay of the prompt's start, and of its end.
    ``may_be_empty``: whether a position can be -1.
    """
    parts = []
    if sinks:
        parts.append(positions < sinks)
    if isinstance(recent, Tensor) or recent > 0:
        parts.append(positions >= seen - recent)
    if ends is not None:
        head, tail = ends
        parts.append((positions < prompt) & ((positions < head) | (positions >= prompt - tail)))
    if not parts:
        return None
    kept = functools.reduce(torch.logical_or, parts)
    return kept & (positions >= 0) if may_be_empty else kept


def count_protected(
    *,
    seen: int | Tensor,
    sinks: int,
    recent: int | Tensor,
    prompt: int | Tensor = 0,
    ends: tuple[int | Tensor, int | Tensor] | None = None,
) -> Tensor:
    """How many tokens ``protected`` would find if all that were seen were held, by the same numbers.

    Unlike a count of what is held, it is the same in every head, and for a row alone and among others.
    """
    at, over, newest = torch.as_tensor(seen), torch.as_tensor(prompt), torch.as_tensor(recent)
    head, tail = (0, 0) if ends is None else ends
    first = torch.minimum(torch.minimum(torch.as_tensor(head), over).clamp_min(sinks), at)  # tokens of the start
    late = torch.maximum(at - newest, first)  # where the newest ones begin
    middle = torch.minimum(over, late) - torch.maximum(over - torch.as_tensor(tail), first)
    return first + middle.clamp_min(0) + at - late


def per_slot(index: Tensor, stored: Tensor) -> Tensor:
    """``index`` (B, H, n) for ``gather`` and ``scatter`` along the slots of ``stored`` (B, H, slots, ...)."""
    extra = stored.dim() - 3
    return index.view(*index.shape, *(1,) * extra).expand(*index.shape, *stored.shape[3:]) if extra else index


def pick_victim(scores: Tensor, positions: Tensor, protection: Tensor | None, *, may_be_empty: bool) -> Tensor:
    """The one slot to free in each row and head: (B, H, 1) indices.

    scores: (B, H, L), or (B, 1, L) for all heads alike; positions: (B, H, L).
    """
    if may_be_empty:
        lowest = float("-inf") if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).min
        scores = scores.expand_as(positions).masked_fill(positions < 0, lowest)
    return lowest_first(scores, positions, None if protection is None else ~protection)[1]


def lowest_first(scores: Tensor, positions: Tensor, may_go: Tensor | None) -> tuple[Tensor, Tensor]:
    """The lowest score of those that may go, and the slot of the lowest position that has it: (B, H | 1, 1), (B, H, 1).

    scores: (B, H | 1, L); positions and may_go: (B, H, L).
    """
    if may_go is not None:
        highest = float("inf") if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).max
        scores = torch.where(may_go, scores, highest)
    lowest = scores.amin(-1, keepdim=True)
    goes = scores == lowest
    if may_go is not None:
        goes &= may_go
    return lowest, _lowest_position(goes, positions)


def lowest_guarded(scores: Tensor, positions: Tensor, guard: Tensor) -> tuple[Tensor, Tensor]:
    """``lowest_first`` where ``guard`` (B, H, L) is -inf for tokens that may go and inf for the others.

    On a CPU several times as fast for floats: a choice by a mask takes one number after the other.
    """
    if not scores.dtype.is_floating_point:
        return lowest_first(scores, positions, guard < 0)
    guarded = torch.maximum(scores, guard)
    lowest = guarded.amin(-1, keepdim=True)
    return lowest, _lowest_position((guarded == lowest).logical_and_(guard < 0), positions)


def _lowest_position(goes: Tensor, positions: Tensor) -> Tensor:
    """The slot of the lowest of some positions, both (B, H, L): (B, H, 1)."""
    return torch.where(goes, positions, torch.iinfo(positions.dtype).max).argmin(-1, keepdim=True)


def eviction_order(scores: Tensor, positions: Tensor, protection: Tensor | None) -> Tensor:
    """Slots from the first to go to the last: (B, H, L) indices.

    Empty slots come first, then candidates by score and position, then protected tokens by score and position.
    """
    order = positions.argsort(dim=-1, stable=True)
    ranked = scores.expand_as(positions).gather(-1, order).argsort(dim=-1, stable=True)
    order = order.gather(-1, ranked)
    rank = (positions >= 0).to(torch.int8)
    if protection is not None:
        rank = rank + protection.to(torch.int8)
    return order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))
