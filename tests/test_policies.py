"""What each policy scores, on examples small enough to check by eye, and what all of them promise."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest
import torch
from torch import Tensor

from kvevict.errors import OptionError, PolicyError
from kvevict.policies import (
    H2O,
    POLICIES,
    TOVA,
    AdaptiveEMA,
    Attention,
    Full,
    KeyNorm,
    Policy,
    PyramidKV,
    Random,
    Scissorhands,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
    make_policy,
)
from kvevict.policies.base import Held, Rows

INF = float("inf")
NOISE = 1e-12  # float64 sums of a few dozen weights in another order

VARIANTS = [
    Full(),
    SlidingWindow(),
    StreamingLLM(),
    Attention(),
    Attention(decay=0.8),
    H2O(),
    H2O(group="max"),
    TOVA(),
    Scissorhands(),
    Scissorhands(window=5, level="seen"),
    Scissorhands(window=None),
    SnapKV(window=4, kernel=3),
    SnapKV(window=4, kernel=3, pool="max", pool_over="held"),
    SnapKV(window=4, kernel=3, scores="prompt"),
    PyramidKV(window=4),
    AdaptiveEMA(),
    AdaptiveEMA(rebuild=0),
    Random(seed=3),
    KeyNorm(),
]


def hold(policy: Policy, positions: list, *, budget: int = 8, **extra: object) -> Held:
    """A layer that holds ``positions``: one list for all, or lists (B, H, L)."""
    at = torch.tensor(positions)
    at = at.view(1, 1, -1) if at.dim() == 1 else at
    columns = {
        name: torch.full((*at.shape, *c.shape), c.fill, dtype=c.dtype or torch.float64)
        for name, c in policy.columns(budget).items()
    }
    seen = extra.pop("seen", int(at.max()) + 1)
    return Held(at, seen, budget, columns=columns, **{"prompt": seen, **extra})  # type: ignore[arg-type]


def show(policy: Policy, held: Held, weights: list[list[float]], queries: list[int]) -> None:
    """One head's weights, (queries, slots)."""
    policy.observe(held, Rows(torch.tensor(weights, dtype=torch.float64)[None, None, None], torch.tensor([queries])))


def attention(tokens: int, heads: int = 2, group: int = 2, seed: int = 0) -> Tensor:
    """Causal softmax weights of one row: (H, G, tokens, tokens), sharp enough to be uneven."""
    logits = 2 * torch.randn(heads, group, tokens, tokens, dtype=torch.float64, generator=torch.manual_seed(seed))
    return logits.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -INF).softmax(-1)


def keys(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, 4, generator=torch.manual_seed(100 + seed))


def feed(policy: Policy, rows: list[int], columns: int, blocks: list[int], *, one_forward: bool = False) -> Held:
    """A batch of rows with so many real tokens each, left-padded to ``columns``, observed in blocks of these sizes.

    Each block is a forward of its own, or all are blocks of one forward.
    """
    at = torch.full((len(rows), columns), -1)
    weights = torch.zeros(len(rows), 2, 2, columns, columns, dtype=torch.float64)
    stored = torch.zeros(len(rows), 2, columns, 4)
    for b, n in enumerate(rows):
        at[b, columns - n :] = torch.arange(n)
        weights[b, :, :, columns - n :, columns - n :] = attention(n, seed=b)
        stored[b, :, columns - n :] = keys(n, seed=b)
    held = hold(policy, at[:, None].expand(-1, 2, -1).tolist(), keys=stored)
    start = 0
    for size in blocks:
        stop = start + size
        arrived = columns if one_forward else stop
        held.seen = arrived if rows == [columns] else (at[:, :arrived] >= 0).sum(1).view(-1, 1, 1)
        held.prompt = held.seen
        policy.admit(held.narrow(start, stop))
        first = max(start, arrived - policy.queries)
        if first < stop:
            known = first if one_forward and rows == [columns] else None
            policy.observe(held.first(stop), Rows(weights[:, :, :, first:stop, :stop], at[:, first:stop], start=known))
        start = stop
    assert start == columns
    return held


