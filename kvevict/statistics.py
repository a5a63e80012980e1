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
"""Queries per block on an accelerator."""
CPU_BLOCK, CPU_WEIGHTS = 128, 5 * 2**20
"""Queries per block on a CPU and weights per block, at most: 20 MiB, for the sake of its caches."""


def block_queries(rows: int, slots: int, device: torch.device) -> int:
    """Queries per block, for ``rows`` = batch x heads and ``slots`` keys."""
    if device.type != "cpu":
        return BLOCK
    size = CPU_BLOCK
    while size > 16 and rows * size * slots > CPU_WEIGHTS:
        size //= 2
    return size


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
    block may see, and every hidden weight is exactly zero. The next block is written over them.
    """
    B, heads, Q, D = query.shape
    H, L = keys.shape[1], keys.shape[2]
    G = heads // H
    start = max(0, Q - last)
    size = min(block_queries(B * heads, L, query.device), Q - start)
    parts = _parts(B * H, G * size, query.device) if Q - start > size else 1
    keys = _repeated(keys.float(), parts)  # (B * H * parts, L, D)
    if values is not None:
        values = _repeated(values, parts)
    in_place = query.device.type == "cpu"  # where a softmax may be written over its input; nobody says so elsewhere
    room = torch.empty(B * heads * size * L, dtype=torch.float32, device=query.device)  # of every block in turn
    future = None
    if mask is None and size > 1:
        future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
    for a in range(start, Q, size):
        b = min(a + size, Q)
        slots = L if mask is not None else L - Q + b
        step = 1 if b - a == size else parts  # the last block may be too short to be cut
        block = query[:, :, a:b].reshape(B * H * (parts // step), -1, D).float() * scaling
        seen = keys[::step, :slots]
        flat = room[: B * heads * (b - a) * slots]
        _product(block, seen.transpose(1, 2), flat.view(*block.shape[:2], slots))
        logits = flat.view(B, H, G, b - a, slots)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        asks = None  # which queries see anything
        if mask is not None:
            part = mask[:, :, a:b]
            part = part.unsqueeze(1) if part.shape[1] == 1 else part.unflatten(1, (H, G))  # (B, 1 | H, 1 | G, q, L)
            shown = visible(part)
            asks = shown.any(-1, keepdim=True)  # the softmax over nothing at all would be NaN
            hiding = torch.where(asks, float("-inf"), 0.0)
            logits.add_(torch.where(shown, 0.0 if part.dtype == torch.bool else part, hiding))  # faster than filling
        elif future is not None:
            # filled, not added to: whatever a later key holds, nothing of it reaches these rows
            logits[..., slots - (b - a) :].masked_fill_(future[: b - a, : b - a], float("-inf"))
        if sinks is not None:
            column = sinks.float().view(1, H, G, 1, 1).expand(B, H, G, b - a, 1)
            weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
        else:
            weights = torch.softmax(logits, -1, out=logits if in_place else None)
        if asks is not None:
            weights.mul_(asks)
        if values is not None and output is not None:
            part = weights.to(values.dtype).reshape(*block.shape[:2], slots)
            attended = torch.bmm(part, values[::step, :slots])
            output[:, a:b] = attended.view(B, H, G, b - a, -1).permute(0, 3, 1, 2, 4).reshape(B, b - a, heads, -1)
        yield a, weights


def _parts(matrices: int, rows: int, device: torch.device) -> int:
    """Into how many parts each of ``matrices`` is cut by its rows, so that threads which take one each end together."""
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads()
    possible = [parts for parts in range(1, 5) if rows % parts == 0 and rows // parts >= 32]
    return min(possible, key=lambda parts: (-(-matrices * parts // threads) / parts, parts), default=1)


def _repeated(stored: Tensor, times: int) -> Tensor:
    """Each KV head ``times`` times in a row: (B, H, L, D) -> (B * H * times, L, D)."""
    return stored.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(0, 2)


def _product(one: Tensor, other: Tensor, room: Tensor) -> None:
    """Writes ``torch.bmm`` of float32 tensors to ``room`` in float32, under autocast too."""
    if not torch.is_autocast_enabled(one.device.type):
        torch.bmm(one, other, out=room)
    else:
        with torch.autocast(one.device.type, enabled=False):
            torch.bmm(one, other, out=room)


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
