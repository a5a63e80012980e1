"""One attention layer's cache: slots that are written in place, and an eviction after every forward.

    update()      reserves slots for the new tokens and writes their keys and values
    exact_mask()  turns transformers' mask into the one over slots, and learns which new tokens are pads
    observe()     shows the policy the attention rows that it asked for
    settle()      evicts down to the budget

A slot is one token of one KV head. Eviction of a single token only marks its slot; the next token overwrites
it. Cutting many tokens at once (a prompt, a chunk) gathers the survivors into new tensors, so that the old
ones are really freed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvevict import drafts, masks, selection, steady
from kvevict.errors import ObservationError, OptionError, PolicyError, UnsupportedOperationError, WrongModelError
from kvevict.inference import outside_inference_mode
from kvevict.policies.base import Column, Held, Policy, Rows, at_least, share_of
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
        return self.policy.one_by_one

    @functools.cached_property
    def by_age(self) -> bool:
        """Whether the policy's score is the position and nothing else, so that the oldest goes."""
        return self._says("by_age", "score", "observe")

    @functools.cached_property
    def stacks(self) -> bool:
        """Whether layers may be shown to the policy stacked as the rows of one batch."""
        return self._says("stacks", "admit", "observe", "score", "columns")

    def _says(self, name: str, *methods: str) -> bool:
        """Whether the policy's class says ``name`` of methods that no subclass has overridden since."""
        kinds = type(self.policy).__mro__
        owner = {each: next(kind for kind in kinds if each in vars(kind)) for each in (name, *methods)}
        return bool(getattr(self.policy, name)) and all(issubclass(owner[name], owner[each]) for each in methods)

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


