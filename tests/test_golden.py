"""The policies against kept sets that the methods' authors' own classes produced, token by token.

One driver is slow and obvious on purpose: Python lists, one softmax per query, one victim at a time. The other is
the layer that runs inside models.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from kvevict.layer import EvictingLayer
from kvevict.policies import H2O, TOVA, Attention, Policy, Scissorhands, SnapKV, StreamingLLM
from kvevict.policies.base import Held, Rows
from kvevict.spec import Spec

SHARED = Path(os.environ.get("KVEVICT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
GOLDEN = SHARED / "data" / "golden" / "eviction_traces.json"
HEADS, TOKENS, PROMPT = 4, 24, 8

pytestmark = pytest.mark.skipif(not GOLDEN.is_file(), reason=f"no golden traces at {GOLDEN}: set KVEVICT_SHARED")

H2O_MHA = (
    "h2o heavy=3 recent=3, 4 query heads = 4 KV heads; one list per step from the prompt cut (after token 7) on, "
    "one list per head"
)
H2O_FIRST = "h2o heavy=3 recent=3, 4 query heads over 2 KV heads, first query head of each group decides"
H2O_MEAN = "h2o heavy=3 recent=3, 4 query heads over 2 KV heads, group mean"
TOVA_ROW = "tova budget=6, one set for all heads, from the prompt cut on"
STREAMING = "streaming_llm sinks=2 recent=4, attend then evict; [attended, kept] per step"
SNAP_3 = (
    "snapkv at the end of a 24-token prompt, window=4 cap=10 kernel=3 average pool; per query head, unsorted + window"
)
SNAP_5 = "the same with kernel=5"
CUMULATIVE = "cumulative attention, mean over heads, budget=6 recent=3, shared by the layer"
EMA = "s <- 0.9 s + a per query, mean over heads, budget=6 recent=3, shared by the layer"
SCISSORHANDS = "scissorhands budget=8 recent=2 window=6, drops 3 at once; per head"


@pytest.fixture(scope="module")
def traces() -> dict:
    return json.loads(GOLDEN.read_text())["traces"]


def logit(head: int, query: int, key: int) -> float:
    return 6 * (((73856093 * head) ^ (19349663 * query) ^ (83492791 * key)) % 1009) / 1009 + 0.12 * key


def row(head: int, query: int, keys: list[int]) -> list[float]:
    """Softmax over the held keys that the query may see, and over nothing else."""
    exps = [math.exp(logit(head, query, key)) if key <= query else 0.0 for key in keys]
    return [e / sum(exps) for e in exps]


def drive_slowly(policy: Policy, budget: int, *, kv_heads: int, prompt: int = PROMPT) -> tuple[list, list]:
    """Attend, then evict: what each KV head attended to and then kept, forward by forward."""
    group = HEADS // kv_heads
    held: list[list[int]] = [[] for _ in range(kv_heads)]
    spec = policy.columns(budget)
    columns = {n: torch.empty(1, kv_heads, 0, *c.shape, dtype=c.dtype or torch.float64) for n, c in spec.items()}
    attended, kept = [], []
    for queries in [list(range(prompt))] + [[t] for t in range(prompt, TOKENS)]:
        seen = queries[-1] + 1
        held = [keys + queries for keys in held]
        for name, column in columns.items():
            new = torch.full((1, kv_heads, len(queries), *spec[name].shape), spec[name].fill, dtype=column.dtype)
            columns[name] = torch.cat([column, new], 2)
        state = Held(torch.tensor([held]), seen, budget, prompt=prompt, columns=columns)
        shown = queries[-policy.queries :] if policy.queries else []
        if shown:
            weights = [[[row(h * group + g, q, held[h]) for q in shown] for g in range(group)] for h in range(kv_heads)]
            policy.observe(state, Rows(torch.tensor([weights], dtype=torch.float64), torch.tensor([shown])))
        attended.append([sorted(keys) for keys in held])
        if len(held[0]) > budget:
            scores = policy.score(state).expand(1, kv_heads, -1)[0].tolist()
            keep = min(len(held[0]) - policy.at_once(budget), budget)
            stay = []
            for h, keys in enumerate(held):
                newest = seen - policy.recent_for(budget)
                free = [i for i, key in enumerate(keys) if policy.sinks <= key < newest]
                gone = sorted(free, key=lambda i: (scores[h][i], keys[i]))[: len(keys) - keep]
                stay.append([i for i in range(len(keys)) if i not in gone])
            held = [[keys[i] for i in slots] for keys, slots in zip(held, stay, strict=True)]
            columns = {
                name: torch.stack([column[0, h, slots] for h, slots in enumerate(stay)]).unsqueeze(0)
                for name, column in columns.items()
            }
        kept.append([sorted(keys) for keys in held])
    return attended, kept


def drive_layer(policy: Policy, budget: int, *, kv_heads: int, prompt: int = PROMPT) -> tuple[list, list]:
    """The same through the layer of a cache, whose slots are written in place and in any order."""
    group = HEADS // kv_heads
    layer = EvictingLayer(Spec(policy, budget, layers=1), 0)
    attended, kept = [], []
    for queries in [list(range(prompt))] + [[t] for t in range(prompt, TOKENS)]:
        new = torch.zeros(1, kv_heads, len(queries), 4)
        layer.update(new, new)
        held = layer.slot_positions[0].tolist()
        shown = queries[len(queries) - layer.wanted :] if layer.wanted else []
        rows = [[[row(h * group + g, q, held[h]) for q in shown] for g in range(group)] for h in range(kv_heads)]
        layer.observe([(len(queries) - len(shown), torch.tensor([rows]))] if shown else [])
        attended.append([sorted(keys) for keys in held])
        layer.settle()
        kept.append(layer.kept_positions()[0].tolist())
    return attended, kept


@pytest.fixture(params=[drive_slowly, drive_layer])
def drive(request):
    return request.param


def shared(kept: list) -> list:
    """One list per step, for policies whose heads must agree."""
    assert all(heads == [heads[0]] * len(heads) for heads in kept)
    return [heads[0] for heads in kept]


def test_the_file_has_no_trace_that_is_not_tested(traces):
    tested = {H2O_MHA, H2O_FIRST, H2O_MEAN, TOVA_ROW, STREAMING, SNAP_3, SNAP_5, CUMULATIVE, EMA, SCISSORHANDS}
    assert set(traces) == tested


@pytest.mark.parametrize(
    ("name", "policy", "budget", "kv_heads"),
    [
        (H2O_MHA, H2O(recent=3), 6, 4),
        (H2O_MHA, H2O(), 6, 4),  # half of the budget is 3
        (H2O_FIRST, H2O(group="first"), 6, 2),
        (H2O_MEAN, H2O(group="mean"), 6, 2),
        (H2O_MEAN, H2O(group="sum"), 6, 2),  # the same order
        (SCISSORHANDS, Scissorhands(window=6, recent=2, drop=0.375, level="held"), 8, 4),
    ],
    ids=["h2o", "h2o half recent", "h2o first", "h2o mean", "h2o sum", "scissorhands"],
)
def test_each_head_keeps_what_the_authors_kept(drive, traces, name, policy, budget, kv_heads):
    assert drive(policy, budget, kv_heads=kv_heads)[1] == traces[name]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "policy"),
    [(TOVA_ROW, TOVA()), (CUMULATIVE, Attention(recent=3)), (EMA, Attention(recent=3, decay=0.9))],
    ids=["tova", "cumulative", "ema"],
)
def test_the_layer_keeps_what_the_reference_kept(drive, traces, name, policy, kv_heads):
    assert shared(drive(policy, 6, kv_heads=kv_heads)[1]) == traces[name]


def test_streaming_llm_attends_and_keeps_what_the_authors_did(drive, traces):
    attended, kept = drive(StreamingLLM(sinks=2, recent=4), 6, kv_heads=4)
    assert [list(pair) for pair in zip(shared(attended), shared(kept), strict=True)] == traces[STREAMING]


@pytest.mark.parametrize("scores", ["rolling", "prompt"])
@pytest.mark.parametrize(("name", "kernel"), [(SNAP_3, 3), (SNAP_5, 5)])
def test_snapkv_cuts_the_prompt_as_the_authors_do(drive, traces, name, kernel, scores):
    policy = SnapKV(window=4, kernel=kernel, pool="avg", scores=scores)
    kept = drive(policy, 10, kv_heads=4, prompt=TOKENS)[1]
    assert kept == [[sorted(head) for head in traces[name]]]


def test_scissorhands_by_tokens_seen_is_another_policy(drive, traces):
    policy = Scissorhands(window=6, recent=2, drop=0.375, level="seen")
    assert drive(policy, 8, kv_heads=4)[1] != traces[SCISSORHANDS]
