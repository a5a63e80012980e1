"""Random sequences of everything a cache can be asked to do, against rows that live alone.

Each row of the batch is also fed to an evicting cache of its own that knows no other rows, no pads and no drafts. At
the end the rows' forwards are replayed by full attention under masks that hide what was evicted.
KVEVICT_MACHINE=500 runs that many sequences instead of a few.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from typing import Any

import torch
from helpers import NAMES, NOISE, OBSERVING, by_position, forward, kept, small, tiny
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvevict import EvictingCache, testing

VOCABULARY = 512
ROWS = 4
LONGEST = 90
"""Columns after which only operations without new tokens go on: the replay is quadratic."""

_models: dict[str, Any] = {}


def _model(implementation: str) -> Any:
    if implementation not in _models:
        _models[implementation] = tiny(implementation, vocab_size=VOCABULARY, num_hidden_layers=2)
    return _models[implementation]


class Row:
    """One row alone: its cache, its forwards, what each of its layers held before each, and the logits."""

    def __init__(self, model: Any, policy: Any, budget: float) -> None:
        self.model = model
        self.cache = EvictingCache(model, policy, budget=budget)
        self.blocks: list[Tensor] = []
        self.held: list[list[Tensor]] = []
        self.logits: list[Tensor] = []

    def feed(self, block: Tensor) -> Tensor:
        """The logits of a block (1, Q), possibly of no tokens."""
        if block.shape[1]:
            self.blocks.append(block)
            self.held.append([positions.clone() for positions in kept(self.cache)])
            self.logits.append(forward(self.model, self.cache, block, positions=True))
        return self.logits[-1] if block.shape[1] else torch.empty(1, 0, VOCABULARY)

    def copy(self) -> Row:
        """The same row, apart from it."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        other.blocks, other.held, other.logits = list(self.blocks), list(self.held), list(self.logits)
        return other