# -- every policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
@pytest.mark.parametrize("one_forward", [True, False])
@pytest.mark.parametrize("blocks", [[3, 9], [6, 6], [1] * 12, [5, 1, 6]], ids=str)
def test_scores_do_not_depend_on_how_the_text_was_cut(policy, blocks, one_forward):
    whole = policy.score(feed(policy, [12], 12, [12]))
    pieces = policy.score(feed(policy, [12], 12, blocks, one_forward=one_forward))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=NOISE)


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
@pytest.mark.parametrize("blocks", [[12], [4, 8], [1] * 12], ids=str)
def test_a_left_padded_row_is_the_row_alone(policy, blocks):
    batch = feed(policy, [12, 7, 0], 12, blocks)
    alone = feed(policy, [12], 12, blocks)
    short = feed_second_row_alone(policy, 7)
    scores = policy.score(batch).expand(3, 2, 12)
    torch.testing.assert_close(scores[0], policy.score(alone).expand(1, 2, 12)[0], rtol=0, atol=NOISE)
    torch.testing.assert_close(scores[1, :, 5:], policy.score(short).expand(1, 2, 7)[0], rtol=0, atol=NOISE)
    for name, column in policy.columns(8).items():
        torch.testing.assert_close(batch[name][1, :, 5:], short[name][0], rtol=0, atol=NOISE)
        fresh = torch.full_like(batch[name][2], column.fill)
        assert name == "norm" or torch.equal(batch[name][2], fresh), "a row of pads wrote to its state"


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_pads_after_the_text_change_nothing(policy):
    """One row is over while another goes on: the first sees a block of pads, then a block that ends in pads."""
    held = feed(policy, [12, 12], 12, [12])
    held.seen = held.prompt = torch.tensor([[[12]], [[12]]])
    before = {name: column.clone() for name, column in held.columns.items()}
    scores = policy.score(held).clone()
    weights = attention(12)[None, :, :, -3:].repeat(2, 1, 1, 1, 1)
    weights[1] = 0
    if policy.queries:
        policy.observe(held, Rows(weights, torch.tensor([[9, 10, 11], [-1, -1, -1]])))
    for name, column in held.columns.items():
        torch.testing.assert_close(column[1], before[name][1], rtol=0, atol=0)
    torch.testing.assert_close(policy.score(held)[1], scores[1], rtol=0, atol=0)


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_pads_at_the_end_of_a_block_change_nothing(policy):
    padded, plain = feed(policy, [12], 12, [12]), feed(policy, [12], 12, [12])
    weights = attention(12, seed=9)[None, :, :, -3:]
    if policy.queries:
        policy.observe(plain, Rows(weights[:, :, :, :2], torch.tensor([[9, 10]])))
        weights[:, :, :, 2] = 0
        policy.observe(padded, Rows(weights, torch.tensor([[9, 10, -1]])))
    torch.testing.assert_close(policy.score(padded), policy.score(plain), rtol=0, atol=NOISE)


def feed_second_row_alone(policy: Policy, tokens: int) -> Held:
    """The row that ``feed`` gives as its second, without padding."""
    held = hold(policy, [[list(range(tokens))] * 2], keys=keys(tokens, seed=1)[None])
    policy.admit(held)
    last = max(0, tokens - policy.queries)
    if policy.queries:
        weights = attention(tokens, seed=1)[None, :, :, last:]
        policy.observe(held, Rows(weights, torch.arange(last, tokens)[None]))
    return held


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_scores_have_the_promised_shape_and_no_nan(policy):
    scores = policy.score(feed(policy, [12, 7], 12, [12]))
    assert scores.shape in ((2, 2, 12), (2, 1, 12))
    assert not scores.isnan().any()


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_slots_may_be_in_any_order(policy):
    order = torch.randperm(12, generator=torch.manual_seed(5))
    whole = feed(policy, [12], 12, [12])
    held = hold(policy, order.expand(1, 2, -1).tolist(), keys=keys(12)[None, :, order])
    policy.admit(held)
    last = max(0, 12 - policy.queries)
    if policy.queries:
        policy.observe(held, Rows(attention(12)[None, :, :, last:, order], torch.arange(last, 12)[None]))
    torch.testing.assert_close(policy.score(held), policy.score(whole)[..., order], rtol=0, atol=NOISE)


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_an_empty_slot_changes_nothing(policy):
    whole = feed(policy, [12], 12, [12])
    held = hold(policy, [[[*range(5), -1, *range(5, 12), -1]] * 2], keys=torch.zeros(1, 2, 14, 4))
    real = held.positions[0, 0] >= 0
    held.keys[:, :, real] = keys(12)
    policy.admit(held)
    last = max(0, 12 - policy.queries)
    if policy.queries:
        weights = torch.zeros(1, 2, 2, 12, 14, dtype=torch.float64)
        weights[..., real] = attention(12)
        policy.observe(held, Rows(weights[:, :, :, last:], torch.arange(last, 12)[None]))
    torch.testing.assert_close(policy.score(held)[..., real], policy.score(whole), rtol=0, atol=NOISE)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_one_file_with_one_name(name):
    policy = POLICIES[name]
    assert policy.name == name
    assert policy.__module__ == f"kvevict.policies.{name}"
    assert [p for p in vars(importlib.import_module(policy.__module__)).values() if p is policy] == [policy]
    doc = policy.__doc__ or ""
    assert doc.startswith("Keeps ")
    assert "Source: " in doc
    assert "Differs from the " in doc


