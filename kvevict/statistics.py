"""Attention rows recomputed from the query and key tensors that the attention used.

Only the rows that a policy declares are computed, in blocks of a few queries, so that a long prompt never
makes a matrix of queries by keys. Everything is float32, whatever the model's type.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvevict.masks import visible

BLOCK = 64
"""Queries per block."""
CPU_BLOCK = 32
"""Queries per block on a CPU, whose caches hold that many rows of a few thousand tokens: more measured slower."""


def attention_rows(
    query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    last: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    values: Tensor | None = None,
    output: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Softmax rows of the last ``last`` queries, block by block, oldest first.

    query: (B, heads, Q, D); keys: (B, H, L, D), the newest Q keys last unless a mask says otherwise.
    mask:  None (causal, or one query that sees all), or (B, 1 | heads, Q, L), bool or additive float.
    sinks: (heads,) learned sink logits, which take their share of the softmax (gpt-oss).
    values, output: (B, H, L, D) and (B, Q, heads, D); with both, the attention's output is written as well.
    Yields (index of the block's first query, weights (B, H, G, q, l)) where l <= L covers the slots that the
    block may see, and every hidden weight is exactly zero.
    """
    B, heads, Q, D = query.shape
    H, L = keys.shape[1], keys.shape[2]
    G = heads // H
    start = max(0, Q - last)
    size = CPU_BLOCK if query.device.type == "cpu" else BLOCK
    for a in range(start, Q, size):
        b = min(a + size, Q)
        slots = L if mask is not None else L - Q + b
        block = query if b - a == Q else query[:, :, a:b]
        block = block.reshape(B * H, G * (b - a), D).float() * scaling
        seen = keys if slots == L else keys.narrow(2, 0, slots)
        logits = _product(block, seen.reshape(B * H, slots, D).float().transpose(1, 2)).view(B, H, G, b - a, slots)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        shown = None
        if mask is not None:
            part = mask[:, :, a:b]
            part = part.unsqueeze(1) if part.shape[1] == 1 else part.unflatten(1, (H, G))  # (B, 1 | H, 1 | G, q, L)
            if part.dtype != torch.bool:
                logits = logits + part.float()
            shown = visible(part)
            logits = logits.masked_fill(~shown, float("-inf"))
        elif b - a > 1:
            hidden = torch.ones(b - a, b - a, dtype=torch.bool, device=logits.device).triu(1)
            logits[..., slots - (b - a) :].masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, H, G, 1, 1).expand(B, H, G, b - a, 1)
            weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        if shown is not None:
            weights = weights.masked_fill(~shown, 0.0)  # a pad's row is all hidden: its softmax is NaN
        if values is not None and output is not None:
            part = weights.to(values.dtype).view(B * H, G * (b - a), slots)
            attended = torch.bmm(part, values.narrow(2, 0, slots).reshape(B * H, slots, -1))
            output[:, a:b] = attended.view(B, H, G, b - a, -1).permute(0, 3, 1, 2, 4).reshape(B, b - a, heads, -1)
        yield a, weights


def _product(one: Tensor, other: Tensor) -> Tensor:
    """``torch.bmm`` of float32 tensors in float32, under autocast too."""
    if not torch.is_autocast_enabled(one.device.type):
        return torch.bmm(one, other)
    with torch.autocast(one.device.type, enabled=False):
        return torch.bmm(one, other)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The attention of one query that sees every slot: its output (B, 1, heads, D), and weights (B * H, G, L) float32.

    query: (B, heads, 1, D); keys: (B * H, D, L); values: (B * H, L, D).
    room:  where to write the weights.
    The weights equal those of ``attention_rows`` bit for bit.
    """
    B, heads, _, D = query.shape
    asked = query.reshape(keys.shape[0], -1, D)
    if asked.dtype != torch.float32:
        asked, keys = asked.float(), keys.float()
    weights = torch.softmax(torch.bmm(asked * (D**-0.5 if scaling is None else scaling), keys), -1, out=room)
    output = torch.bmm(weights if weights.dtype == values.dtype else weights.to(values.dtype), values)
    return output.view(B, 1, heads, -1), weights