class Machine(RuleBasedStateMachine):
    """A batch of rows in one cache."""

    @initialize(
        name=st.sampled_from(NAMES),
        implementation=st.sampled_from(["sdpa", "eager"]),
        budget=st.sampled_from([6, 9, 0.4, 200]),
        lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3) | st.integers(1, 3).map(lambda rows: [9] * rows),
        every=st.sampled_from([1, 1, 1, 3]),
    )
    def prompt(self, name: str, implementation: str, budget: float, lengths: list[int], every: int) -> None:
        """Rows of different length, padded on the left."""
        self.name, self.budget = name, budget
        self.model = _model(implementation)
        self.policy = small(name, evict_every=every)
        self.drafts = name != "adaptive_ema" and not (implementation == "eager" and name in OBSERVING)
        self.drawn = 0
        self._begin(lengths)

    def _begin(self, lengths: list[int]) -> None:
        self.cache = EvictingCache(self.model, self.policy, budget=self.budget)
        self.rows = [Row(self.model, self.policy, self.budget) for _ in lengths]
        self.mask = torch.zeros(len(lengths), 0, dtype=torch.long)
        self._forward(max(lengths), [max(lengths) - length for length in lengths])

    def _tokens(self, queries: int) -> Tensor:
        """Tokens that no row has seen: equal tokens have equal keys in the first layer, and rounding would decide."""
        fresh = torch.arange(self.drawn, self.drawn + len(self.rows) * queries) % (VOCABULARY - 1) + 1
        self.drawn += fresh.numel()
        return fresh.view(len(self.rows), queries)

    def _feed(self, block: Tensor, pads: list[int]) -> Tensor:
        real = torch.ones_like(block)
        for row, missing in enumerate(pads):
            real[row, :missing] = 0
        self.mask = torch.cat([self.mask, real], 1)
        mask = None if bool(self.mask.all()) else self.mask
        return forward(self.model, self.cache, block, mask, positions=True)

    def _forward(self, queries: int, pads: list[int] | None = None) -> None:
        pads = pads or [0] * len(self.rows)
        block = self._tokens(queries)
        logits = self._feed(block, pads)
        for index, (row, missing) in enumerate(zip(self.rows, pads, strict=True)):
            own = row.feed(block[index : index + 1, missing:])
            assert (logits[index, missing:] - own[0]).abs().max() < NOISE

    @precondition(lambda self: self.mask.shape[1] < LONGEST)
    @rule(queries=st.sampled_from([1, 1, 1, 1, 2, 3, 6]))
    def more(self, queries: int) -> None:
        """A decode step or a turn."""
        self._forward(queries)

    @precondition(lambda self: self.mask.shape[1] < LONGEST)
    @rule(steps=st.integers(3, 8))
    def decode(self, steps: int) -> None:
        """Steps that are all alike, with nobody looking at the books in between."""
        for _ in range(steps):
            self._forward(1)

    @precondition(lambda self: self.drafts and self.mask.shape[1] < LONGEST)
    @rule(queries=st.integers(1, 5), accepted=st.integers(0, 5))
    def draft(self, queries: int, accepted: int) -> None:
        """Several tokens in one forward, of which the last are taken back."""
        accepted = min(accepted, queries)
        self.cache.activate_past_recording()
        before, block = self.mask, self._tokens(queries)
        logits = self._feed(block, [0] * len(self.rows))
        self.cache.crop(accepted - queries)
        for layer in self.cache.evicting_layers:
            layer.record_past = False
        self.mask = torch.cat([before, torch.ones_like(block[:, :accepted])], 1)
        for index, row in enumerate(self.rows):
            for step in range(accepted):
                own = row.feed(block[index : index + 1, step : step + 1])
                assert (logits[index, step] - own[0, 0]).abs().max() < NOISE

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        """Beams: any row may become any other."""
        order = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=len(self.rows),
                                   max_size=len(self.rows)))  # fmt: skip  # one draw
        self.cache.reorder_cache(torch.tensor(order))
        self._pick(order)

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        """Some rows end."""
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=len(self.rows),
                                    unique=True))  # fmt: skip  # one draw
        self.cache.batch_select_indices(torch.tensor(chosen))
        self._pick(chosen)

    @precondition(lambda self: len(self.rows) * 2 <= ROWS)
    @rule()
    def repeat(self) -> None:
        """Several continuations of each row."""
        self.cache.batch_repeat_interleave(2)
        self._pick([index for index in range(len(self.rows)) for _ in range(2)])

    def _pick(self, rows: list[int]) -> None:
        self.rows = [self.rows[index].copy() for index in rows]
        self.mask = self.mask[rows]

    @rule()
    def deepcopy(self) -> None:
        """The copy goes on; what the original does afterwards must not reach it."""
        original, self.cache = self.cache, copy.deepcopy(self.cache)
        forward(self.model, original, torch.ones(len(self.rows), 2, dtype=torch.long),
                torch.cat([self.mask, self.mask.new_ones(len(self.rows), 2)], 1))  # fmt: skip  # one call

    @rule()
    def save_and_load(self) -> None:
        """Through files."""
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(folder)
            self.cache = EvictingCache.load(self.model, folder)

    @rule()
    def unpickle(self) -> None:
        """Through a pickle."""
        self.cache = pickle.loads(pickle.dumps(self.cache)).attach(self.model)

    @rule(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3))
    def reset(self, lengths: list[int]) -> None:
        """Another batch in the same cache."""
        self._replay()
        used = self.cache
        used.reset()
        self._begin(lengths)
        fresh, self.cache = self.cache, used
        self.mask = self.mask[:, :0]
        blocks = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for index, row in enumerate(self.rows):
            blocks[index, max(lengths) - lengths[index] :] = row.blocks[0][0]
        self._feed(blocks, [max(lengths) - length for length in lengths])
        assert all(torch.equal(*pair) for pair in zip(kept(fresh), kept(used), strict=True))

    @invariant()
    def rows_are_alone(self) -> None:
        """What is kept, and what the policy knows of it, is each row's own."""
        if not hasattr(self, "rows"):
            return
        together, columns = kept(self.cache), by_position(self.cache)
        for index, row in enumerate(self.rows):
            own = by_position(row.cache)
            for layer, positions in enumerate(kept(row.cache)):
                width = positions.shape[-1]
                assert torch.equal(together[layer][index, :, :width], positions[0])
                assert (together[layer][index, :, width:] == -1).all()
                for column, values in own[layer].items():
                    torch.testing.assert_close(
                        columns[layer][column][index, :, :width], values[0], rtol=1e-4, atol=NOISE
                    )

    def _replay(self) -> None:
        for row in self.rows[:2]:
            expected = testing.replay(_model_unprepared(), row.held, row.blocks)
            for one, other in zip(row.logits, expected, strict=True):
                assert (one - other).abs().max() < 2 * NOISE

    def teardown(self) -> None:
        """Full attention under masks."""
        if hasattr(self, "rows"):
            self._replay()


def _model_unprepared() -> Any:
    """An eager model that no cache was built for."""
    if "reference" not in _models:
        _models["reference"] = tiny("eager", vocab_size=VOCABULARY, num_hidden_layers=2)
    return _models["reference"]


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("KVEVICT_MACHINE", "40")),
    stateful_step_count=20,
    deadline=None,  # the first example builds the models
    derandomize="KVEVICT_MACHINE" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),  # forwards are slow and states large: that is the point
)