def test_every_policy_is_tried_above():
    assert {type(policy) for policy in VARIANTS} == set(POLICIES.values())


@pytest.mark.parametrize("policy", VARIANTS, ids=repr)
def test_policies_are_frozen_and_compare_by_value(policy):
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.sinks = 3
    assert policy == dataclasses.replace(policy)
    assert hash(policy) == hash(dataclasses.replace(policy))


# -- names and options -------------------------------------------------------------------------------------


def test_make_policy_takes_a_name_with_options_or_an_instance():
    ready = TOVA(recent=2)
    assert make_policy("h2o", recent=32) == H2O(recent=32)
    assert make_policy(ready) is ready


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("H2O", {}, r"'H2O' \(did you mean 'h2o'\?\); there are: full, "),
        ("stream-llm", {}, "did you mean 'streaming_llm'"),
        ("zzz", {}, "no policy is named 'zzz'; there are"),
        ("h2o", {"recents": 3}, r"'h2o' has no option 'recents' \(did you mean 'recent'\?\); it takes: sinks, recent"),
        (TOVA(), {"recent": 3}, r"recent given with a finished TOVA\("),
        (H2O, {}, r"H2O is a class: pass an instance, H2O\(\)"),
        (7, {}, "policy=7: expected a policy such as"),
        (dict, {}, "expected a policy such as"),
    ],
)
def test_make_policy_says_what_is_wrong(policy, options, message):
    with pytest.raises(OptionError, match=message):
        make_policy(policy, **options)


@pytest.mark.parametrize(
    ("name", "option", "bad"),
    [(name, "sinks", bad) for name in POLICIES for bad in (-1, 1.5, True)]
    + [(name, "protect_prompt", bad) for name in POLICIES for bad in (0, 1.5, "all")]
    + [
        ("streaming_llm", "positions", "rolling"),
        ("attention", "decay", 0),
        ("attention", "decay", 1.1),
        ("attention", "decay", math.nan),
        ("attention", "decay", "1"),
        ("h2o", "group", "median"),
        ("h2o", "recent", -1),
        ("scissorhands", "window", 0),
        ("scissorhands", "window", 2.0),
        ("scissorhands", "drop", -0.1),
        ("scissorhands", "drop", 1.1),
        ("scissorhands", "level", "all"),
        ("scissorhands", "group", None),
        ("snapkv", "window", 0),
        ("snapkv", "kernel", 4),
        ("snapkv", "kernel", 0),
        ("snapkv", "pool", "min"),
        ("snapkv", "group", ""),
        ("snapkv", "scores", "once"),
        ("snapkv", "pool_over", "all"),
        ("pyramidkv", "beta", 0.5),
        ("pyramidkv", "beta", math.inf),
        ("pyramidkv", "rounding", "floor"),
        ("adaptive_ema", "beta_low", -0.1),
        ("adaptive_ema", "beta_high", 0.5),  # below beta_low
        ("adaptive_ema", "rebuild", 2),
        ("adaptive_ema", "recency", -1),
        ("adaptive_ema", "age", math.inf),
        ("random", "seed", 1.0),
    ],
)
def test_bad_options_are_named(name, option, bad):
    with pytest.raises(OptionError, match=rf"{POLICIES[name].__name__}\({option}="):
        make_policy(name, **{option: bad})


# -- one by one --------------------------------------------------------------------------------------------


def test_only_full_never_evicts():
    assert [name for name, policy in POLICIES.items() if not policy().evicts] == ["full"]


