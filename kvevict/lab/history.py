"""What was kept, and what evicted tokens would still have been worth.

``kvevict.kept`` reads what is held when from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict.lab.harness import Lane
from kvevict.lab.traces import Block, Trace
from kvevict.policies.base import reduce_group

Lanes = Mapping[tuple[str, int], Tensor]


@dataclass(frozen=True)
class History:
    """Tokens' fates in every lane, by (name, budget).

    left:   (layers, runs, H, length) int32, how many tokens had been seen when a token left; 0 if it never did.
    missed: (layers, runs, H, length) float64, the attention that an evicted token would have received from the queries
        after it left, mean over the KV head's query heads; 0 for tokens that never left.
    full:   (layers, runs, H, G) float64, what a cache that forgets nothing retains, mean over the queries.
    retained, recall: (runs, steps) float64 for each query, means over layers and query heads. A query's recall counts
        its heavy hitters against the mean of all queries', so that the mean over queries is the recall of all.
    """

    left: Lanes
    missed: Lanes
    full: Tensor
    retained: Lanes
    recall: Lanes


class Watch:
    """Follows lanes through a trace, one block after all of them, and adds up what evicted tokens miss."""

    def __init__(self, trace: Trace, lanes: Mapping[str, Lane]) -> None:
        self._trace, self._lanes = trace, lanes
        shape = (trace.layers * trace.runs, trace.heads, trace.length)
        self._received = torch.zeros(shape, dtype=torch.float64)  # by each token so far
        self._whole = torch.zeros(*shape[:2], trace.group, dtype=torch.float64)
        self._before = {
            name: torch.zeros(lane.rows, *shape[1:], dtype=torch.float64)  # what a token had received when it left
            for name, lane in lanes.items()
        }

    def run(self, block: Block) -> None:
        """Adds one block, through which every lane has been stepped."""
        sums = reduce_group(block.weights, "mean").double().cumsum(2)  # (T, H, q, W)
        queries, width = sums.shape[2:]
        newest = int(not self._trace.own)  # a token that no query has seen may leave already: it has received nothing
        sums = torch.nn.functional.pad(sums, (0, newest))  # (T, H, q, W | W + 1)
        self._whole += block.weights.double().sum((-2, -1))
        for name, lane in self._lanes.items():
            assert lane.left is not None
            step = lane.left - block.start - 1  # (B, H, length), the query after which a token left
            row, head, position = ((step >= 0) & (step < queries) & (lane.left > 0)).nonzero(as_tuple=True)
            owner = row // len(lane.budgets)  # the budget is the innermost part of a row
            received = self._received[owner, head, position] + sums[owner, head, step[row, head, position], position]
            self._before[name][row, head, position] = received
        self._received[..., :width] += sums[:, :, -1, :width]

    def history(self, possible: int) -> History:
        """What has been seen. ``possible``: the heavy hitters of all queries, for one query head."""
        trace = self._trace
        left, missed, retained, recall = {}, {}, {}, {}
        for name, lane in self._lanes.items():
            assert lane.left is not None
            shape = (trace.layers, trace.runs, len(lane.budgets), trace.heads, trace.length)
            gone = lane.left.view(shape)
            later = self._received.view(*shape[:2], 1, *shape[3:]) - self._before[name].view(shape)
            later = later.masked_fill(gone == 0, 0.0)
            for index, budget in enumerate(lane.budgets):
                left[name, budget], missed[name, budget] = gone[:, :, index], later[:, :, index]
                retained[name, budget], hits = lane.found[:, :, index]
                recall[name, budget] = hits * trace.steps / possible
        full = self._whole.unflatten(0, (trace.layers, trace.runs)) / trace.steps
        return History(left, missed, full, retained, recall)
