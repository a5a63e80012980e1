"""The decode step of a full layer: one token comes, one goes, and nothing moves.

Once a layer without pads is full, most of what the general path works out at every forward stays the same: the views
of the slots in use, the budget, which sinks and prompt tokens never go. Here it is worked out once, and a step is
left with a few small writes. Whatever is unusual (pads, a mask, several tokens, drafts, another batch) leaves this
state first, and the general path goes on from where the layer stands.

    Ring    the policy looks at age alone: the slots are filled in turn
    Alone   any other policy, layer by layer
    Member  layers whose policy treats every row alike decide together, a Choir of a few layers at a time, because a
            small tensor operation costs as much for many layers as for one
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvevict import selection
from kvevict.eviction import Rescore
from kvevict.inference import outside_inference_mode
from kvevict.policies.base import Held, Rows
from kvevict.statistics import attend

if TYPE_CHECKING:
    from kvevict.layer import EvictingLayer

TOGETHER = 16
"""Layers that decide together. Their attention is kept until the last one's is there: 1 to 2 % of the cache."""


class Steady:
    """How a layer takes one token after the other.

    unmasked: whether the attention of the last step was seen to use no mask.
    """

    unmasked = False

    def takes(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> bool:
        """Whether these new keys and values (B, H, Q, D) are an ordinary step."""
        stored = layer.keys
        assert stored is not None and layer.values is not None
        ordinary = keys.shape[2] == 1 and keys.shape[0] == stored.shape[0] and not (layer.pending or layer.reserved)
        same = keys.dtype == stored.dtype and values.dtype == layer.values.dtype  # autocast may change either
        return ordinary and same and not (keys.requires_grad or values.requires_grad)

    def arrive(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one token over the free slot; returns all keys, as a fresh view, and all values."""
        layer.seen += 1
        layer.shortest += 1
        layer.fresh = 1
        layer.pending = True
        self.write(layer, keys, values)
        assert layer.keys is not None and layer.values is not None
        return layer.keys.narrow(2, 0, layer.slots), layer.used(layer.values)

    def write(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        """Puts one token where the free slot is."""
        raise NotImplementedError

    def observe(self, layer: EvictingLayer, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Shows the policy the attention of the newest token."""

    def settle(self, layer: EvictingLayer, rescore: Rescore | None) -> None:
        """Finds the slot of the token that goes."""
        raise NotImplementedError

    def catch_up(self, layer: EvictingLayer) -> None:
        """Writes into the layer's books what was left out of them."""
        raise NotImplementedError

    @outside_inference_mode
    def leave(self, layer: EvictingLayer) -> None:
        """Ends the steady state, of this layer and of those that decide together with it."""
        self.catch_up(layer)
        if layer.pending:
            layer.arrived = torch.full((1, 1), layer.seen - 1, device=layer.device)
        layer.steady = None

    def tensors(self) -> list[Tensor]:
        """What is kept beside the layer's own tensors."""
        return []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied layer finds its own way back

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


# -- by age ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ring(Steady):
    """Slots in order of age: in all rows and heads the oldest token goes, and the newest takes its place.

    slots: every slot whose token may go, so that they go round.
    at:    index in ``slots`` of the free one, or of the newest token's while its forward is not over.
    owed:  how many of the newest tokens are not in the books yet.
    marked: whether the books know which slot is free, or the newest token's.
    """

    slots: list[int]
    at: int = 0
    owed: int = 0
    marked: bool = True

    def write(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        assert layer.keys is not None and layer.values is not None
        slot = self.slots[self.at]
        layer.keys.narrow(2, slot, 1).copy_(keys)
        layer.values.narrow(2, slot, 1).copy_(values)
        self.owed += 1
        self.marked = False

    def settle(self, layer: EvictingLayer, rescore: Rescore | None) -> None:
        self.at = (self.at + 1) % len(self.slots)
        layer.pending = self.marked = False

    @outside_inference_mode
    def catch_up(self, layer: EvictingLayer) -> None:
        if self.marked:
            return
        positions = layer.booked(layer.slots)
        newest = self.at - (not layer.pending)
        slots = [self.slots[(newest - back) % len(self.slots)] for back in range(min(self.owed, len(self.slots)))]
        self.owed, self.marked = 0, True
        back = torch.arange(len(slots), device=positions.device)
        positions[:, :, torch.tensor(slots, dtype=torch.long, device=positions.device)] = layer.seen - 1 - back
        here = torch.full((*positions.shape[:2], 1), self.slots[self.at], device=positions.device)
        if layer.pending:
            layer.landed, layer.slot_to_fill = here, None
        else:
            positions.scatter_(2, here, -1)
            layer.landed, layer.slot_to_fill = None, here


def _ring(held: Held, stay: Tensor | None) -> Ring:
    """The slots in order of age, the free one first. Rows and heads hold the same tokens: any one will do."""
    order = held.positions[0, 0].argsort().tolist()
    staying = set() if stay is None else set(stay[0, 0].nonzero()[:, 0].tolist())
    return Ring([slot for slot in order if slot not in staying])


# -- by score --------------------------------------------------------------------------------------------------


@dataclass
class Full(Held):
    """Slots that are all in use, of which one at a time gets a new token: their order need not be sorted every time.

    order: (B, H, L + 1) slots from the oldest token to the newest, and a last one to spare; None until asked for.
    """

    order: Tensor | None = field(default=None, init=False)  # a narrowed view has another

    def oldest_first(self) -> Tensor:
        if self.order is None:
            ranked = super().oldest_first()
            self.order = torch.cat([ranked, ranked[..., :1]], -1)
        return self.order[..., :-1]

    def arrive(self, slot: Tensor) -> None:
        """The newest token is in ``slot`` (B, H, 1), whatever was there before."""
        assert isinstance(self.seen, int)
        self.positions.scatter_(2, slot, self.seen - 1)
        if self.order is None:
            return
        order, later = self.order[..., :-1], self.order[..., 1:]
        left = (order == slot).to(torch.uint8).argmax(-1, keepdim=True)  # (B, H, 1), the rank that was left
        ranks = torch.arange(order.shape[-1], device=order.device)
        order.copy_(torch.where(ranks < left, order, later))
        order[..., -1:].copy_(slot)


@dataclass(eq=False)
class Choice:
    """What a choice needs every time: of one layer, or of several stacked as rows.

    held:    the slots in use; ``seen`` is brought up to date at each step.
    may_go:  (B, H, slots) bool, all but the sinks and prompt tokens that never go; None if there are none of those.
    columns: the policy's columns as stored, with the number that a token begins with.
    newest:  (B, H, recent) slots of the newest tokens, which stay: position p is at p % recent. None if all may go.
    guard:   (B, H, slots) float32, -inf for tokens that may go now and inf for the others; None if all may.
    """

    held: Full
    may_go: Tensor | None
    columns: list[tuple[Tensor, float]]
    newest: Tensor | None = None
    guard: Tensor | None = None

    @classmethod
    def of(cls, held: Full, may_go: Tensor | None, recent: int, columns: list[tuple[Tensor, float]]) -> Choice:
        """Of one layer as it stands, where the ``recent`` newest tokens stay."""
        if not recent and may_go is None:
            return cls(held, None, columns)
        guard = torch.full(held.positions.shape, float("-inf"), device=held.positions.device)
        if may_go is not None:
            guard.masked_fill_(~may_go, float("inf"))
        if not recent:
            return cls(held, may_go, columns, None, guard)
        positions, slots = held.positions.topk(recent)  # the newest first
        guard.scatter_(2, slots, float("inf"))
        return cls(held, may_go, columns, torch.empty_like(slots).scatter_(2, positions % recent, slots), guard)

    @classmethod
    def stacked(cls, held: Full, columns: list[tuple[Tensor, float]], choices: Sequence[Choice]) -> Choice:
        """Of several layers that are alike, whose books ``held`` and ``columns`` are."""

        def rows(name: str) -> Tensor | None:
            found = [getattr(each, name) for each in choices]
            return None if found[0] is None else torch.cat(found)

        return cls(held, rows("may_go"), columns, rows("newest"), rows("guard"))

    def book(self, slot: Tensor) -> None:
        """The newest token is in ``slot`` (B, H, 1) now, and its columns begin."""
        self.held.arrive(slot)
        for stored, fill in self.columns:
            stored.scatter_(2, selection.per_slot(slot, stored), fill)
        if self.newest is None or self.guard is None:
            return
        assert isinstance(self.held.seen, int)
        ages = self.newest.narrow(2, (self.held.seen - 1) % self.newest.shape[2], 1)  # (B, H, 1)
        if self.may_go is None:
            self.guard.scatter_(2, ages, float("-inf"))
        else:
            lets = torch.where(self.may_go.gather(2, ages), float("-inf"), float("inf"))
            self.guard.scatter_(2, ages, lets)
        self.guard.scatter_(2, slot, float("inf"))
        ages.copy_(slot)

    def slot(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The slot to free, (B, H, 1), and the lowest score of those that may go, by scores (B, H | 1, slots)."""
        if self.guard is None:
            lowest, slot = selection.lowest_first(scores, self.held.positions, None)
        else:
            lowest, slot = selection.lowest_guarded(scores, self.held.positions, self.guard)
        return slot, lowest

    def tensors(self) -> list[Tensor]:
        """What is kept beside the layers' own tensors."""
        return [each for each in (self.may_go, self.newest, self.guard, self.held.order) if each is not None]


@dataclass(eq=False)
class Alone(Steady):
    """One layer that decides for itself.

    newest: (1, 1) the position of the newest token.
    group:  query heads of each KV head, once attention was seen.
    marked: whether the books say that the free slot is empty.
    """

    choice: Choice
    newest: Tensor
    group: int = 0
    marked: bool = True

    def write(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        slot = layer.slot_to_fill
        assert slot is not None and layer.keys is not None and layer.values is not None
        layer.arrived = self.newest = self.newest + 1  # a new tensor: a policy may have kept the last one
        layer.landed, layer.slot_to_fill = slot, None
        layer.keys.scatter_(2, selection.per_slot(slot, layer.keys), keys)
        layer.values.scatter_(2, selection.per_slot(slot, layer.values), values)
        self.choice.held.seen = layer.seen
        self.choice.book(slot)
        self.marked = True
        layer.admit()

    def observe(self, layer: EvictingLayer, blocks: Iterable[tuple[int, Tensor]]) -> None:
        for _, weights in blocks:
            self.group = weights.shape[2]
            newest = self.newest.expand(weights.shape[0], 1)
            layer.spec.policy.observe(self.choice.held, Rows(weights, newest, decode=layer.spec.uniform))

    def settle(self, layer: EvictingLayer, rescore: Rescore | None) -> None:
        scores = layer.scores(self.choice.held)
        if rescore is not None:
            scores = rescore(scores)
        slot, lowest = self.choice.slot(scores)
        layer.check_lowest(lowest, scores)
        layer.landed, layer.slot_to_fill = None, slot
        layer.pending = self.marked = False

    def catch_up(self, layer: EvictingLayer) -> None:
        if not self.marked and not layer.pending:
            assert layer.slot_to_fill is not None
            layer.booked(layer.slots).scatter_(2, layer.slot_to_fill, -1)
        self.marked = True

    def tensors(self) -> list[Tensor]:
        return [self.newest, *self.choice.tensors()]


@dataclass(eq=False)
class Member(Steady):
    """One layer of a choir.

    number: which one of the choir's layers.
    last:   whether it is the last one.
    keys, values: (B * H, D, slots) and (B * H, slots, D), views of what the layer stores.
    index:  (B, H, 1, D) the slot to fill, once for each number of a key.
    owes:   what the books lack: that the newest token has come, or that the free slot is empty.
    """

    choir: weakref.ref[Choir]
    number: int
    last: bool
    keys: Tensor
    values: Tensor
    index: Tensor
    owes: str = ""

    def write(self, layer: EvictingLayer, keys: Tensor, values: Tensor) -> None:
        assert layer.keys is not None and layer.values is not None
        index = self.index if values.shape == keys.shape else self.index[..., :1].expand_as(values)
        layer.keys.scatter_(2, self.index, keys)
        layer.values.scatter_(2, index, values)
        layer.landed, layer.slot_to_fill = layer.slot_to_fill, None
        self.owes = "arrival"

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Attention over all slots for one query (B, heads, 1, D), heard by the choir: (B, 1, heads, D)."""
        choir = self._choir()
        output, _ = attend(query, self.keys, self.values, scaling, choir.attention[self.number])
        choir.hear(self.number)
        return output

    def observe(self, layer: EvictingLayer, blocks: Iterable[tuple[int, Tensor]]) -> None:
        for _, weights in blocks:
            choir = self._choir()
            room = choir.attention[self.number]
            room.copy_(weights.reshape(room.shape))
            choir.hear(self.number)

    def settle(self, layer: EvictingLayer, rescore: Rescore | None) -> None:
        if self.last:
            self._choir().evict()

    def catch_up(self, layer: EvictingLayer) -> None:
        positions = layer.booked(layer.slots)
        if self.owes == "arrival":
            assert layer.landed is not None
            layer.book(layer.landed)
        elif self.owes == "departure":
            assert layer.slot_to_fill is not None
            positions.scatter_(2, layer.slot_to_fill, -1)
        self.owes = ""

    def leave(self, layer: EvictingLayer) -> None:
        self._choir().dissolve()

    def tensors(self) -> list[Tensor]:
        return self._choir().tensors()

    def _choir(self) -> Choir:
        choir = self.choir()
        assert choir is not None, "the cache that keeps the choir is gone"
        return choir


@dataclass(eq=False)
class Choir:
    """A few layers of one cache that decide together, stacked as the rows of one batch.

    layers:    the layers, in order.
    choice:    of all of them; rows are (layer, row of the batch).
    attention: (layers, B * H, G, slots) float32, of this step.
    slot:      (layers * B, H, 1) where the newest tokens went, or will go.
    head_size: numbers of a key.
    heard:     how many layers' attention is there.
    """

    layers: list[EvictingLayer]
    choice: Choice
    attention: Tensor
    slot: Tensor
    head_size: int
    heard: int = 0

    def sings(self) -> bool:
        """Whether it was not dissolved."""
        return bool(vars(self))

    def hear(self, number: int) -> None:
        """The attention of one layer is there; after the last one's, the policy is shown all of it."""
        self.heard = number + 1
        if self.heard < len(self.layers):
            return
        first, held = self.layers[0], self.choice.held
        held.seen = first.seen
        self.choice.book(self.slot)
        for layer in self.layers:
            assert isinstance(layer.steady, Member)
            layer.steady.owes = ""
        rows, H, slots = held.positions.shape
        newest = torch.full((1, 1), first.seen - 1, device=held.positions.device)
        weights = self.attention.view(rows, H, -1, 1, slots)
        shown = Rows(weights, newest.expand(rows, 1), decode=first.spec.uniform)
        first.spec.policy.observe(held, shown)

    def scores(self) -> Tensor:
        """The policy's scores, (layers * B, H | 1, slots)."""
        return self.layers[0].scores(self.choice.held)

    def evict(self, scores: Tensor | None = None) -> None:
        """Frees a slot in each layer, row and head."""
        scores = self.scores() if scores is None else scores
        slot, lowest = self.choice.slot(scores)
        self._check(lowest, scores)
        self.free(slot)

    def _check(self, lowest: Tensor, scores: Tensor) -> None:
        """Raises PolicyError for the layer whose score is NaN. See ``EvictingLayer.check_scores``."""
        if lowest.device.type != "cpu":
            self.layers[0].check_lowest(lowest, scores)  # only remembered here
        elif lowest.dtype.is_floating_point and bool(lowest.isnan().any()):
            for layer, own in zip(self.layers, scores.chunk(len(self.layers)), strict=True):
                layer.check_scores(own)

    def votes(self) -> Tensor:
        """How many heads of how many layers would let go of each slot: (B, slots) int64."""
        scores = self.scores()
        slot, lowest = self.choice.slot(scores)
        self._check(lowest, scores)
        batch = self.choice.held.positions.shape[0] // len(self.layers)
        slot = slot.view(len(self.layers), batch, -1).transpose(0, 1).reshape(batch, -1)  # (B, layers * H)
        votes = torch.zeros(batch, self.choice.held.positions.shape[2], dtype=torch.long, device=slot.device)
        return votes.scatter_add_(1, slot, torch.ones_like(slot))

    def free(self, slot: Tensor) -> None:
        """Frees ``slot`` (layers * B, H, 1). The books say so only when somebody asks: the next token overwrites it."""
        self.slot = slot
        self.heard = 0
        each = slot.view(len(self.layers), -1, *slot.shape[1:])  # (layers, B, H, 1)
        wide = each.unsqueeze(-1).expand(*each.shape, self.head_size)
        for layer, own, index in zip(self.layers, each.unbind(), wide.unbind(), strict=True):
            member = layer.steady
            assert isinstance(member, Member)
            member.index, member.owes = index, "departure"
            layer.landed, layer.slot_to_fill, layer.pending = None, own, False

    def dissolve(self) -> None:
        """Every layer goes back to the general path; those whose attention was heard already are settled there."""
        layers, heard, attention = self.layers, self.heard, self.attention
        for layer in layers:
            assert isinstance(layer.steady, Member)
            Steady.leave(layer.steady, layer)
        vars(self).clear()  # the cache may hold this empty shell for a while
        if heard == len(layers):
            return  # the policy has seen all of it
        for layer, weights in zip(layers[:heard], attention, strict=False):
            if layer.pending:
                layer.observe([(0, weights.view(-1, layer.kv_heads, weights.shape[1], 1, layer.slots))])
                if not layer.spec.policy.consensus:
                    layer.settle()

    def tensors(self) -> list[Tensor]:
        """What is kept beside the layers' own tensors."""
        return [self.attention, self.slot, *self.choice.tensors()]


# -- how it begins ---------------------------------------------------------------------------------------------


def begin(layer: EvictingLayer) -> Steady | None:
    """The steady state of a layer that has just evicted one token, or None if something about it is unusual."""
    spec, policy = layer.spec, layer.spec.policy
    usual = (
        layer.stays_put
        and layer.row_seen is None
        and layer.tokens is None
        and not (layer.gaps or layer.dead or layer.record_past)
    )
    ready = layer.free is not None and layer.unmasked and layer.prompt is not None and layer.draft is None
    if not (usual and ready and spec.rerotation is None and spec.one_by_one and isinstance(spec.budget, int)):
        return None
    held = Full(**vars(layer.held()))
    stay = selection.protected(
        held.positions,
        seen=0,
        sinks=policy.sinks,
        recent=0,
        prompt=held.prompt,
        ends=policy.prompt_ends(held.budget, held.prompt),
    )
    if spec.by_age:
        return _ring(held, stay)
    recent = policy.recent_for(held.budget)
    assert isinstance(recent, int)  # an int budget gives an int
    columns = [(held.columns[name], column.fill) for name, column in layer.columns.items()]
    choice = Choice.of(held, None if stay is None else ~stay, recent, columns)
    return Alone(choice, torch.full((1, 1), layer.seen - 1, device=held.positions.device))


@outside_inference_mode
def gather(layers: list[EvictingLayer]) -> list[Choir]:
    """Choirs of those neighbouring layers that stand alone and are alike."""
    choirs: list[Choir] = []
    room: Tensor | None = None
    for alike, group in groupby(layers, _likeness):
        members = list(group)
        for first in range(0, len(members), TOGETHER):
            some = members[first : first + TOGETHER]
            if alike is None:
                continue
            (B, H, slots), G, device, _ = alike
            fits = room is not None and room.shape[1:] == (B * H, G, slots) and room.device == device
            if room is None or not fits or len(room) < len(some):
                room = torch.empty(len(some), B * H, G, slots, device=device)
            choirs.append(_choir(some, room[: len(some)]))
    return choirs


def _likeness(layer: EvictingLayer) -> tuple[torch.Size, int, torch.device, int] | None:
    """What layers must have in common to be stacked, or None for one that cannot be (yet)."""
    if not isinstance(layer.steady, Alone) or not layer.steady.group or layer.pending:
        return None
    return layer.slot_positions.shape, layer.steady.group, layer.device, layer.seen


def _stacked(columns: list[Tensor]) -> Tensor:
    """Columns (B, H, L, ...) of one kind: (layers, B, H, L, ...). Further dimensions come first in memory.

    What a query gives to all tokens lies together then.
    """
    further = columns[0].dim() - 3
    if not further:
        return torch.stack(columns)
    ahead, behind = tuple(range(further)), tuple(range(-further, 0))
    return torch.stack([column.movedim(behind, ahead) for column in columns], further).movedim(ahead, behind)


def _choir(layers: list[EvictingLayer], room: Tensor) -> Choir:
    """Stacks the books of ``layers``, which become views of the stack."""
    alone = [layer.steady for layer in layers]
    choices = [each.choice for each in alone if isinstance(each, Alone)]
    names = list(choices[0].held.columns)
    slot = torch.cat([layer.free for layer in layers if layer.free is not None])
    positions = torch.stack([choice.held.positions for choice in choices])
    columns = {name: _stacked([choice.held.columns[name] for choice in choices]) for name in names}
    held = choices[0].held
    stacked = Full(
        positions=positions.flatten(0, 1),
        seen=held.seen,
        budget=held.budget,
        prompt=held.prompt,
        layers=held.layers,
        columns={name: column.flatten(0, 1) for name, column in columns.items()},
    )
    fills = [fill for _, fill in choices[0].columns]
    begins = list(zip(stacked.columns.values(), fills, strict=True))
    assert layers[0].keys is not None
    head_size = layers[0].keys.shape[-1]
    choir = Choir(layers, Choice.stacked(stacked, begins, choices), room, slot, head_size)
    for number, layer in enumerate(layers):
        layer.move_books(positions[number], {name: column[number] for name, column in columns.items()})
        assert held.keys is not None and layer.keys is not None and layer.values is not None
        keys, values = (layer.used(each).flatten(0, 1) for each in (layer.keys, layer.values))
        last = number == len(layers) - 1
        layer.steady = Member(weakref.ref(choir), number, last, keys.transpose(1, 2), values, slot)
    choir.free(slot)
    return choir