@pytest.mark.parametrize("policy", [Full(), SlidingWindow(), StreamingLLM()], ids=repr)
def test_positions_stay_exact_beyond_what_float32_counts(policy):
    held = hold(policy, [2**24, 2**24 + 1, 2**24 + 2])
    assert policy.score(held).tolist() == [[[2**24, 2**24 + 1, 2**24 + 2]]]
    assert policy.queries == 0


def test_attention_adds_up_and_decays_by_query():
    held = hold(Attention(decay=0.5), [0, 1, 2])
    show(Attention(decay=0.5), held, [[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]], [0, 1, 2])
    assert Attention().score(held).tolist() == [[[0.25 + 0.125 + 0.5, 0.375 + 0.25, 0.25]]]


def test_attention_is_the_mean_over_all_query_heads():
    held = hold(Attention(), [[[0, 1], [0, 1]]])
    weights = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]], [[0.0, 1.0]], [[0.5, 0.5]]], dtype=torch.float64)
    Attention().observe(held, Rows(weights.view(1, 2, 2, 1, 2), torch.tensor([[1]])))
    assert Attention().score(held).tolist() == [[[0.5, 0.5]]]


def test_attention_that_forgets_at_once_is_tova():
    forgetful = Attention(decay=1e-200)
    torch.testing.assert_close(
        forgetful.score(feed(forgetful, [12], 12, [12])), TOVA().score(feed(TOVA(), [12], 12, [12])), rtol=0, atol=NOISE
    )


