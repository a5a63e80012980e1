"""What a policy is: it turns what a layer holds into scores, and nothing else.

Shapes, here and in every policy:

    B  batch rows            Q  queries of one block, oldest first
    H  KV heads              L  stored slots (some may be empty)
    G  query heads per KV    D  head size
       head

A policy never cuts, never counts budgets and never moves tensors. It may write to the columns that it
declared, in place; the layer moves them together with the keys.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from kvevict.errors import OptionError

GroupReduction = Literal["mean", "max", "sum", "first"]
GROUP_REDUCTIONS: tuple[str, ...] = ("mean", "max", "sum", "first")

ALL_QUERIES = 2**62
"""What a policy returns from ``queries`` to see every query of a forward."""


@dataclass(frozen=True)
class Column:
    """One number (or a small array) that a policy keeps for every stored token.

    ``fill`` is the value of a token that just arrived, ``shape`` the trailing shape, ``dtype`` the
    storage type; None means the type of the attention statistics (float32 inside a model).
    """

    fill: float = 0.0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass
class Held:
    """What one layer holds, slot by slot. Slots are in no particular order.

    positions: (B, H, L) int64, the token's index among its row's real tokens; -1 marks an empty slot.
    seen:      tokens seen so far, this forward included: an int, or (B, 1, 1) int64 when rows differ.
    prompt:    length of the prompt, like ``seen``.
    budget:    tokens this layer may keep, like ``seen``.
    keys, values: (B, H, L, D) as stored, or None outside a model.
    layer, layers: index of this layer among the evicting layers, and how many there are.
    columns:   the policy's own tensors, (B, H, L, ...), written in place.
    """

    positions: Tensor
    seen: int | Tensor
    budget: int | Tensor
    prompt: int | Tensor = 0
    keys: Tensor | None = None
    values: Tensor | None = None
    layer: int = 0
    layers: int = 1
    columns: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def oldest_first(self) -> Tensor:
        """Slots from the oldest token to the newest, empty ones before all: (B, H, L) indices."""
        return self.positions.argsort(-1)

    def first(self, slots: int) -> Held:
        """The same layer seen through its first ``slots`` slots; writes go through."""
        return self.narrow(0, slots)

    def narrow(self, start: int, stop: int) -> Held:
        """The same layer seen through slots ``start`` to ``stop``; writes go through."""
        return dataclasses.replace(
            self,
            positions=self.positions[:, :, start:stop],
            keys=None if self.keys is None else self.keys[:, :, start:stop],
            values=None if self.values is None else self.values[:, :, start:stop],
            columns={name: column[:, :, start:stop] for name, column in self.columns.items()},
        )


@dataclass
class Rows:
    """Attention rows of consecutive queries, oldest first.

    weights:   (B, H, G, Q, L) softmax weights, zero where a query may not look and in the rows of pads. The tensor may
        be used again: copy what you keep.
    positions: (B, Q) int64, each query's own position; -1 marks a pad.
    decode:    True says that there is one query per row, the newest; that no slot is empty, and it sees them all; and
        that ``seen`` and ``budget`` are ints and the budget was never another. False says nothing.
    start:     position of the first query, in the first forward of a cache whose rows have no pads: slot i holds
        token i, and ``seen`` and ``budget`` are ints. None says nothing.
    """

    weights: Tensor
    positions: Tensor
    decode: bool = False
    start: int | None = None

    def visible(self, held: Held) -> Tensor:
        """How many held tokens each query could see: (B, H, Q), at least 1."""
        slots = held.positions.unsqueeze(2)  # (B, H, 1, L)
        queries = self.positions[:, None, :, None]  # (B, 1, Q, 1)
        return ((slots >= 0) & (slots <= queries)).sum(-1).clamp_min(1)  # (B, H, Q)


def reduce_group(weights: Tensor, how: GroupReduction) -> Tensor:
    """Turns query heads into KV heads: (B, H, G, ...) -> (B, H, ...)."""
    if how == "mean":
        return weights.mean(2)
    if how == "max":
        return weights.amax(2)
    if how == "sum":
        return weights.sum(2)
    return weights[:, :, 0]


def query_sum(weights: Tensor, how: GroupReduction) -> Tensor:
    """``reduce_group`` and the sum over queries: (B, H, G, Q, L) -> (B, H, L)."""
    if how != "mean":
        return reduce_group(weights, how).sum(2)
    B, H, G, Q, L = weights.shape
    if Q == 1:
        return weights.sum((2, 3)) / G
    ones = weights.new_ones(B * H, G * Q)
    return query_product(ones, weights.reshape(B * H, G * Q, L)).view(B, H, L) / G  # in two thirds of a sum's time


def query_product(factors: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights times factors over the queries, never in less precision: (B, Q), (B, Q, L) -> (B, 1, L)."""
    with torch.autocast(weights.device.type, enabled=False):
        return torch.bmm(factors.unsqueeze(1), weights)


Tokens = TypeVar("Tokens", int, Tensor, int | Tensor)


def share_of(share: float, tokens: Tokens) -> Tokens:
    """``share`` of ``tokens`` (an int, or an int64 tensor), rounded down, with the share read as it is printed.

    >>> share_of(0.3, 10)
    3
    """
    exact = Fraction(repr(float(share)))
    return tokens * exact.numerator // exact.denominator


