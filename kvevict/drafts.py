"""Forwards that may be taken back: past recording, crop, and with them assisted and prompt-lookup decoding.

A verified draft must leave what token-by-token decoding would have left, and its queries must see what they would
have seen there. So while past recording is on, a forward evicts nothing. Its tokens are stepped through on a copy of
the layer's books, one after the other, to find out which slots each later query may no longer see. ``crop`` then steps
through the accepted tokens once more, on the books themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvevict import eviction
from kvevict.errors import OptionError, UnsupportedOperationError

if TYPE_CHECKING:
    from kvevict.layer import EvictingLayer
    from kvevict.spec import Spec

RowSource = Callable[[int, int, int, int, Tensor | None], Iterable[tuple[int, Tensor]]]
"""(first query, end, slots they may see, how many of the last, mask) -> their attention rows, block by block."""


@dataclass
class Draft:
    """One forward of one layer that ``crop`` may still shorten.

    first:  slots in use before it.
    seen, row_seen, prompt, row_prompt, shortest: the layer's, before it.
    tokens: how many it brought.
    dense:  how many of the first ones are a prompt, attended in one go and cut once.
    mask:   over slots, before anything of this forward goes.
    """

    first: int
    seen: int
    row_seen: Tensor | None
    prompt: int | None
    row_prompt: Tensor | None
    shortest: int
    tokens: int
    dense: int
    arrived: Tensor | None = None
    mask: Tensor | None = None
    heads: int = 0
    rows: RowSource | None = None

    def blocks(self, accepted: int) -> list[tuple[int, int]]:
        """What is attended together: the prompt, then token by token."""
        return self.blocks_of(min(self.dense, accepted), accepted)

    @staticmethod
    def blocks_of(dense: int, tokens: int) -> list[tuple[int, int]]:
        """``dense`` tokens together, the rest one by one: (start, stop) of each."""
        return [(0, dense)] * (dense > 0) + [(each, each + 1) for each in range(dense, tokens)]


def begin(layer: EvictingLayer, tokens: int) -> None:
    """The forward of ``tokens`` tokens that comes now is a draft."""
    dense = _prompt_within(layer, tokens)
    before = (layer.seen, layer.row_seen, layer.prompt, layer.row_prompt, layer.shortest)
    layer.draft = Draft(layer.slots, *before, tokens=tokens, dense=dense)
    layer.give_up_free()
    if not layer.seen and layer.awaited is not None:
        layer.prompt = dense


def _prompt_within(layer: EvictingLayer, tokens: int) -> int:
    """How many of the next forward's ``tokens`` tokens are a prompt."""
    return 0 if layer.seen else min(layer.awaited or tokens, tokens)


def rehearse(layer: EvictingLayer, mask: Tensor | None, heads: int, rows: RowSource | None) -> Tensor | None:
    """The mask under which the newest forward attends as its tokens would one by one."""
    draft = layer.draft
    assert draft is not None
    draft.mask, draft.heads, draft.rows, draft.arrived = mask, heads, rows, layer.arrived
    if draft.row_seen is None and layer.row_seen is not None:  # the first pads came with this forward
        draft.row_seen = torch.full_like(layer.row_seen, draft.seen)
    blocks = draft.blocks(draft.tokens)
    if not evicts_within(layer, draft.first, draft.seen, blocks):
        return mask
    scratch = _twin(layer)
    shown = []
    for start, stop in blocks:
        alive = scratch.booked(layer.slots) >= 0  # (B, H, slots)
        shown.append(alive.unsqueeze(2).expand(-1, -1, stop - start, -1))
        if stop < draft.tokens:
            _step(scratch, draft, start, stop, evict=True)
    if mask is None or mask.dim() == 2:
        mask = layer.causal_mask(heads)
    return _hide(mask, torch.cat(shown, 2), heads)


def evicts_within(layer: EvictingLayer, first: int, seen: int, blocks: list[tuple[int, int]]) -> bool:
    """Whether some block finds that an earlier one, after ``first`` slots and ``seen`` tokens, had to evict."""
    if len(blocks) < 2:
        return False
    # each is looked at: a layer's share of a growing budget may grow by two tokens at once, after it was outgrown
    return layer.uneven or any(
        first + before > layer.spec.tokens(layer.index, seen + before, layer.prompt) for before, _ in blocks[1:]
    )


def reason_against(spec: Spec, free: bool, base: str) -> str | None:
    """Why a draft that outgrows the budget cannot be verified token by token, or None."""
    if spec.policy.consensus:
        return "in this policy all layers decide together who goes"
    if spec.rerotation is not None:
        return "with positions='cache' every eviction moves the keys"
    if not free and base == "eager":
        return (
            "eager attention shows its weights only when all is over (call model.set_attn_implementation('sdpa') "
            "before building the cache)"
        )
    return None


