"""The mask that attention needs over the stored slots, made from the one that transformers built.

transformers builds its mask for an uncompressed cache: one column for every token ever seen, pads included.
A slot remembers its column, so gathering columns gives the exact mask for any set of kept tokens, per batch
row and KV head, whatever the slots' order and whatever the model's own pattern.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict.errors import ObservationError


def own_columns(mask: Tensor, queries: int) -> Tensor:
    """Which of the new tokens are real: (B, queries) bool, or (1, queries) for a mask shared by the batch.

    A pad's column is hidden from every query, even from the pad itself.
    ``mask``: (B, S) with true or 1 for real tokens, or (B, heads, queries, S), bool or additive float.
    """
    if mask.dim() == 2:
        return mask[:, -queries:].bool()
    shown = mask[:, :, :, -queries:].diagonal(dim1=2, dim2=3)  # (B, heads, queries)
    return visible(shown).any(1)


HIDDEN = -5000.0
"""Added to a logit, this or less hides a token: exp(-5000) is 0 in every type. People write -1e4, -1e9 and -inf."""


def visible(mask: Tensor) -> Tensor:
    """A bool mask from a bool or an additive float one."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def causal(positions: Tensor, queries: Tensor) -> Tensor:
    """Plain causality from positions: (B, H, Q, L) bool.

    positions: (B, H, L), -1 for empty slots; queries: (B, Q) positions of the queries, -1 for pads.
    """
    slots = positions.unsqueeze(2)
    return (slots >= 0) & (slots <= queries[:, None, :, None])


_VERDICT = "_kvevict_causal"


def is_causal(mask: Tensor) -> bool:
    """Whether a mask (..., Q, S) hides from each of the newest queries what comes later, and says nothing else.

    The answer is kept with the mask, which all layers of a forward share.
    """
    version = None if mask.is_inference() else mask._version  # the same tensor may be written to
    known = getattr(mask, _VERDICT, None)
    if known is None or known[0] != version or version is None:
        queries, tokens = mask.shape[-2:]
        among = newest_causal(queries, queries, mask)
        # an additive mask may also carry a bias
        said = [mask] if mask.dtype == torch.bool else [mask == 0, visible(mask)]
        causal = all(
            bool(shown[..., : tokens - queries].all()) and bool((shown[..., tokens - queries :] == among).all())
            for shown in said
        )
        known = (version, causal)
        setattr(mask, _VERDICT, known)
    return bool(known[1])


def newest_causal(queries: int, slots: int, like: Tensor) -> Tensor:
    """Causality of the newest ``queries``, whose tokens are in the last of ``slots``: (1, 1, queries, slots) bool."""
    shown = torch.ones(queries, slots, dtype=torch.bool, device=like.device)
    return shown.tril_(slots - queries)[None, None]


def gather_columns(mask: Tensor, columns: Tensor, positions: Tensor, heads: int) -> Tensor:
    """The exact mask over stored slots.

    mask:      (B | 1, 1 | heads, Q, S), bool or additive float, over all columns ever seen.
    columns:   (B, H, L), the column of each slot.
    positions: (B, H, L), -1 for empty slots.
    Returns (B, heads, Q, L), or (B, 1, Q, L) where all heads agree.
    """
    B, H, L = positions.shape
    if mask.dim() != 4 or mask.shape[0] not in (1, B) or mask.shape[1] not in (1, heads):
        raise ObservationError(
            f"attention mask of shape {tuple(mask.shape)}: expected (batch 1 or {B}, heads 1 or {heads}, queries, "
            "tokens seen)"
        )
    Q, S = mask.shape[2], mask.shape[3]
    group = heads // H
    live = (positions >= 0).unsqueeze(2)  # (B, H, 1, L)
    index = columns.clamp_min(0).unsqueeze(2)  # (B, H, 1, L)
    if mask.shape[1] == 1:
        shown = mask.expand(B, H, Q, S).gather(-1, index.expand(B, H, Q, L))
        shown = _hide(shown, live)
        return shown if H == 1 or group == 1 else shown.repeat_interleave(group, 1)
    index = index.repeat_interleave(group, 1)
    shown = mask.expand(B, heads, Q, S).gather(-1, index.expand(B, heads, Q, L))
    return _hide(shown, live.repeat_interleave(group, 1))


def _hide(shown: Tensor, live: Tensor) -> Tensor:
    if shown.dtype == torch.bool:
        return shown & live
    return shown.masked_fill(~live, torch.finfo(shown.dtype).min)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask to add to logits, from a bool one."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