def at_least(tokens: Tokens, least: int) -> Tokens:
    """``tokens`` (an int, or an int64 tensor), raised to ``least`` where they are fewer."""
    return max(tokens, least) if isinstance(tokens, int) else tokens.clamp_min(least)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Base of every policy: frozen options, a score, and the common protections.

    sinks:  the row's first real tokens that are never evicted.
    recent: the row's newest tokens that are never evicted.
    protect_prompt: None; "whole" (no prompt token is evicted); or a share of the budget in (0, 1]: that
        many prompt tokens stay, half of them from its start and half from its end.
    evict_every: how many tokens go together. With more than 1 a cache holds between budget + 1 - evict_every and
        budget tokens, and decides, and moves what stays, only at every so many decoded tokens.
    """

    name: ClassVar[str] = ""
    consensus: ClassVar[bool] = False
    """Whether all layers vote and evict the same tokens."""
    by_age: ClassVar[bool] = False
    """Whether ``score`` is ``held.positions`` as they are, so that the oldest token goes: saves time only."""
    stacks: ClassVar[bool] = False
    """Whether ``observe`` and ``score`` treat every row alike and read neither layer, keys nor values: saves time only.

    Layers that decode are then shown together, stacked as the rows of one batch.
    """

    sinks: int = 0
    recent: int | None = 0
    protect_prompt: Literal["whole"] | float | None = None
    evict_every: int = 1

    def __post_init__(self) -> None:
        check_option(
            self, "evict_every", type(self.evict_every) is int and self.evict_every >= 1, "a number of tokens from 1"
        )
        for option in ("sinks", "recent"):
            value = getattr(self, option)
            if value is None and option == "recent":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{type(self).__name__}({option}={value!r}): give a number of tokens, 0 or more")
        share = self.protect_prompt
        if share is None or share == "whole":
            return
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise OptionError(
                f"{type(self).__name__}(protect_prompt={share!r}): give None, 'whole', or a share of the "
                "budget above 0 and up to 1"
            )

    @property
    def queries(self) -> int:
        """How many of a forward's last queries ``observe`` must see: 0, a number, or ALL_QUERIES."""
        return 0

    @property
    def evicts(self) -> bool:
        """False for a policy that keeps everything whatever the budget."""
        return True

    @property
    def prompt_sets_budgets(self) -> bool:
        """True if ``layer_budgets`` depends on the prompt's length, so that rows may have different budgets."""
        return False

    def columns(self, budget: int) -> dict[str, Column]:
        """The per-token state this policy keeps, by name. ``budget`` is the layer's largest."""
        return {}

    def recent_for(self, budget: int | Tensor) -> int | Tensor:
        """How many newest tokens are protected under ``budget`` (an int, or (B, 1, 1))."""
        return 0 if self.recent is None else self.recent

    def least(self) -> int:
        """The smallest budget from which on the protected tokens fit, a whole prompt left aside."""
        try:
            return _least(self)
        except TypeError:  # an option of a user's policy that cannot be hashed
            return _least.__wrapped__(self)

    def prompt_ends(self, budget: int | Tensor, prompt: int | Tensor) -> tuple[int | Tensor, int | Tensor] | None:
        """How many tokens of the prompt's start, and of its end, ``protect_prompt`` keeps; the odd one at the end."""
        if self.protect_prompt is None:
            return None
        if self.protect_prompt == "whole":
            return prompt, 0
        total = share_of(self.protect_prompt, budget)
        return total // 2, total - total // 2

    def protected_tokens(self, budget: int, prompt: int) -> int:
        """How many tokens the common protections may hold at once under ``budget``, for a prompt of that length."""
        recent = self.recent_for(budget)
        assert isinstance(recent, int)  # an int budget gives an int
        if self.protect_prompt is None:
            return self.sinks + recent
        if self.protect_prompt == "whole":
            return max(self.sinks, prompt) + recent
        share = share_of(self.protect_prompt, budget)
        return share + max(0, self.sinks - share // 2) + recent

    def layer_budgets(self, budget: int, layers: int, prompt: int | None = None) -> list[int]:
        """Tokens per KV head of each evicting layer, given the budget of an average layer.

        ``prompt`` is the prompt's length once it is known.
        """
        return [budget] * layers

    def at_once(self, budget: int | Tensor) -> int | Tensor:
        """How many tokens go together, at least, once ``budget`` (an int, or (B, 1, 1)) is outgrown."""
        return min(self.evict_every, budget) if isinstance(budget, int) else budget.clamp_max(self.evict_every)

    @property
    def one_by_one(self) -> bool:
        """Whether no more tokens go than must."""
        return type(self).at_once is Policy.at_once and self.evict_every == 1

    def admit(self, new: Held) -> None:
        """Called with the slots of the tokens that just arrived, before they are attended to."""
        return None

    def observe(self, held: Held, rows: Rows) -> None:
        """Called with the attention of this forward's last queries, in blocks, oldest first."""
        return None

    @abstractmethod
    def score(self, held: Held) -> Tensor:
        """Scores of the held tokens, higher means keep: (B, H, L), or (B, 1, L) for all heads alike."""


def check_option(policy: Policy, option: str, ok: bool, expected: str) -> None:
    """Raises OptionError naming the policy, the option, its value and what was expected."""
    if not ok:
        value = getattr(policy, option)
        raise OptionError(f"{type(policy).__name__}({option}={value!r}): expected {expected}")


@functools.lru_cache(maxsize=64)
def _least(policy: Policy) -> int:
    whole = policy.protect_prompt == "whole"
    limit = 100 * (2 * (policy.sinks + (policy.recent or 0)) + 2)

    def fits(budget: int) -> bool:
        protected = policy.sinks + int(policy.recent_for(budget)) if whole else policy.protected_tokens(budget, 0)
        return protected <= budget

    if policy.protect_prompt is None or whole:
        return next(filter(fits, range(1, limit)), limit)
    # shares of a budget round, so that a larger budget may fit less well than a smaller one
    return 1 + next((budget for budget in range(limit, 0, -1) if not fits(budget)), 0)
