"""One attention layer's cache: slots that are written in place, and an eviction after every forward.

    update()      reserves slots for the new tokens and writes their keys and values
    exact_mask()  turns transformers' mask into the one over slots, and learns which new tokens are pads
    observe()     shows the policy the attention rows that it asked for
    settle()      evicts down to the budget

What the layer holds is in its ``books``, who goes is worked out in ``eviction``, and forwards that may be taken back
are in ``drafts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from kvevict import drafts, eviction, masks, steady
from kvevict.books import Books, gathered
from kvevict.errors import ObservationError, PolicyError, WrongModelError
from kvevict.inference import outside_inference_mode
from kvevict.policies.base import Held, Policy, Rows


class EvictingLayer(Books):
    """Holds at most its budget of tokens per KV head once a forward is over."""

    is_compileable = False
    is_sliding = False
    stays_put = True
    """Whether keys and values are the same tensors from one forward to the next."""

    def clear(self) -> None:
        """Holds and knows nothing, and waits for nothing."""
        super().clear()
        self.unmasked = False  # the newest forward of one token was attended without a mask
        self.plain = False  # the newest forward's mask is causality, and so it is over slots: its tokens come last
        self.ragged = False  # pads among the last columns: some row's last queries are not the last columns
        self.reserved = False
        self.pending = False
        self.bad: Tensor | None = None  # whether a score was NaN, not looked at yet
        self.hooked = False  # a hook on the attention module saw this forward coming
        self.record_past = False  # forwards are drafts until `crop` accepts them
        self.awaited: int | None = None  # columns of the prompt that comes together with the first draft
        self.draft: drafts.Draft | None = None
        self._shown: Held | None = None  # what `observe` showed the policy, until the forward is settled

    def catch_up(self) -> None:
        """Books what the steady state still owes."""
        if self.steady is not None:
            self.steady.catch_up(self)

    def leave_steady(self) -> None:
        """Back to the general path, with the books up to date."""
        if self.steady is not None:
            self.steady.leave(self)

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

    # -- what is held --------------------------------------------------------------------------------------------

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor this layer keeps alive."""
        return super().tensors() if self.bad is None else [*super().tensors(), self.bad]

    def kept_positions(self) -> Tensor:
        """Positions still held, ascending, -1 after the end of shorter rows: (B, H, L) int64."""
        self.raise_if_bad()
        return super().kept_positions()

    # -- a forward -------------------------------------------------------------------------------------------

    def check(self, batch: int, tokens: int) -> None:
        """Raises before anything changes if this forward cannot be right."""
        self.check_pending()
        self.check_rows(batch)
        if not self.record_past:
            eviction.check_whole_prompt(self, tokens)
            return
        drafts.check(self, tokens)
        if not self.seen:
            eviction.check_whole_prompt(self, min(self.awaited or tokens, tokens))

    def check_rows(self, batch: int) -> None:
        """Raises WrongModelError for another number of rows than the layer holds."""
        held = batch if self._positions is None else self._positions.shape[0]
        if batch != held:
            raise WrongModelError(
                f"batch of {batch} rows given to a cache that holds {held}: use a new cache, cache.reset(), or "
                "cache.batch_select_indices / batch_repeat_interleave"
            )

    def check_pending(self) -> None:
        """Raises if the previous forward's attention never arrived, or its eviction failed."""
        if self.pending or self.reserved:
            raise ObservationError(
                f"layer {self.index}: the attention of the previous forward never reached the cache, so "
                f"{self.spec.policy.name!r} could not evict. Was the model's attention implementation changed, the "
                "model detached, or a forward interrupted? Build the EvictingCache after the last change, and "
                "cache.reset() before using it again"
            )

    @outside_inference_mode
    def reserve(self, tokens: int) -> None:
        """Finds slots for the new tokens and books them as real; ``learn_padding`` corrects that."""
        self.leave_steady()
        assert self.positions is not None
        if self.record_past:
            drafts.begin(self, tokens)
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
            self.give_up_free()
            self.grow(self.slots + tokens)
            self.slots += tokens
        column = self.seen
        self.seen += tokens
        self.shortest += tokens
        self.fresh = tokens
        self.ragged = False
        if self.landed is not None and self.row_seen is None:
            self.book(self.landed)
        else:
            self.write(self.positions, self.arrived[:, None])
            if self.landed is not None:
                self._begin_columns(self.landed)
        if self.tokens is not None:
            self.write(self.tokens, torch.arange(column, self.seen, device=device)[None, None])
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
        self.keys, self.values = _wide_enough(self.keys, key_states), _wide_enough(self.values, value_states)
        if self.keys.shape[2] < self.slots:
            self.grow_storage(key_states, value_states)
        else:
            self.write(self.keys, key_states)
            self.write(self.values, value_states)
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

    @torch.no_grad()
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
            self.write(self.state[name], column)

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
            real = masks.own_columns(mask, self.fresh)  # (B | 1, Q)
            self._check_mask(real)
            self.learn_padding(real)
        self.plain = mask is not None and self._is_plain(mask)
        if self.ordered:
            return mask
        positions = self.positions[:, :, : self.slots]
        if mask is None and self.fresh == 1 and not self.gaps:
            return None
        if mask is None or mask.dim() == 2:
            return self.causal_mask(heads)
        if self.plain:
            shown = masks.newest_causal(self.fresh, self.slots, mask).expand(positions.shape[0], -1, -1, -1)
            return shown if mask.dtype == torch.bool else masks.additive(shown, mask.dtype)
        columns = positions if self.tokens is None else self.tokens[:, :, : self.slots]
        return masks.gather_columns(mask, columns, positions, heads)

    def _is_plain(self, mask: Tensor) -> bool:
        usual = self.fresh > 1 and mask.dim() == 4 and not self.record_past
        last = self.landed is None and self.row_seen is None and not self.gaps
        return usual and last and masks.is_causal(mask)

    def _check_mask(self, real: Tensor) -> None:
        """Raises ObservationError if a mask calls the newest token of every row a pad, after tokens that are none.

        transformers fills a mask that was not extended with zeros. The first layer looks; an accelerator, for which
        looking means waiting, once.
        """
        first = self.index == 0 and self.fresh == 1 and (real.device.type == "cpu" or self.seen - 1 == self.prompt)
        if not first or self.seen == 1 or bool(real.any()):
            return
        if self.row_seen is None or bool((self.row_seen > 1).any()):  # the new token is counted as real so far
            raise ObservationError(
                f"the attention mask calls token {self.seen - 1} a pad in every row, after real tokens: a mask must "
                "grow with the text, by a 1 for each new token. Extend it, and call cache.reset() before using the "
                "cache again"
            )

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
            self.ragged = self.is_ragged(real)
        ranks = before[:, None] + real.cumsum(1) - 1
        self.arrived = ranks.masked_fill(~real, -1)
        self.write(self.positions, self.arrived[:, None])
        self.gaps = True

    def is_ragged(self, real: Tensor) -> bool:
        """Whether the last queries that the policy wants are not the last columns in some row of ``real`` (B, Q)."""
        last = min(self.spec.policy.queries, real.shape[1])
        return bool((real[:, real.shape[1] - last :].sum(1) < real.sum(1).clamp_max(last)).any())

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
        alone = self.seen == self.fresh and self.row_seen is None and not self.record_past
        for start, weights in blocks:
            positions = self.arrived
            if weights.shape[3] != positions.shape[1]:
                positions = positions[:, start : start + weights.shape[3]]
            if positions.shape[0] != weights.shape[0]:
                positions = positions.expand(weights.shape[0], -1)
            if self.row_seen is not None:
                pads = positions < 0
                # a look costs less than a pass over a prompt's weights, except where the answer has to be waited for
                if weights.shape[3] == 1 or not pads.is_cpu or bool(pads.any()):
                    weights = weights.masked_fill(pads[:, None, None, :, None], 0.0)  # a pad asks nothing
            view = held if weights.shape[-1] == self.slots else held.first(weights.shape[-1])
            self.spec.policy.observe(view, Rows(weights, positions, start=start if alone else None))

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

    @property
    def crowded(self) -> bool:
        """Whether some row may hold more than its own budget."""
        return self.slots > self.bound() or (self.uneven and self.seen > self.spec.average(self.seen))

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
            eviction.evict(self, self._shown or self.held(), rescore)
        self.pending, self._shown = False, None
        if self.unmasked:
            self.steady = steady.begin(self)

    # -- drafts ----------------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]  # a class attribute of transformers' own layers
        """Whether the newest tokens can be taken back without a trace."""
        return self.record_past or (self.ordered and not self.spec.policy.queries)

    def activate_past_recording(self) -> None:
        """From now on a forward is a draft: it evicts nothing until ``crop`` says how much of it stays."""
        self.leave_steady()
        self.record_past = True

    def forget_forward(self) -> None:
        """Lets go of what only the newest forward needed."""
        self.arrived = self.landed = self._shown = None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest ``-tokens_to_remove`` tokens, and evicts. See ``EvictingCache.crop``."""
        drafts.check_crop(self, -tokens_to_remove)
        drafts.cut(self, -tokens_to_remove)
        if self.is_initialized:
            self.settle()

    def reset(self) -> None:
        """Forgets everything, and frees the memory."""
        self.leave_steady()
        self.clear()


def _wide_enough(stored: Tensor, new: Tensor) -> Tensor:
    """What is stored, in a type that holds the new numbers too, as concatenation gives it: autocast comes and goes."""
    return stored if stored.dtype == new.dtype else stored.to(torch.promote_types(stored.dtype, new.dtype))
