"""What the evicting layers of one cache share: the policy, the budget, and what each layer gets of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvevict.errors import PolicyError
from kvevict.policies.base import Policy, at_least, share_of
from kvevict.rope import Rerotation

UNBOUNDED = 2**62


@dataclass
class Spec:
    """What all evicting layers of one cache share. Holds no tensors of the cache and no layer."""

    policy: Policy
    budget: int | float
    layers: int
    rerotation: Rerotation | None = None
    no_drafts: str | None = None  # why drafts cannot be verified token by token
    _tokens: dict[tuple[int, int | None], list[int]] = field(default_factory=dict, repr=False)

    def average(self, seen: int) -> int:
        """The budget of an average layer after ``seen`` tokens."""
        if isinstance(self.budget, int):
            return self.budget
        return at_least(share_of(self.budget, seen), self.policy.least())

    def tokens(self, layer: int, seen: int, prompt: int | None) -> int:
        """Tokens per KV head that ``layer`` may keep after ``seen`` tokens.

        While no more than an average budget was seen, nothing goes, whatever the layer's share of the total.
        """
        if not self.policy.evicts:
            return UNBOUNDED
        average = self.average(seen)
        own = self._layer_budgets(average, prompt)[layer]
        return own if seen > average else max(own, average)

    def _layer_budgets(self, average: int, prompt: int | None) -> list[int]:
        key = (average, prompt if self.policy.prompt_sets_budgets else None)
        if key not in self._tokens:
            if not isinstance(self.budget, int):
                self._tokens.clear()  # a share of what was seen grows for ever: remember only the current one
            budgets = self.policy.layer_budgets(average, self.layers, key[1])
            if len(budgets) != self.layers or not all(type(each) is int and each >= 1 for each in budgets):
                raise PolicyError(
                    f"policy {self.policy.name!r} gave the layer budgets {budgets}: layer_budgets() must return "
                    f"{self.layers} ints of at least 1, one for each layer that evicts"
                )
            if self.policy.prompt_sets_budgets:
                budgets = [max(each, self.policy.least()) for each in budgets]
            self._tokens[key] = budgets
        return self._tokens[key]

    @property
    def one_by_one(self) -> bool:
        """Whether no more tokens go than must."""
        return self.policy.one_by_one or not self.policy.evicts

    @functools.cached_property
    def by_age(self) -> bool:
        """Whether the policy's score is the position and nothing else, so that the oldest goes."""
        return self._says("by_age")

    @functools.cached_property
    def stacks(self) -> bool:
        """Whether layers may be shown to the policy stacked as the rows of one batch."""
        return self._says("stacks")

    def _says(self, name: str) -> bool:
        """Whether the policy's class says ``name``, and no subclass has overridden since what that may rest on.

        That is what the policy is asked for tokens and scores, and whatever the class that says it has defined itself.
        """
        kinds = type(self.policy).__mro__
        owner = next(kind for kind in kinds if name in vars(kind))
        own = {each for kind in owner.__mro__ if kind not in Policy.__mro__ for each in _methods(kind)}
        since = {each for kind in kinds[: kinds.index(owner)] for each in _methods(kind)}
        return bool(getattr(self.policy, name)) and not since & (own | {"admit", "observe", "score", "columns"})

    @property
    def uniform(self) -> bool:
        """Whether every layer gets the same budget."""
        return type(self.policy).layer_budgets is Policy.layer_budgets

    @property
    def irregular(self) -> bool:
        """Whether a longer row's budget may be the smaller one."""
        policy = self.policy
        return policy.evicts and not self.uniform and (policy.prompt_sets_budgets or not isinstance(self.budget, int))

    @property
    def varies(self) -> bool:
        """Whether rows of different length have different budgets."""
        return self.policy.evicts and not (self.uniform and isinstance(self.budget, int))

    def row_tokens(self, layer: int, seen: Tensor, prompt: Tensor) -> Tensor:
        """``tokens`` for each row: seen, prompt and the result are (B,) int64."""
        if not isinstance(self.budget, int) and self.uniform:
            return at_least(share_of(self.budget, seen), self.policy.least())
        if isinstance(self.budget, int) and not self.policy.prompt_sets_budgets:
            own = self._layer_budgets(self.budget, None)[layer]
            return torch.where(seen > self.budget, own, max(own, self.budget))
        # Only PyramidKV under a share of the tokens seen, or with its authors' rounding, comes here.
        rows = zip(seen.tolist(), prompt.tolist(), strict=True)
        return torch.tensor([self.tokens(layer, s, p) for s, p in rows], device=seen.device)


def _methods(kind: type) -> set[str]:
    """Names of the methods and properties that a class defines itself, those that Python looks for left out."""
    given = vars(kind).items()
    return {
        name for name, value in given if not name.startswith("__") and (callable(value) or hasattr(value, "__get__"))
    }
