"""The books of one attention layer: its tensors, which token is in which slot, and how many were seen.

A slot is one token of one KV head, written in place. Slots are in no order; ``positions`` says what is in each. New
tokens take the free slot or new ones at the end, and ``compact`` gathers those that stay into new tensors, so that the
old ones are really freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvevict import selection
from kvevict.inference import outside_inference_mode
from kvevict.policies.base import Column, Held
from kvevict.spec import Spec

if TYPE_CHECKING:
    from kvevict.steady import Steady


class Books(CacheLayerMixin):
    """What a layer holds and knows. It changes when an ``EvictingLayer`` says so, and decides nothing.

    keys, values: (B, H, capacity, D); only the first ``slots`` are in use.
    """

    def __init__(self, spec: Spec, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not annotate it
        self.spec = spec
        self.index = index
        self.clear()

    def clear(self) -> None:
        """Holds and knows nothing."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False
        self.steady: Steady | None = None  # while decode steps are all alike
        self._positions: Tensor | None = None
        self.tokens: Tensor | None = None  # (B, H, capacity) column in the host's mask; None: equal to positions
        self.state: dict[str, Tensor] = {}  # the policy's columns, (B, H, capacity, ...)
        self.slots = 0
        self.seen = 0  # columns: pads count, as they do for transformers
        self.prompt: int | None = None  # columns of the prompt, once it is over
        self.row_seen: Tensor | None = None  # (B,) real tokens; None: no pads so far
        self.row_prompt: Tensor | None = None
        self.shortest = 0  # real tokens of the row that has fewest
        self.arrived: Tensor | None = None  # (B | 1, Q) positions of the newest forward's tokens, -1 for pads
        self.fresh = 0  # tokens of the newest forward
        self.slot_to_fill: Tensor | None = None  # what `free` gives, but for what the steady state has not booked yet
        self.landed: Tensor | None = None  # (B, H, 1) where the newest token went, when it went into `free`
        self.ordered = True  # slot i still holds column i
        self.gaps = False  # some slots in use may be empty
        self.dead = 0  # slots known to be empty in every row and head, left behind by a forward of several tokens
        self._bound: tuple[int, int | None, int] = (-1, None, 0)  # what `bound` gave for these tokens seen and prompt

    def catch_up(self) -> None:
        """Books what the steady state still owes."""
        raise NotImplementedError

    def leave_steady(self) -> None:
        """Back to the general path, with the books up to date."""
        raise NotImplementedError

    @property
    def positions(self) -> Tensor | None:
        """(B, H, capacity) rank among the row's real tokens, -1 = empty."""
        if self.steady is not None:
            self.catch_up()
        return self._positions

    @positions.setter
    def positions(self, positions: Tensor | None) -> None:
        self.leave_steady()
        self._positions = positions

    @property
    def free(self) -> Tensor | None:
        """(B, H, 1) one empty slot in every row and head."""
        if self.steady is not None:
            self.catch_up()
        return self.slot_to_fill

    @free.setter
    def free(self, slot: Tensor | None) -> None:
        self.leave_steady()
        self.slot_to_fill = slot

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the books as they should be."""
        if self.steady is not None:
            self.catch_up()
        return vars(self).copy()

    def move_books(self, positions: Tensor, state: dict[str, Tensor]) -> None:
        """Keeps its books in these tensors, which say the same, from now on."""
        self._positions, self.state = positions, state

    def book(self, slot: Tensor) -> None:
        """The newest token of an unpadded layer is in ``slot`` (B, H, 1) now, and the policy's columns begin."""
        assert self._positions is not None
        self._positions.scatter_(2, slot, self.seen - 1)
        self._begin_columns(slot)

    def _begin_columns(self, slot: Tensor) -> None:
        for name, column in self.columns.items():
            state = self.state[name]
            state.scatter_(2, selection.per_slot(slot, state), column.fill)

    def booked(self, slots: int) -> Tensor:
        """Positions of the first ``slots`` slots, in use or not: (B, H, slots)."""
        assert self._positions is not None
        return self._positions[:, :, :slots]

    @outside_inference_mode
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates nothing but the shapes; memory grows with the tokens that come."""
        batch, heads = key_states.shape[:2]
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0].contiguous(), value_states[:, :, :0].contiguous()
        self.positions = torch.empty(batch, heads, 0, dtype=torch.long, device=self.device)
        self.state = {
            name: torch.empty(batch, heads, 0, *column.shape, dtype=column.dtype or torch.float32, device=self.device)
            for name, column in self.columns.items()
        }
        self.is_initialized = True

    @property
    def columns(self) -> dict[str, Column]:
        """What the policy keeps for every token."""
        return self.spec.policy.columns(min(self.bound(), 2**31))

    # -- sizes ---------------------------------------------------------------------------------------------------

    def bound(self) -> int:
        """Tokens per KV head that may stay now: the largest over rows."""
        if self.row_seen is not None and self.spec.irregular:
            return int(self._row_budgets().max())
        if self.row_seen is None and self._bound[:2] == (self.seen, self.prompt):
            return self._bound[2]
        prompt = self.seen if self.prompt is None else self.prompt
        longest = self.spec.tokens(self.index, self.seen, prompt)
        if self.row_seen is not None:
            return max(longest, self.spec.tokens(self.index, self.shortest, prompt))
        self._bound = (self.seen, self.prompt, longest)
        return longest

    @property
    def stored(self) -> int:
        """Most tokens that any row and head may hold now."""
        return self.slots - self.dead - (1 if self.free is not None else 0)

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer keeps alive."""
        named = (self.keys, self.values, self.positions, self.tokens, self.row_seen, self.row_prompt)
        beside = [] if self.steady is None else self.steady.tensors()
        loose = (self.arrived, self.free, self.landed)
        return [t for t in (*named, *loose, *self.state.values(), *beside) if t is not None]

    def kept_positions(self) -> Tensor:
        """Positions still held, ascending, -1 after the end of shorter rows: (B, H, L) int64."""
        if self.positions is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        held = self.positions[:, :, : self.slots]
        last = torch.iinfo(held.dtype).max
        held = held.masked_fill(held < 0, last).sort(-1).values
        longest = int((held != last).sum(-1).max()) if held.numel() else 0
        return held[:, :, :longest].masked_fill(held[:, :, :longest] == last, -1)

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have, as stored."""
        assert self.positions is not None
        return self.positions.shape[1]

    @property
    def slot_positions(self) -> Tensor:
        """(B, H, slots) positions of the slots in use, -1 for empty ones."""
        assert self.positions is not None
        return self.used(self.positions)

    @property
    def uneven(self) -> bool:
        """Whether rows may have to evict different numbers of tokens."""
        return self.row_seen is not None and (self.spec.varies or not self.spec.one_by_one)

    def held(self) -> Held:
        """What the policy may see, through views of the slots in use."""
        assert self.positions is not None and self.keys is not None and self.values is not None
        seen: int | Tensor = self.seen
        prompt: int | Tensor = self.seen if self.prompt is None else self.prompt
        budget: int | Tensor = min(self.bound(), 2**31)
        if self.row_seen is not None:
            seen = self.row_seen[:, None, None]
            prompt = seen if self.row_prompt is None else self.row_prompt[:, None, None]
            if self.uneven:
                budget = self._row_budgets()[:, None, None]
        return Held(
            positions=self.used(self.positions),
            seen=seen,
            budget=budget,
            prompt=prompt,
            keys=self.used(self.keys),
            values=self.used(self.values),
            layer=self.index,
            layers=self.spec.layers,
            columns={name: self.used(column) for name, column in self.state.items()},
        )

    def used(self, tensor: Tensor) -> Tensor:
        """The slots in use of a tensor (B, H, capacity, ...); no view is made where all are."""
        return tensor if tensor.shape[2] == self.slots else tensor.narrow(2, 0, self.slots)

    def _row_budgets(self) -> Tensor:
        assert self.row_seen is not None
        prompt = self.row_seen if self.row_prompt is None else self.row_prompt
        return self.spec.row_tokens(self.index, self.row_seen, prompt)

    # -- slots ---------------------------------------------------------------------------------------------------

    def write(self, stored: Tensor, new: Tensor) -> None:
        """Puts the newest tokens' values (broadcast to (B, H, Q, ...)) where they were placed."""
        if self.landed is None:
            stored[:, :, self.slots - self.fresh : self.slots] = new
            return
        index = selection.per_slot(self.landed, stored)
        stored.scatter_(2, index, (new if new.shape == index.shape else new.expand_as(index)).to(stored.dtype))

    def give_up_free(self) -> None:
        """The free slot, if there is one, stays empty among those in use."""
        if self.free is not None:
            self.gaps, self.free = True, None
            self.dead += 1

    def grow(self, needed: int) -> None:
        """Makes room for ``needed`` slots in every per-slot tensor but keys and values."""
        assert self.positions is not None
        if self.positions.shape[2] >= needed:
            return
        capacity = self._capacity(needed)
        self.positions = _resized(self.positions, self.slots, capacity, -1)
        if self.tokens is not None:
            self.tokens = _resized(self.tokens, self.slots, capacity, -1)
        columns = self.columns
        self.state = {n: _resized(t, self.slots, capacity, columns[n].fill) for n, t in self.state.items()}

    def _capacity(self, needed: int) -> int:
        """Doubles up to the one slot over budget that a decode step needs; a prompt gets just what it needs."""
        assert self.positions is not None
        return max(needed, min(2 * self.positions.shape[2], self.room()))

    def room(self) -> int:
        """Slots for a budget and one new token; a share of the tokens seen grows on, so it gets an eighth more."""
        bound = self.bound()
        return bound + 1 + (0 if isinstance(self.spec.budget, int) else bound // 8)

    def grow_storage(self, keys: Tensor, values: Tensor) -> None:
        """Makes room for keys and values, the newest tokens' included, and puts those there."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        old = self.slots - self.fresh
        capacity = self.positions.shape[2]
        if old == 0 and capacity == self.slots:
            # `contiguous` copies what the projections left transposed, as transformers' own cache does
            self.keys = keys.clone(memory_format=torch.contiguous_format)
            self.values = values.clone(memory_format=torch.contiguous_format)
            return
        self.keys, self.values = _resized(self.keys, old, capacity), _resized(self.values, old, capacity)
        self.keys[:, :, old : self.slots] = keys
        self.values[:, :, old : self.slots] = values

    def compact(self, kept: Tensor) -> None:
        """Gathers the slots ``kept`` (B, H, n), oldest first and empty ones last, into tensors of the budget's size."""
        assert self.positions is not None and self.keys is not None and self.values is not None
        keep = kept.shape[2]
        positions = self.positions.gather(2, kept)
        last = torch.iinfo(positions.dtype).max
        oldest = positions.masked_fill(positions < 0, last).argsort(dim=-1, stable=True)
        kept, positions = kept.gather(2, oldest), positions.gather(2, oldest)
        capacity = max(keep, self.room())
        self.positions = _resized(positions, keep, capacity, -1)
        self.keys = _resized(gathered(self.keys, kept), keep, capacity)
        self.values = _resized(gathered(self.values, kept), keep, capacity)
        if self.tokens is not None:
            self.tokens = _resized(self.tokens.gather(2, kept), keep, capacity, -1)
        columns = self.columns
        self.state = {
            name: _resized(gathered(column, kept), keep, capacity, columns[name].fill)
            for name, column in self.state.items()
        }
        self.slots = keep
        self.dead = 0
        self.gaps = self.row_seen is not None
        self.arrived = self.landed = None

    def clear_slots(self, start: int, stop: int) -> None:
        """Empties slots: their positions are -1, and the policy's columns as if nothing had been there."""
        assert self.positions is not None
        self.positions[:, :, start:stop] = -1
        if self.tokens is not None:
            self.tokens[:, :, start:stop] = -1
        columns = self.columns
        for name, column in self.state.items():
            column[:, :, start:stop] = columns[name].fill

    # -- storage -------------------------------------------------------------------------------------------------

    _NUMBERS = ("slots", "seen", "prompt", "shortest", "dead", "gaps", "ordered", "is_initialized")
    _BY_SLOT = ("keys", "values", "positions", "tokens")
    _BY_ROW = ("row_seen", "row_prompt", "free")

    def books(self) -> dict[str, Any]:
        """Everything that a later forward depends on, without the room beyond the slots in use."""
        slots = {name: getattr(self, name) for name in self._BY_SLOT} | {
            f"column {n}": t for n, t in self.state.items()
        }
        return {
            **{name: getattr(self, name) for name in (*self._NUMBERS, *self._BY_ROW)},
            **{name: None if tensor is None else tensor[:, :, : self.slots] for name, tensor in slots.items()},
        }

    def restore(self, books: dict[str, Any]) -> None:
        """Continues from what ``books`` gave."""
        self.clear()
        for name in (*self._NUMBERS, *self._BY_ROW, *self._BY_SLOT):
            setattr(self, name, books[name])
        self.state = {name.removeprefix("column "): t for name, t in books.items() if name.startswith("column ")}
        if self.keys is not None:
            self.device = self.keys.device

    # -- batch operations ----------------------------------------------------------------------------------------

    @outside_inference_mode
    def _rows(self, move: Callable[[Tensor], Tensor]) -> None:
        """Applies one change of batch rows to everything that has rows."""
        if not self.is_initialized:
            return
        for name in ("keys", "values", "positions", "tokens", "row_seen", "row_prompt", "free"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, move(tensor))
        self.state = {name: move(column) for name, column in self.state.items()}
        self.arrived = self.landed = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was: keys, values, positions and scores together."""
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times in a row."""
        self._rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these rows."""
        self._rows(lambda t: t[indices.to(t.device)])


def _resized(tensor: Tensor, used: int, capacity: int, fill: float | None = None) -> Tensor:
    """The first ``used`` slots in a tensor of ``capacity`` slots; the rest holds ``fill``."""
    if tensor.shape[2] == capacity == used and tensor.is_contiguous():
        return tensor
    shape = (*tensor.shape[:2], capacity, *tensor.shape[3:])
    grown = tensor.new_empty(shape) if fill is None else tensor.new_full(shape, fill)
    grown[:, :, :used] = tensor[:, :, :used]
    return grown


def gathered(tensor: Tensor | None, index: Tensor) -> Tensor:
    """tensor (B, H, slots, ...) at index (B, H, n)."""
    assert tensor is not None
    return tensor.gather(2, selection.per_slot(index, tensor))