class EvictingLayer(CacheLayerMixin):
    """Holds at most its budget of tokens per KV head once a forward is over.

    keys, values: (B, H, capacity, D); only the first ``slots`` are in use.
    """

    is_compileable = False
    is_sliding = False
    stays_put = True
    """Whether keys and values are the same tensors from one forward to the next."""

    def __init__(self, spec: Spec, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not annotate it
        self.spec = spec
        self.index = index
        self._clear()

    def _clear(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False
        self.steady: steady.Steady | None = None  # while decode steps are all alike
        self.unmasked = False  # the newest forward of one token was attended without a mask
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
        self.ragged = False  # pads among the last columns: some row's last queries are not the last columns
        self.slot_to_fill: Tensor | None = None  # what `free` gives, but for what the steady state has not booked yet
        self.landed: Tensor | None = None  # (B, H, 1) where the newest token went, when it went into `free`
        self.ordered = True  # slot i still holds column i
        self.gaps = False  # some slots in use may be empty
        self.dead = 0  # slots known to be empty in every row and head, left behind by a forward of several tokens
        self.reserved = False
        self.pending = False
        self.bad: Tensor | None = None  # whether a score was NaN, not looked at yet
        self.hooked = False  # a hook on the attention module saw this forward coming
        self.record_past = False  # forwards are drafts until `crop` accepts them
        self.awaited: int | None = None  # columns of the prompt that comes together with the first draft
        self.draft: drafts.Draft | None = None
        self._bound: tuple[int, int | None, int] = (-1, None, 0)  # what `bound` gave for these tokens seen and prompt
        self._shown: Held | None = None  # what `observe` showed the policy, until the forward is settled

    @property
    def positions(self) -> Tensor | None:
        """(B, H, capacity) rank among the row's real tokens, -1 = empty."""
        if self.steady is not None:
            self.steady.catch_up(self)
        return self._positions

    @positions.setter
    def positions(self, positions: Tensor | None) -> None:
        self.leave_steady()
        self._positions = positions

    @property
    def free(self) -> Tensor | None:
        """(B, H, 1) one empty slot in every row and head."""
        if self.steady is not None:
            self.steady.catch_up(self)
        return self.slot_to_fill

    @free.setter
    def free(self, slot: Tensor | None) -> None:
        self.leave_steady()
        self.slot_to_fill = slot

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the books as they should be."""
        if self.steady is not None:
            self.steady.catch_up(self)
        return vars(self).copy()

    def leave_steady(self) -> None:
        """Back to the general path, with the books up to date."""
        if self.steady is not None:
            self.steady.leave(self)

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

    # -- what transformers asks ------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens seen, pads included: positions and prompt slicing depend on it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask transformers would build if nothing had been evicted; ``exact_mask`` maps it to slots."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number of tokens may be seen."""
        return -1

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

    # -- sizes -----------------------------------------------------------------------------------------------

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
        loose = (self.arrived, self.free, self.landed, self.bad)
        return [t for t in (*named, *loose, *self.state.values(), *beside) if t is not None]

    def kept_positions(self) -> Tensor:
        """Positions still held, ascending, -1 after the end of shorter rows: (B, H, L) int64."""
        if self.positions is None:
            return torch.empty(0, 0, 0, dtype=torch.long)
        self.raise_if_bad()
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

    # -- a forward -------------------------------------------------------------------------------------------

    def check(self, batch: int, tokens: int) -> None:
        """Raises before anything changes if this forward cannot be right."""
        self.check_pending()
        if self.is_initialized and self.keys is not None and batch != self.keys.shape[0]:
            raise WrongModelError(
                f"batch of {batch} rows given to a cache that holds {self.keys.shape[0]}: use a new cache, "
                "cache.reset(), or cache.batch_select_indices / batch_repeat_interleave"
            )
        if not self.record_past:
            self._check_whole_prompt(tokens)
            return
        drafts.check(self, tokens)
        if not self.seen:
            self._check_whole_prompt(min(self.awaited or tokens, tokens))

    def check_pending(self) -> None:
        """Raises if the previous forward's attention never arrived, or its eviction failed."""
        if self.pending or self.reserved:
            raise ObservationError(
                f"layer {self.index}: the attention of the previous forward never reached the cache, so "
                f"{self.spec.policy.name!r} could not evict. Was the model's attention implementation changed, the "
                "model detached, or a forward interrupted? Build the EvictingCache after the last change, and "
                "cache.reset() before using it again"
            )

    def _check_whole_prompt(self, tokens: int) -> None:
        """A prompt that may not be cut must fit every layer. Padded batches are looked at when their pads are known."""
        policy = self.spec.policy
        over = self.prompt is not None or (tokens == 1 and self.seen > 0)
        if policy.protect_prompt != "whole" or not policy.evicts or over or self.row_seen is not None:
            return
        prompt = self.seen + tokens
        later = max(prompt, self.spec.average(prompt)) + 1  # once more than an average budget was seen
        budget = min(self.spec.tokens(layer, later, prompt) for layer in range(self.spec.layers))
        if tokens > 1 and isinstance(self.spec.budget, int) and policy.protected_tokens(budget, prompt) > budget:
            self._room_error(budget, f"a prompt of {prompt} tokens")

    def _room_error(self, budget: int, what: str) -> NoReturn:
        policy = self.spec.policy
        raise OptionError(
            f"protect_prompt={policy.protect_prompt!r} with sinks={policy.sinks} and recent="
            f"{policy.recent_for(budget)} cannot hold {what} in budget={budget}: raise budget, or protect a share "
            "of it (protect_prompt=0.5)"
        )

    @outside_inference_mode
    def reserve(self, tokens: int) -> None:
        """Finds slots for the new tokens and books them as real; ``learn_padding`` corrects that."""
        self.leave_steady()
        assert self.positions is not None
        if self.record_past:
            self._open_draft(tokens)
        if (tokens == 1 or self.record_past) and self.seen and self.prompt is None:
            self.prompt = self.seen
            self.row_prompt = None if self.row_seen is None else self.row_seen.clone()
        device = self.positions.device
        if self.row_seen is None:
            self.arrived = torch.arange(self.seen, self.seen + tokens, device=device)[None]
        else:
            self.arrived = self.row_seen[:, None] + torch.arange(tokens, device=device)
            self.row_seen = self.row_seen + tokens
        self.landed = None
        if self.free is not None and tokens == 1 and not self.record_past:
            self.landed, self.free = self.free, None
        else:
            if self.free is not None:
                self.gaps, self.free = True, None
                self.dead += 1
            self._grow(self.slots + tokens)
            self.slots += tokens
        column = self.seen
        self.seen += tokens
        self.shortest += tokens
        self.fresh = tokens
        self.ragged = False
        if self.landed is not None and self.row_seen is None:
            self.book(self.landed)
        else:
            self._write(self.positions, self.arrived[:, None])
            if self.landed is not None:
                self._begin_columns(self.landed)
        if self.tokens is not None:
            self._write(self.tokens, torch.arange(column, self.seen, device=device)[None, None])
        self.reserved = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores the new tokens and returns everything held, old and new: (B, H, slots, D) twice."""
        if self.steady is not None and self.steady.takes(self, key_states, value_states):
            return self.steady.arrive(self, key_states, value_states)
        return self._store(key_states, value_states)

    @outside_inference_mode
    def _store(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, tokens, _ = key_states.shape
        if not self.reserved:
            self.check(batch, tokens)
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.reserve(tokens)
        assert self.keys is not None and self.values is not None and self.positions is not None
        if self.keys.shape[2] < self.slots:
            self._grow_storage(key_states, value_states)
        else:
            self._write(self.keys, key_states)
            self._write(self.values, value_states)
        self.reserved = self.hooked = False
        self.pending = True
        self.admit()
        return self._view(self.keys), self.values.narrow(2, 0, self.slots)

    def _view(self, keys: Tensor) -> Tensor:
        held = keys.narrow(2, 0, self.slots)  # a fresh view, which may be marked
        rerotation = self.spec.rerotation
        if rerotation is None or self.ordered:
            return held
        policy = self.spec.policy
        prompt = self.seen if self.prompt is None else self.prompt
        front = policy.protected_tokens(self.bound(), prompt) - int(policy.recent_for(self.bound()))
        return rerotation.close_gap(held, self.slot_positions, front)

    def _write(self, stored: Tensor, new: Tensor) -> None:
        """Puts the newest tokens' values (broadcast to (B, H, Q, ...)) where they were placed."""
        if self.landed is None:
            stored[:, :, self.slots - self.fresh : self.slots] = new
            return
        index = selection.per_slot(self.landed, stored)
        stored.scatter_(2, index, (new if new.shape == index.shape else new.expand_as(index)).to(stored.dtype))

    def _grow(self, needed: int) -> None:
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
        return max(needed, min(2 * self.positions.shape[2], self._room()))

    def _room(self) -> int:
        """Slots for a budget and one new token; a share of the tokens seen grows on, so it gets an eighth more."""
        bound = self.bound()
        return bound + 1 + (0 if isinstance(self.spec.budget, int) else bound // 8)

    def _grow_storage(self, keys: Tensor, values: Tensor) -> None:
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

    def admit(self) -> None:
        """Shows the policy the newest tokens, before they are attended to."""
        policy = self.spec.policy
        if type(policy).admit is Policy.admit:
            return
        held = self.held()
        if self.landed is None:
            policy.admit(held.narrow(self.slots - self.fresh, self.slots))
            return
        # The new token overwrote a slot of its own in each head: show the policy that one slot, then put it back.
        index = self.landed
        new = Held(
            positions=held.positions.gather(2, index),
            seen=held.seen,
            budget=held.budget,
            prompt=held.prompt,
            keys=gathered(self.keys, index),
            values=gathered(self.values, index),
            layer=self.index,
            layers=self.spec.layers,
            columns={name: gathered(column, index) for name, column in self.state.items()},
        )
        policy.admit(new)
        for name, column in new.columns.items():
            self._write(self.state[name], column)

    def exact_mask(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """The mask of this forward over slots: None, as given, or (B, 1 | heads, Q, slots).

        ``mask`` is what transformers built: None, (B, tokens seen), or (B, 1 | heads, Q, tokens seen).
        """
        if mask is None and self.fresh == 1 and self.steady is not None:
            return None
        self.leave_steady()
        self.unmasked = mask is None and self.fresh == 1
        assert self.positions is not None and self.arrived is not None
        if mask is not None:
            if mask.shape[-1] != self.seen:
                raise ObservationError(
                    f"attention mask of shape {tuple(mask.shape)} for {self.seen} tokens seen: its last dimension "
                    "must count every token seen, evicted ones included (cache.get_seq_length() + new tokens)"
                )
            self.learn_padding(masks.own_columns(mask, self.fresh))
        if self.ordered:
            return mask
        positions = self.positions[:, :, : self.slots]
        if mask is None and self.fresh == 1 and not self.gaps:
            return None
        if mask is None or mask.dim() == 2:
            return self.causal_mask(heads)
        columns = positions if self.tokens is None else self.tokens[:, :, : self.slots]
        return masks.gather_columns(mask, columns, positions, heads)

    def causal_mask(self, heads: int) -> Tensor:
        """The newest forward's mask from positions alone: (B, heads, Q, slots) bool."""
        assert self.arrived is not None
        shown = masks.causal(self.slot_positions, self.arrived)
        return shown.repeat_interleave(heads // shown.shape[1], 1)

    @outside_inference_mode
    def learn_padding(self, real: Tensor) -> None:
        """Takes the pads among the new tokens out of the books. ``real``: (B | 1, Q) bool."""
        assert self.positions is not None and self.arrived is not None
        if self.row_seen is None:
            # One look at the mask. A decode step of an unpadded batch on sdpa has no mask and never comes here.
            if bool(real.all()):
                return
            batch = self.positions.shape[0]
            self.row_seen = torch.full((batch,), self.seen, device=self.positions.device)
            self.tokens = self.positions.clone()
            if self.prompt is not None:
                self.row_prompt = torch.full_like(self.row_seen, self.prompt)
                if self.draft is not None and self.draft.dense:  # the prompt and its pads came just now
                    self.row_prompt = real[:, : self.prompt].sum(1).expand(batch).clone()
            self.arrived = self.arrived.expand(batch, -1)
        real = real.to(self.positions.device).expand(self.positions.shape[0], -1)
        before = self.row_seen - self.fresh
        self.row_seen = before + real.sum(1)
        if self.fresh > 1 or self.spec.varies:
            self.shortest = int(self.row_seen.min())
        if self.fresh > 1:
            self.ragged = self._is_ragged(real)
        ranks = before[:, None] + real.cumsum(1) - 1
        self.arrived = ranks.masked_fill(~real, -1)
        self._write(self.positions, self.arrived[:, None])
        self.gaps = True

    def _is_ragged(self, real: Tensor) -> bool:
        """Whether the last queries that the policy wants are not the last columns in some row of ``real`` (B, Q)."""
        last = min(self.spec.policy.queries, real.shape[1])
        return bool((real[:, real.shape[1] - last :].sum(1) < real.sum(1).clamp_max(last)).any())

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

    @property
    def wanted(self) -> int:
        """How many of the newest forward's queries the policy wants to see."""
        return self.fresh if self.ragged and self.spec.policy.queries else min(self.spec.policy.queries, self.fresh)

    def observe(self, blocks: Iterable[tuple[int, Tensor]]) -> None:
        """Shows the policy attention rows: pairs (first query of the block, weights (B, H, G, q, l <= slots))."""
        if self.steady is not None:
            self.steady.observe(self, blocks)
            return
        assert self.arrived is not None
        held = self._shown = self.held()
        for start, weights in blocks:
            positions = self.arrived
            if weights.shape[3] != positions.shape[1]:
                positions = positions[:, start : start + weights.shape[3]]
            if positions.shape[0] != weights.shape[0]:
                positions = positions.expand(weights.shape[0], -1)
            if self.row_seen is not None:
                weights = weights.masked_fill((positions < 0)[:, None, None, :, None], 0.0)  # a pad asks nothing
            view = held if weights.shape[-1] == self.slots else held.first(weights.shape[-1])
            self.spec.policy.observe(view, Rows(weights, positions))

    # -- eviction --------------------------------------------------------------------------------------------

    def scores(self, held: Held) -> Tensor:
        """The policy's scores of all slots, their shape and type checked: (B, H | 1, slots)."""
        policy = self.spec.policy
        scores = policy.score(held)
        batch, heads, slots = shape = held.positions.shape
        fits = isinstance(scores, Tensor) and (scores.shape == shape or scores.shape == (batch, 1, slots))
        if not fits:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise PolicyError(
                f"policy {policy.name!r} scored layer {self.index} with {got}: score() must return "
                f"{(batch, heads, slots)}, or {(batch, 1, slots)} for all heads alike"
            )
        if scores.dtype == torch.bool or scores.is_complex():
            raise PolicyError(
                f"policy {policy.name!r} scored layer {self.index} with {scores.dtype}: score() must return real "
                "numbers"
            )
        return scores

    def check_scores(self, scores: Tensor) -> None:
        """Raises PolicyError if a real token's score is NaN.

        Reading the answer makes the CPU wait for an accelerator. There, decode steps only remember it, and the
        next forward of several tokens, or ``kept_positions``, raises.
        """
        if not scores.dtype.is_floating_point:
            return
        bad = scores.isnan()
        if bad.device.type == "cpu" and not bool(bad.any()):
            return
        bad = (bad & (self.slot_positions >= 0)).any()
        self.bad = bad if self.bad is None else self.bad | bad
        if self.fresh > 1 or bad.device.type == "cpu":
            self.raise_if_bad()

    def check_lowest(self, lowest: Tensor, scores: Tensor) -> None:
        """Like ``check_scores``, of scores whose ``lowest`` (B, H | 1, 1) are known: those are NaN if any score is."""
        if not lowest.dtype.is_floating_point:
            return
        if lowest.device.type != "cpu":
            bad = lowest.isnan().any()
            self.bad = bad if self.bad is None else self.bad | bad
        elif bool(lowest.isnan().any()):
            self.check_scores(scores)

    def raise_if_bad(self) -> None:
        """Raises PolicyError if some score was NaN since the last look."""
        bad, self.bad = self.bad, None
        if bad is not None and bool(bad):
            assert self.keys is not None
            raise PolicyError(
                f"policy {self.spec.policy.name!r} scored tokens of layer {self.index} with NaN. If its formula is "
                f"sound, the model's {self.keys.dtype} activations overflowed: load it in bfloat16 or float32"
            )

    def protection(self, held: Held) -> Tensor | None:
        """Which slots may not go: (B, H, slots) bool, or None."""
        policy = self.spec.policy
        return selection.protected(
            held.positions,
            seen=held.seen,
            sinks=policy.sinks,
            recent=policy.recent_for(held.budget),
            prompt=held.prompt,
            ends=policy.prompt_ends(held.budget, held.prompt),
            may_be_empty=self.gaps,
        )

    @property
    def uneven(self) -> bool:
        """Whether rows may have to evict different numbers of tokens."""
        return self.row_seen is not None and (self.spec.varies or not self.spec.one_by_one)

    @property
    def crowded(self) -> bool:
        """Whether some row may hold more than its own budget."""
        return self.slots > self.bound() or (self.uneven and self.seen > self.spec.average(self.seen))

    def surplus(self) -> int:
        """How many slots are too many for every row."""
        bound = self.bound()
        if self.slots <= bound:
            return 0
        live = self.slots - self.dead
        if self.uneven or self.spec.one_by_one:
            return self.slots - bound
        if live <= bound:
            return max(self.slots - bound, self.dead)
        keep = live - int(self.spec.policy.at_once(bound))
        prompt = self.seen if self.prompt is None else self.prompt
        return self.slots - min(bound, max(keep, int(self._staying(self.seen, bound, prompt))))

    def _staying(self, seen: int | Tensor, budget: int | Tensor, prompt: int | Tensor) -> Tensor:
        """How many tokens the common protections keep."""
        policy = self.spec.policy
        return selection.count_protected(
            seen=seen,
            sinks=policy.sinks,
            recent=policy.recent_for(budget),
            prompt=prompt,
            ends=policy.prompt_ends(budget, prompt),
        )

    def going(self, held: Held, order: Tensor, protection: Tensor | None) -> Tensor:
        """Which ranks of ``order``, the first to go first, must go: (B, H, slots) bool."""
        rank = torch.arange(self.slots, device=order.device)
        if not self.uneven:
            return (rank < self.surplus()).expand_as(order)
        live = (held.positions >= 0).sum(-1, keepdim=True)  # (B, H, 1)
        stay = torch.minimum(live - self.spec.policy.at_once(held.budget), torch.as_tensor(held.budget))
        if protection is not None:
            stay = torch.maximum(stay, self._staying(held.seen, held.budget, held.prompt))
        return rank < self.slots - torch.where(live > held.budget, stay, live)

    @outside_inference_mode
    def settle(self, rescore: Callable[[Tensor], Tensor] | None = None) -> None:
        """Evicts down to the budget. ``rescore`` may replace the policy's scores (votes of all layers)."""
        if self.steady is not None:
            if self.pending:  # otherwise nothing came since
                self.steady.settle(self, rescore)
            return
        assert self.keys is not None and self.values is not None
        if self.keys.requires_grad or self.values.requires_grad:
            # gradients reach this forward's own tokens; the stored ones keep no graph alive
            self.keys, self.values = self.keys.detach(), self.values.detach()
        if self.crowded and self.free is None:  # an empty slot that nobody has taken: nothing came since
            self._evict(self._shown or self.held(), rescore)
        self.pending, self._shown = False, None
        if self.unmasked:
            self.steady = steady.begin(self)

    def _evict(self, held: Held, rescore: Callable[[Tensor], Tensor] | None) -> None:
        scores = self.scores(held)
        if rescore is not None:
            scores = rescore(scores)
        self.check_scores(scores)
        protection = self.protection(held)
        if protection is not None and self.spec.policy.protect_prompt is not None:
            self._check_room(held, protection)
        surplus = self.surplus()
        self.ordered = False
        if surplus == 1 and not self.uneven:
            self.free = selection.pick_victim(scores, held.positions, protection, may_be_empty=self.gaps)
            held.positions.scatter_(2, self.free, -1)
            self.dead = max(0, self.dead - 1)  # an empty slot goes first
            return
        order = selection.eviction_order(scores, held.positions, protection)
        if self.uneven:
            going = self.going(held, order, protection)
            held.positions.masked_fill_(torch.zeros_like(going).scatter_(2, order, going), -1)
            self.gaps = True
        if surplus > 1:
            self._compact(order[:, :, surplus:])
        elif surplus:
            self.free = order[:, :, :1]
            self.dead = max(0, self.dead - 1)

    def _check_room(self, held: Held, protection: Tensor) -> None:
        """A protected prompt that outgrew its row's budget is the user's error, never a silent eviction."""
        if self.fresh == 1:
            return  # the prompt is over, and was looked at when it came
        over = protection.sum(-1, keepdim=True) > held.budget
        if bool(over.any()):
            budget = held.budget if isinstance(held.budget, int) else int(held.budget[over.any(1, keepdim=True)].min())
            if self.slots == self.fresh:
                self._clear()  # nothing was held before: leave it so
            self._room_error(budget, "this prompt")

    def _compact(self, kept: Tensor) -> None:
        """Gathers the slots ``kept`` (B, H, n), oldest first and empty ones last, into tensors of the budget's size."""
        assert self.positions is not None and self.keys is not None and self.values is not None
        keep = kept.shape[2]
        positions = self.positions.gather(2, kept)
        last = torch.iinfo(positions.dtype).max
        oldest = positions.masked_fill(positions < 0, last).argsort(dim=-1, stable=True)
        kept, positions = kept.gather(2, oldest), positions.gather(2, oldest)
        capacity = max(keep, self._room())
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

    # -- drafts ----------------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a class attribute of transformers' own layers
        """Whether the newest tokens can be taken back without a trace."""
        return self.record_past or (self.ordered and not self.spec.policy.queries)

    def activate_past_recording(self) -> None:
        """From now on a forward is a draft: it evicts nothing until ``crop`` says how much of it stays."""
        self.leave_steady()
        self.record_past = True

    def _open_draft(self, tokens: int) -> None:
        dense = 0 if self.seen else min(self.awaited or tokens, tokens)
        before = (self.seen, self.row_seen, self.prompt, self.row_prompt, self.shortest)
        live = self.slots
        if self.free is not None:
            self.gaps, self.free = True, None
            self.dead += 1
        self.draft = drafts.Draft(live, *before, tokens=tokens, dense=dense)
        if not self.seen and self.awaited is not None:
            self.prompt = dense

    def twin(self) -> EvictingLayer:
        """A layer over the same keys with books of its own."""
        assert self.positions is not None
        twin = copy.copy(self)
        twin.positions = self.positions.clone()
        twin.state = {name: column.clone() for name, column in self.state.items()}
        return twin

    def booked(self, slots: int) -> Tensor:
        """Positions of the first ``slots`` slots, in use or not: (B, H, slots)."""
        assert self._positions is not None
        return self._positions[:, :, :slots]

    def stand_at(self, draft: drafts.Draft, start: int, stop: int) -> None:
        """Takes the tokens ``start`` to ``stop`` of a draft for the newest forward."""
        assert draft.arrived is not None and self.positions is not None
        self.slots, self.seen, self.fresh = draft.first + stop, draft.seen + stop, stop - start
        self.arrived, self.landed = draft.arrived[:, start:stop], None
        self._write(self.positions, self.arrived[:, None])
        self.shortest, self.ragged = self.seen, False
        if draft.row_seen is not None:
            self.row_seen = draft.row_seen + (draft.arrived[:, :stop] >= 0).sum(1)
            self.shortest = int(self.row_seen.min())
            self.ragged = self._is_ragged(self.arrived >= 0)

    def mark(self) -> None:
        """Evicts like ``settle``, but leaves what goes as empty slots where it is."""
        held = self.held()
        scores = self.scores(held)
        self.check_scores(scores)
        protection = self.protection(held)
        if protection is not None and self.spec.policy.protect_prompt is not None:
            self._check_room(held, protection)
        order = selection.eviction_order(scores, held.positions, protection)
        surplus = self.surplus()
        going = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order, self.going(held, order, protection))
        held.positions.masked_fill_(going, -1)
        self.dead = 0 if self.uneven else max(self.dead, surplus)
        self.gaps, self.ordered = True, False

    def forget_forward(self) -> None:
        """Lets go of what only the newest forward needed."""
        self.arrived = self.landed = self._shown = None

    def clear_slots(self, start: int, stop: int) -> None:
        """Empties slots: their positions are -1, and the policy's columns as if nothing had been there."""
        assert self.positions is not None
        self.positions[:, :, start:stop] = -1
        if self.tokens is not None:
            self.tokens[:, :, start:stop] = -1
        columns = self.columns
        for name, column in self.state.items():
            column[:, :, start:stop] = columns[name].fill

    def check_crop(self, tokens: int) -> None:
        """Raises OptionError below 0, UnsupportedOperationError if ``tokens`` tokens cannot be taken back."""
        if tokens < 0:
            raise OptionError(f"crop({-tokens}): give minus the number of tokens to remove, such as crop({tokens})")
        if tokens == 0:
            return
        if self.draft is not None and tokens <= self.draft.tokens:
            return
        if self.draft is None and self.is_croppable and not self.record_past and tokens <= self.seen:
            return
        newest = 0 if self.draft is None else self.draft.tokens
        raise UnsupportedOperationError(
            f"crop(-{tokens}): an EvictingCache takes back only tokens of a forward that past recording saw "
            f"({newest} here), and before the first eviction those of policies that read no attention. Call "
            "cache.activate_past_recording() before the forward, or go on from a copy.deepcopy(cache) made before it"
        )

    def cut(self, tokens: int) -> None:
        """Takes back the newest ``tokens`` tokens; ``check_crop`` has agreed. The cache settles afterwards."""
        if self.draft is not None:
            drafts.accept(self, tokens)
        elif tokens:
            self.clear_slots(self.slots - tokens, self.slots)
            self.slots, self.seen, self.fresh = self.slots - tokens, self.seen - tokens, 0
            self.arrived = self.landed = None
            self.shortest = self.seen
            if self.row_seen is not None:
                self.row_seen = (self.slot_positions[:, 0] >= 0).sum(1)
                self.shortest = int(self.row_seen.min())
            if self.prompt is not None and self.seen <= self.prompt:
                self.prompt = self.row_prompt = None

    # -- storage ---------------------------------------------------------------------------------------------

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
        self._clear()
        for name in (*self._NUMBERS, *self._BY_ROW, *self._BY_SLOT):
            setattr(self, name, books[name])
        self.state = {name.removeprefix("column "): t for name, t in books.items() if name.startswith("column ")}
        if self.keys is not None:
            self.device = self.keys.device

    # -- batch operations ------------------------------------------------------------------------------------

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

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest ``-tokens_to_remove`` tokens, and evicts. See ``EvictingCache.crop``."""
        self.check_crop(-tokens_to_remove)
        self.cut(-tokens_to_remove)
        if self.is_initialized:
            self.settle()

    def reset(self) -> None:
        """Forgets everything, and frees the memory."""
        self.leave_steady()
        self._clear()


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