def check(layer: EvictingLayer, tokens: int) -> None:
    """Raises UnsupportedOperationError, before anything changes, if a draft cannot be verified exactly."""
    reason = layer.spec.no_drafts
    if reason is None:
        return
    dense = _prompt_within(layer, tokens)
    blocks = Draft.blocks_of(dense, tokens)
    if evicts_within(layer, layer.slots, layer.seen, blocks):
        raise UnsupportedOperationError(
            f"a draft of {tokens - dense} tokens would outgrow the budget while it is verified, and {reason}: the "
            "result would not equal plain decoding. Raise the budget, or decode without a draft (assistant_model, "
            "prompt_lookup_num_tokens)"
        )


def check_crop(layer: EvictingLayer, tokens: int) -> None:
    """Raises OptionError below 0, UnsupportedOperationError if ``tokens`` tokens cannot be taken back."""
    if tokens < 0:
        raise OptionError(f"crop({-tokens}): give minus the number of tokens to remove, such as crop({tokens})")
    if tokens == 0:
        return
    if layer.draft is not None and tokens <= layer.draft.tokens:
        return
    if layer.draft is None and layer.is_croppable and not layer.record_past and tokens <= layer.seen:
        return
    newest = 0 if layer.draft is None else layer.draft.tokens
    raise UnsupportedOperationError(
        f"crop(-{tokens}): an EvictingCache takes back only tokens of a forward that past recording saw "
        f"({newest} here), and before the first eviction those of policies that read no attention. Call "
        "cache.activate_past_recording() before the forward, or go on from a copy.deepcopy(cache) made before it"
    )


def cut(layer: EvictingLayer, tokens: int) -> None:
    """Takes back the newest ``tokens`` tokens; ``check_crop`` has agreed. The caller settles the layer."""
    if layer.draft is not None:
        _accept(layer, layer.draft, tokens)
    elif tokens:
        layer.clear_slots(layer.slots - tokens, layer.slots)
        layer.slots, layer.seen, layer.fresh = layer.slots - tokens, layer.seen - tokens, 0
        layer.arrived = layer.landed = None
        layer.shortest = layer.seen
        if layer.row_seen is not None:
            layer.row_seen = (layer.slot_positions[:, 0] >= 0).sum(1)
            layer.shortest = int(layer.row_seen.min())
        if layer.prompt is not None and layer.seen <= layer.prompt:
            layer.prompt = layer.row_prompt = None


def _accept(layer: EvictingLayer, draft: Draft, removed: int) -> None:
    """Ends the draft without its last ``removed`` tokens."""
    layer.draft = None
    accepted = draft.tokens - removed
    layer.seen, layer.row_seen, layer.shortest = draft.seen, draft.row_seen, draft.shortest
    layer.clear_slots(draft.first + accepted, draft.first + draft.tokens)
    layer.slots, layer.fresh = draft.first, 0
    if accepted <= draft.dense:  # what came before a token of its own is not over yet
        layer.prompt, layer.row_prompt = draft.prompt, draft.row_prompt
    for start, stop in draft.blocks(accepted):
        _step(layer, draft, start, stop, evict=stop < accepted)
    layer.forget_forward()


def _twin(layer: EvictingLayer) -> EvictingLayer:
    """A layer over the same keys with books of its own."""
    assert layer.positions is not None
    twin = copy.copy(layer)
    twin.positions = layer.positions.clone()
    twin.state = {name: column.clone() for name, column in layer.state.items()}
    return twin


def _step(layer: EvictingLayer, draft: Draft, start: int, stop: int, *, evict: bool) -> None:
    """Some tokens of a draft arrive in ``layer``, are observed, and what is too many is marked empty."""
    _stand_at(layer, draft, start, stop)
    if draft.rows is not None and layer.wanted:
        mask = draft.mask
        if mask is not None and mask.dim() == 4:
            mask = mask[:, :, start:stop, : layer.slots]
            if layer.gaps:
                mask = _hide(mask, (layer.slot_positions >= 0).unsqueeze(2), draft.heads)
        elif mask is not None or layer.gaps:
            mask = layer.causal_mask(draft.heads)
        layer.observe(draft.rows(start, stop, layer.slots, layer.wanted, mask))
    if evict and layer.crowded:
        eviction.mark(layer)


def _stand_at(layer: EvictingLayer, draft: Draft, start: int, stop: int) -> None:
    """Takes the tokens ``start`` to ``stop`` of a draft for the newest forward."""
    assert draft.arrived is not None and layer.positions is not None
    layer.slots, layer.seen, layer.fresh = draft.first + stop, draft.seen + stop, stop - start
    layer.arrived, layer.landed = draft.arrived[:, start:stop], None
    layer.write(layer.positions, layer.arrived[:, None])
    layer.shortest, layer.ragged = layer.seen, False
    if draft.row_seen is not None:
        layer.row_seen = draft.row_seen + (draft.arrived[:, :stop] >= 0).sum(1)
        layer.shortest = int(layer.row_seen.min())
        layer.ragged = layer.is_ragged(layer.arrived >= 0)


def _hide(mask: Tensor, alive: Tensor, heads: int) -> Tensor:
    """``mask`` (B, 1 | heads, Q, slots) without the slots that are not ``alive`` (B, H, 1 | Q, slots)."""
    alive = alive.repeat_interleave(heads // alive.shape[1], 1)
    return mask & alive if mask.dtype == torch.bool else mask.masked_fill(~alive, torch.finfo(mask.dtype).min)
