"""The decode step of a full layer: one token comes, one goes, and nothing moves.

Once a layer without pads is full, most of what the general path works out at every forward stays the same: the views
of the slots in use, the budget, which sinks and prompt tokens never go. Here it is worked out once, and a step is
left with a few small writes. Whatever is unusual (pads, a mask, several tokens, drafts, another batch) leaves this
state first, and the general path goes on from where the layer stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvevict import selection
from kvevict.policies.base import Held, Policy

if TYPE_CHECKING:
    from kvevict.layer import EvictingLayer


@dataclass
class Ring:
    """Slots in order of age, for a policy that only looks at age: in all rows and heads the oldest token goes.

    slots: every slot whose token may go; the newest token always takes the place of the oldest, so that they go round.
    at:    index in ``slots`` of the free one, or of the newest token's while its forward is not over.
    owed:  how many of the newest tokens are not in the books yet.
    """

    slots: list[int]
    at: int = 0
    owed: int = 0

    @property
    def slot(self) -> int:
        """Where the next token goes, or where the newest went while its forward is not over."""
        return self.slots[self.at]

    def advance(self) -> None:
        """The oldest token goes."""
        self.at = (self.at + 1) % len(self.slots)

    def newest(self, done: bool) -> list[int]:
        """The slots of the tokens that are owed, newest first; ``done``: whether their forward is over."""
        return [self.slots[(self.at - done - back) % len(self.slots)] for back in range(min(self.owed, len(self.slots)))]


@dataclass
class Steady:
    """What stays the same while a layer takes one token after the other.

    held:     the slots in use; ``seen`` is brought up to date at each step.
    may_go:   (B, H, slots) bool, all but the sinks and prompt tokens that never go; None if there are none of those.
    recent:   how many of the newest tokens stay.
    newest:   (1, 1) the position of the newest token.
    columns:  the policy's columns as stored, with the number that a token begins with.
    ring:     the slots in turn, for a policy that only looks at age.
    marked:   whether the books say that the free slot is empty.
    unmasked: whether the attention was seen to use no mask.
    """

    held: Held
    may_go: Tensor | None
    recent: int
    newest: Tensor
    columns: list[tuple[Tensor, float]]
    ring: Ring | None
    marked: bool = True
    unmasked: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied layer finds its own way back

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def takes(self, layer: EvictingLayer, keys: Tensor) -> bool:
        """Whether these new keys (B, H, Q, D) are an ordinary step."""
        stored = layer.keys
        assert stored is not None
        ordinary = keys.shape[2] == 1 and keys.shape[0] == stored.shape[0] and keys.dtype == stored.dtype
        return ordinary and not (layer.pending or layer.reserved or keys.requires_grad)

    def arrive(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one token over the free slot; returns all keys, as a fresh view, and all values."""
        stored_keys, stored_values, ring = layer.keys, layer.values, self.ring
        assert stored_keys is not None and stored_values is not None
        column = layer.seen
        layer.seen = self.held.seen = column + 1
        layer.shortest += 1
        layer.fresh = 1
        layer.pending = True
        layer.arrived = self.newest.add_(1)
        if ring is not None:
            stored_keys.narrow(2, ring.slot, 1).copy_(keys)
            stored_values.narrow(2, ring.slot, 1).copy_(values)
            ring.owed += 1
            return stored_keys.narrow(2, 0, layer.slots), layer.used(stored_values)
        free = layer.slot_to_fill
        assert free is not None
        layer.landed, layer.slot_to_fill = free, None
        index = free.unsqueeze(-1)
        stored_keys.scatter_(2, index.expand_as(keys), keys)
        stored_values.scatter_(2, index.expand_as(values), values)
        self.held.positions.scatter_(2, free, column)
        self.marked = True
        for stored, fill in self.columns:
            extra = stored.dim() - 3
            place = free.view(*free.shape, *(1,) * extra).expand(-1, -1, 1, *stored.shape[3:]) if extra else free
            stored.scatter_(2, place, fill)
        return stored_keys.narrow(2, 0, layer.slots), layer.used(stored_values)

    def evict(self, layer: EvictingLayer, rescore: Callable[[Tensor], Tensor] | None) -> None:
        """Finds the slot of the token that goes."""
        if self.ring is not None:
            self.ring.advance()
            return
        scores = layer.scores(self.held)
        if rescore is not None:
            scores = rescore(scores)
        self.let_go(layer, self.choose(layer, scores))

    def choose(self, layer: EvictingLayer, scores: Tensor) -> Tensor:
        """The slot to free in each row and head, by scores (B, H, slots): (B, H, 1)."""
        positions, may_go = self.held.positions, self.may_go
        if self.recent:
            older = positions < layer.seen - self.recent
            may_go = older if may_go is None else older & may_go
        lowest, slot = selection.lowest_first(scores, positions, may_go)
        layer.check_lowest(lowest, scores)
        return slot

    def let_go(self, layer: EvictingLayer, slot: Tensor) -> None:
        """Frees a slot (B, H, 1). The books say so only when somebody asks: the next token overwrites it."""
        layer.landed, layer.slot_to_fill = None, slot
        self.marked = False

    def catch_up(self, layer: EvictingLayer) -> None:
        """Writes into the books what was left out of them."""
        ring, positions = self.ring, self.held.positions
        if ring is None:
            if not self.marked and not layer.pending:
                self.marked = True
                positions.scatter_(2, layer.slot_to_fill, -1)
            return
        if not ring.owed:
            return
        newest = ring.newest(done=not layer.pending)
        ring.owed = 0
        back = torch.arange(len(newest), device=positions.device)
        positions[:, :, torch.tensor(newest, device=positions.device)] = layer.seen - 1 - back
        index = torch.full((*positions.shape[:2], 1), ring.slot, device=positions.device)
        if layer.pending:
            layer.landed, layer.slot_to_fill = index, None
        else:
            positions[:, :, ring.slot] = -1
            layer.landed, layer.slot_to_fill = None, index


def begin(layer: EvictingLayer) -> Steady | None:
    """The steady state of a layer that has just evicted one token, or None if something about it is unusual."""
    spec, policy = layer.spec, layer.spec.policy
    usual = layer.row_seen is None and layer.tokens is None and not (layer.gaps or layer.dead or layer.record_past)
    ready = layer.free is not None and layer.unmasked and layer.prompt is not None and layer.draft is None
    plain = spec.rerotation is None and spec.one_by_one and type(policy).admit is Policy.admit
    if not (usual and ready and plain and isinstance(spec.budget, int)):
        return None
    held = layer.held()
    stay = selection.protected(
        held.positions,
        seen=0,
        sinks=policy.sinks,
        recent=0,
        prompt=held.prompt,
        ends=policy.prompt_ends(held.budget, held.prompt),
    )
    recent = policy.recent_for(held.budget)
    assert isinstance(recent, int)  # an int budget gives an int
    return Steady(
        held=held,
        may_go=None if stay is None else ~stay,
        recent=recent,
        newest=torch.full((1, 1), layer.seen - 1, device=held.positions.device),
        columns=[(held.columns[name], column.fill) for name, column in layer.columns.items()],
        ring=_ring(held, stay) if spec.by_age else None,
    )


def _ring(held: Held, stay: Tensor | None) -> Ring:
    """The slots in order of age, the free one first. Rows and heads hold the same tokens: any one will do."""
    positions = held.positions[0, 0]
    order = positions.argsort().tolist()
    staying = set() if stay is None else set(stay[0, 0].nonzero()[:, 0].tolist())
    return Ring([slot for slot in order if slot not in staying])