def test_tova_keeps_the_last_real_query_of_each_row():
    held = hold(TOVA(), [[[0, 1, 2]], [[0, 1, -1]], [[0, 1, 2]]])
    weights = torch.tensor([[[0.5, 0.5, 0], [0.2, 0.3, 0.5]], [[0.4, 0.6, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
    TOVA().observe(held, Rows(weights.double()[:, None, None], torch.tensor([[1, 2], [1, -1], [-1, -1]])))
    expected = torch.tensor([[[0.2, 0.3, 0.5]], [[0.4, 0.6, 0.0]], [[INF, INF, INF]]]).double()
    torch.testing.assert_close(TOVA().score(held), expected, rtol=0, atol=1e-7)  # the weights above are float32


def test_a_token_no_query_has_seen_is_not_tovas_victim():
    held = hold(TOVA(), [0, 1, 2])
    show(TOVA(), held.first(2), [[0.9, 0.1]], [2])
    assert TOVA().score(held).tolist() == [[[0.9, 0.1, INF]]]


@pytest.mark.parametrize(
    ("group", "expected"), [("mean", [0.5, 0.5]), ("max", [0.75, 0.75]), ("sum", [1, 1]), ("first", [0.25, 0.75])]
)
def test_h2o_reduces_query_heads_as_told(group, expected):
    policy = H2O(group=group)
    held = hold(policy, [0, 1])
    weights = torch.tensor([[0.25, 0.75], [0.75, 0.25]], dtype=torch.float64).view(1, 1, 2, 1, 2)
    policy.observe(held, Rows(weights, torch.tensor([[1]])))
    assert policy.score(held).tolist() == [[expected]]


def test_h2o_protects_half_of_the_budget_unless_told():
    assert H2O().recent_for(9) == 4
    assert H2O().recent_for(torch.tensor([[[9]], [[6]]])).tolist() == [[[4]], [[3]]]
    assert H2O(recent=2).recent_for(9) == 2
    for sinks in range(5):
        least = H2O(sinks=sinks).least()
        fits = [b for b in range(1, 20) if sinks + b // 2 <= b]
        assert least == fits[0]


def test_h2o_without_heavy_hitters_is_a_sliding_window():
    """With recent = budget the only candidate is the oldest token, whatever it scored."""
    held = feed(H2O(recent=11), [12], 12, [12])
    unprotected = held.positions[0, 0] < held.seen - H2O(recent=11).recent_for(11)
    assert held.positions[0, 0][unprotected].tolist() == [SlidingWindow().score(held)[0, 0].min().item()]


def test_scores_keep_adding_where_bfloat16_would_stop():
    held = hold(H2O(), [0, 1])
    held.columns["score"] = held.columns["score"].float()
    for _ in range(1000):
        H2O().observe(held, Rows(torch.full((1, 1, 1, 1, 2), 0.1), torch.tensor([[1]])))
    torch.testing.assert_close(H2O().score(held), torch.full((1, 1, 2), 100.0), rtol=0, atol=1e-2)  # 1000 roundings


def test_scissorhands_counts_below_uniform_in_the_last_queries():
    policy = Scissorhands(window=2)
    held = hold(policy, [0, 1, 2])
    show(policy, held, [[1, 0, 0], [0.4, 0.6, 0], [0.1, 0.2, 0.7]], [0, 1, 2])
    assert policy.score(held).tolist() == [[[-2, -1, 0]]]
    show(policy, held, [[0.5, 0.1, 0.4]], [3])  # takes the place of query 1
    assert policy.score(held).tolist() == [[[-1, -2, 0]]]


@pytest.mark.parametrize("window", [1, 7, 8, 9, 17, 400])
def test_scissorhands_bits_agree_with_a_plain_count(window):
    policy = Scissorhands(window=window)
    weights = attention(40, heads=2, group=1)[:, 0]  # (H, Q, L)
    held = hold(policy, [[list(range(40))] * 2])
    for a, b in [(0, 13), (13, 14), (14, 40)]:
        policy.observe(held.first(b), Rows(weights[None, :, None, a:b, :b], torch.arange(a, b)[None]))
    counted = [
        [-sum(weights[h, q, k].item() < 1 / (q + 1) for q in range(max(k, 40 - window), 40)) for k in range(40)]
        for h in range(2)
    ]
    assert policy.score(held)[0].tolist() == counted


def test_scissorhands_levels_differ_once_something_was_evicted():
    scores = {}
    for level in ("held", "seen"):
        policy = Scissorhands(level=level)
        held = hold(policy, [0, 8, 9])  # ten seen, three held
        show(policy, held, [[0.6, 0.2, 0.2]], [9])
        scores[level] = policy.score(held).tolist()
    assert scores == {"held": [[[0, -1, -1]]], "seen": [[[0, 0, 0]]]}


def test_scissorhands_without_a_window_counts_what_was_important():
    policy = Scissorhands(window=None)
    held = hold(policy, [0, 1])
    show(policy, held, [[1, 0], [0.5, 0.5], [0.75, 0.25]], [0, 1, 1])
    assert policy.score(held).tolist() == [[[1, 0]]]  # strictly above 1/t: 1 of 1, half of 2 and 1 alone are not


def test_scissorhands_drops_a_share_of_the_budget_at_once():
    assert [Scissorhands(drop=drop).at_once(8) for drop in (0, 0.1, 0.5, 1)] == [1, 1, 4, 8]
    assert Scissorhands(drop=0.3).at_once(torch.tensor([[[10]], [[4]]])).tolist() == [[[3]], [[1]]]


def test_snapkv_pools_over_neighbours_and_spares_the_window():
    held = hold(SnapKV(window=1, kernel=3), [0, 1, 2, 3, 4])
    show(SnapKV(window=1, kernel=3), held, [[0.3, 0, 0, 0.6, 0.1]], [4])
    average = SnapKV(window=1, kernel=3).score(held)
    torch.testing.assert_close(average, torch.tensor([[[0.1, 0.1, 0.2, 0.2, INF]]]).double(), rtol=0, atol=1e-7)
    assert SnapKV(window=1, kernel=3, pool="max").score(held).tolist() == [[[0.3, 0.3, 0.6, 0.6, INF]]]
    assert SnapKV(window=1, kernel=1).score(held).tolist() == [[[0.3, 0, 0, 0.6, INF]]]
    every = SnapKV(window=1, kernel=3, pool="max", pool_over="held")
    assert every.score(held).tolist() == [[[0.3, 0.3, 0.6, 0.6, 0.6]]]


def test_snapkv_neighbours_are_neighbours_in_the_text():
    policy = SnapKV(window=1, kernel=3, pool="max")
    held = hold(policy, [4, 2, -1, 0, 3, 1])
    show(policy, held, [[0.1, 0, 0, 0.3, 0.6, 0]], [4])
    assert policy.score(held)[0, 0, [3, 5, 1, 4, 0]].tolist() == [0.3, 0.3, 0.6, 0.6, INF]


def test_snapkv_of_one_query_without_pooling_is_a_tova_cut():
    snap = SnapKV(window=1, kernel=1)
    votes = snap.score(feed(snap, [12], 12, [12])).mean(1)[0, :-1]
    tova = TOVA().score(feed(TOVA(), [12], 12, [12]))[0, 0, :-1]
    torch.testing.assert_close(votes, tova, rtol=0, atol=NOISE)


def test_snapkv_rolls_its_window_while_decoding():
    policy = SnapKV(window=2, kernel=1, pool_over="held")
    held = hold(policy, [0, 1, 2, 3])
    show(policy, held, [[0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0], [0.125, 0.125, 0.25, 0.5]], [1, 2, 3])
    assert policy.score(held).tolist() == [[[0.125, 0.375, 1.0, 0.5]]]


def test_snapkv_prompt_scores_freeze_and_generated_tokens_rank_above():
    policy = SnapKV(window=1, kernel=1, scores="prompt")
    held = hold(policy, [0, 1, 2, 3], prompt=3, seen=3)
    show(policy, held.first(3), [[0.5, 0.2, 0.3]], [2])
    frozen = [[[0.5, 0.2, INF, INF]]]
    assert policy.score(held).tolist() == frozen
    held.seen = 4
    show(policy, held, [[0, 0.9, 0, 0.1]], [3])
    assert policy.score(held).tolist() == frozen
    held.seen, held.prompt = torch.tensor([[[4]]]), torch.tensor([[[3]]])  # as in a padded batch
    show(policy, held, [[0, 0.9, 0, 0.1]], [3])
    assert policy.score(held).tolist() == frozen


@pytest.mark.parametrize("per_row", [False, True])
def test_snapkv_prompt_scores_outlive_the_neighbours_they_came_from(per_row):
    policy = SnapKV(window=1, kernel=3, pool="max", scores="prompt")
    held = hold(policy, [0, 1, 2, 3], prompt=3, seen=3)
    show(policy, held.first(3), [[0.1, 0.6, 0.3]], [2])
    held.positions[..., 1] = -1  # evicted
    held.seen = torch.tensor([[[4]]]) if per_row else 4
    held.prompt = torch.tensor([[[3]]]) if per_row else 3
    show(policy, held, [[0.5, 0, 0.2, 0.3]], [3])
    assert policy.score(held)[0, 0, 0] == 0.6


def test_snapkv_protects_its_window_unless_told():
    assert SnapKV(window=16).recent_for(99) == 16
    assert SnapKV(window=16, recent=3).recent_for(99) == 3
    assert SnapKV(window=16, sinks=4).least() == 20


PYRAMID = [  # prompt, window, budget, layers, first, last, sum: measured from the authors' code
    (4096, 8, 128, 32, 242, 25, 4272),
    (4096, 8, 512, 32, 991, 61, 16832),
    (4096, 8, 2048, 32, 3986, 111, 65552),
    (240, 8, 128, 32, 240, 23, 4208),
    (239, 8, 128, 32, 128, 128, 4096),
    (500, 32, 160, 8, 282, 44, 1304),
]


@pytest.mark.parametrize(("prompt", "window", "budget", "layers", "first", "last", "total"), PYRAMID)
def test_pyramid_gives_the_authors_numbers(prompt, window, budget, layers, first, last, total):
    tokens = PyramidKV(window=window, rounding="authors").layer_budgets(budget, layers, prompt)
    assert (tokens[0], tokens[-1], sum(tokens), len(tokens)) == (first, last, total, layers)


def test_the_authors_numbers_need_the_prompt():
    policy = PyramidKV(window=8, rounding="authors")
    assert policy.prompt_sets_budgets
    assert not PyramidKV().prompt_sets_budgets
    assert policy.layer_budgets(128, 4) == [128] * 4
    assert policy.layer_budgets(128, 1, 4096) == [128]


@pytest.mark.parametrize("beta", [1, 1.5, 2.5, 20])
@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("budget", [33, 34, 40, 128, 1000])
def test_pyramid_spends_exactly_the_budget(budget, layers, beta):
    policy = PyramidKV(window=32, beta=beta)
    tokens = policy.layer_budgets(budget, layers)
    assert sum(tokens) == budget * layers
    assert tokens == sorted(tokens, reverse=True)
    assert min(tokens) >= 33
    assert all(type(kept) is int for kept in tokens)


def test_pyramid_of_three_layers_by_hand():
    # 100 tokens beside the protected 8: last = 100 / 20, first = 200 - 5
    assert PyramidKV(window=8).layer_budgets(108, 3) == [8 + 195, 8 + 100, 8 + 5]


def test_pyramid_of_beta_one_is_uniform():
    assert PyramidKV(beta=1).layer_budgets(100, 5) == [100] * 5


def ema_by_hand(weights: Tensor, policy: AdaptiveEMA, budget: int) -> list[float]:
    """One query at a time, as the formula reads; weights (heads, Q, L)."""
    importance, last, score = {}, {}, {}
    for q in range(weights.shape[1]):
        mean = [sum(head[q][k] for head in weights.tolist()) / weights.shape[0] for k in range(q + 1)]
        top = [max(head[q][k] for head in weights.tolist()) for k in range(q + 1)]
        entropy = -sum(p * math.log(p) for p in mean) / math.log(q + 1) if q else 0.0
        beta = policy.beta_low + (policy.beta_high - policy.beta_low) * entropy
        for k in range(q + 1):
            importance[k] = beta * importance.get(k, 0.0) + (1 - beta) * (0.6 * top[k] + 0.4 * mean[k])
            if k == q or mean[k] > 1 / (q + 1):
                last[k] = q
        if (q + 1) % max(1, int(policy.rebuild * budget)) == 0:
            score = {
                k: 0.6 * importance[k] + 0.25 / (1 + q - last[k]) + 0.15 / (1 + 0.01 * (q - k)) for k in range(q + 1)
            }
    return [score.get(k, INF) for k in range(weights.shape[1])]


@pytest.mark.parametrize("rebuild", [0, 0.25, 0.625, 1])
@pytest.mark.parametrize("blocks", [[12], [7, 5], [1] * 12], ids=str)
@pytest.mark.parametrize("one_forward", [False, True])
def test_adaptive_ema_follows_its_formula(rebuild, blocks, one_forward):
    policy = AdaptiveEMA(rebuild=rebuild)
    scores = policy.score(feed(policy, [12], 12, blocks, one_forward=one_forward))
    expected = ema_by_hand(attention(12).flatten(0, 1), policy, budget=8)
    assert any(math.isfinite(score) for score in expected)
    torch.testing.assert_close(scores[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=NOISE)


@pytest.mark.parametrize("rebuild", [0, 0.25, 0.625])
def test_adaptive_ema_steps_the_rows_of_a_batch_as_it_steps_each_alone(rebuild):
    policy = AdaptiveEMA(rebuild=rebuild)
    weights = torch.stack([attention(12, seed=row) for row in range(3)])  # (B, H, G, Q, L)
    together = hold(policy, [[list(range(12))] * 2] * 3)
    for q in range(12):
        together.seen = q + 1
        policy.observe(together.first(q + 1), Rows(weights[..., q : q + 1, : q + 1], torch.full((3, 1), q)))
    for row in range(3):
        alone = hold(policy, [[list(range(12))] * 2])
        policy.observe(alone, Rows(weights[row : row + 1], torch.arange(12)[None]))
        for name in policy.columns(8):
            torch.testing.assert_close(together[name][row : row + 1], alone[name], rtol=0, atol=NOISE)


@pytest.mark.parametrize("rebuild", [0, 0.25, 1])
@pytest.mark.parametrize("blocks", [[40], [5] * 8, [1] * 40, [16, 16, 8]], ids=str)
def test_adaptive_ema_reads_a_first_prompt_as_it_reads_any_rows(rebuild, blocks):
    policy = AdaptiveEMA(rebuild=rebuild)
    told, untold = (feed(policy, [40], 40, blocks, one_forward=one) for one in (True, False))
    for name, column in untold.columns.items():
        torch.testing.assert_close(told[name], column, rtol=0, atol=NOISE)


@pytest.mark.parametrize("past", [0, 2**30])
def test_rows_count_the_tokens_that_each_query_sees(past):
    positions = torch.tensor([[[4, -1, 0, 7, 5, 6, 3, -1], [1, 2, 0, 3, 4, 5, 6, 7]]]).repeat(2, 1, 1)
    queries = torch.tensor([[5, 6, 7], [-1, 6, 7]])
    positions = torch.where(positions >= 0, positions + past, -1)
    queries = torch.where(queries >= 0, queries + past, -1)
    rows = Rows(torch.zeros(2, 2, 1, 3, 8), queries)
    held = Held(positions=positions, seen=8, budget=8)
    assert rows.visible(held).tolist() == [[[4, 5, 6], [6, 7, 8]], [[1, 5, 6], [1, 7, 8]]]


def test_adaptive_ema_forgets_focused_attention_faster():
    policy = AdaptiveEMA(rebuild=0)
    learned = {}
    for name, weights in {"focused": [1.0, 0.0, 0.0, 0.0], "diffuse": [0.25] * 4}.items():
        held = hold(policy, [0, 1, 2, 3])
        held["importance"].fill_(1)
        show(policy, held, [weights], [3])
        learned[name] = held["importance"][0, 0, 0].item()
    assert learned["focused"] == pytest.approx(0.70 + 0.30)
    assert learned["diffuse"] == pytest.approx(0.98 + 0.02 * 0.25)


def test_adaptive_ema_scores_enough_of_any_prompt_to_cut_it():
    for tokens in range(9, 30):
        policy = AdaptiveEMA(rebuild=1)
        held = feed(policy, [tokens], tokens, [tokens])
        assert policy.score(held)[0, 0].isfinite().sum() >= tokens - 8


@pytest.mark.parametrize("per_row", [False, True])
def test_adaptive_ema_goes_on_rebuilding_while_the_budget_grows(per_row):
    policy = AdaptiveEMA()
    held = hold(policy, list(range(400)))
    for q in range(200, 400):
        budget = int(0.3 * (q + 1))
        held.budget = torch.tensor([[[budget]]]) if per_row else budget
        show(policy, held.first(q + 1), [[1 / (q + 1)] * (q + 1)], [q])
    newest_scored = policy.score(held)[0, 0].isfinite().nonzero().max().item()
    assert 400 - newest_scored <= policy.rebuild * budget + 1


def test_random_is_the_same_for_all_rows_and_different_for_all_else():
    held = hold(Random(), [[list(range(50))] * 2] * 2)
    state = torch.get_rng_state()
    scores = Random().score(held)
    assert torch.equal(scores, Random().score(held))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(scores[0], scores[1])
    others = [Random(seed=1).score(held)[0, 0], Random().score(dataclasses.replace(held, layer=1))[0, 0], scores[0, 1]]
    for other in others:
        assert not set(other.tolist()) & set(scores[0, 0].tolist())


def test_random_ranks_are_uniform():
    scores = Random().score(hold(Random(), list(range(4000))))[0, 0].double() / 2**53
    assert len(set(scores.tolist())) == 4000
    assert 0 <= scores.min() < 0.01
    assert 0.99 < scores.max() < 1
    tenths = torch.histc(scores, 10, 0, 1)
    assert (tenths - 400).abs().max() < 100  # five standard deviations of 19
    ranks = torch.stack([scores, torch.arange(4000).double()])
    assert torch.corrcoef(ranks)[0, 1].abs() < 0.08  # five standard deviations of 1 / sqrt(4000)


def test_random_hash_is_splitmix():
    """The first output of splitmix64 seeded with 0, as published with the generator, before the 11 bits are cut."""
    from kvevict.policies.random import _mix, _signed

    assert _mix(torch.tensor(_signed(0x9E3779B97F4A7C15))).item() % 2**64 == 0xE220A8397B1DCDAF


def test_key_norm_keeps_short_keys():
    stored = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0], [6.0, 8.0]]).view(1, 1, 4, 2)
    held = hold(KeyNorm(), [0, 1, 2, 3], keys=stored)
    KeyNorm().admit(held.narrow(1, 4))
    assert KeyNorm().score(held).tolist() == [[[0, -1, 0, -10]]]  # the first was not admitted
    KeyNorm().admit(held.narrow(0, 1))
    assert KeyNorm().score(held).tolist() == [[[-5, -1, 0, -10]]]


def test_key_norm_does_not_overflow_in_half_precision():
    stored = torch.full((1, 1, 1, 64), 6e4, dtype=torch.float16)
    held = hold(KeyNorm(), [0], keys=stored)
    KeyNorm().admit(held)
    assert held["norm"].item() == pytest.approx(8 * 6e4, rel=1e-3)  # float16 keeps 6e4 to 1 in 2000


def test_key_norm_needs_keys():
    with pytest.raises(PolicyError, match="KeyNorm reads keys"):
        KeyNorm().admit(hold(KeyNorm(), [0]))
