"""Attention diagnostics: every number is what a plain computation on the model's own attention gives."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import HEADS, KV_HEADS, LAYERS, forward, save_reader, small, text, tiny
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvevict import EvictingCache, OptionError
from kvevict.bootstrap import paired_bootstrap
from kvevict.cli import main
from kvevict.errors import OutputError
from kvevict.kept import held_after, held_by_heads, read_kept, read_tokens, survival
from kvevict.lab import decode_trace
from kvevict.lab.capture import capture, evicting_layers
from kvevict.lab.captured import captured_trace
from kvevict.lab.diagnostics import Diagnosis, diagnose
from kvevict.lab.harness import HEAVY
from kvevict.lab.simulation import simulate
from kvevict.lab.traces import Trace
from kvevict.policies import H2O
from kvevict.results import read_rows

N, BUDGET = 40, 9
GROUP = HEADS // KV_HEADS
POLICIES = ["sliding_window", "streaming_llm", "tova", "h2o"]
TEXT = "The cat sat on a mat and saw a dog. It ran to its old house, and the dog ran after it! Why? Nobody knows. " * 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("captured") / "trace"
    about = {"text": "random", "text_sha256": "ab", "revision": "1"}
    capture(tiny(), text(1, N)[0], folder, source="tiny", block=16, about=about)
    return captured_trace(folder)


@pytest.fixture(scope="module")
def result(trace) -> Diagnosis:
    return diagnose(trace, {name: small(name) for name in POLICIES}, [BUDGET, 12], seed=3)


@pytest.fixture(scope="module")
def attention(trace) -> Tensor:
    """All attention that was captured: (layers, heads, queries, positions)."""
    rows = [torch.nn.functional.pad(block.weights, (0, N - block.weights.shape[-1])) for block in trace.blocks()]
    return torch.cat(rows, 3).flatten(1, 2).double()


def found_by_queries(left: Tensor) -> Tensor:
    """What is held when each query comes, its own token included: (layers, heads, queries, positions)."""
    held = torch.stack([held_after(left, seen) for seen in range(N)], 2)  # before the query's token came
    return (held | torch.eye(N, dtype=torch.bool)).repeat_interleave(GROUP, 1)


def by_head(result: Diagnosis, name: str, budget: int, value: str) -> Tensor:
    rows = [row for row in result.heads if (row["policy"], row["budget"]) == (name, budget)]
    assert [(row["layer"], row["head"]) for row in rows] == list(product(range(LAYERS), range(HEADS)))
    return torch.tensor([row[value] for row in rows]).view(LAYERS, HEADS)


CELLS = [(name, budget) for name in [*POLICIES, "oracle", "random"] for budget in (BUDGET, 12)]


@pytest.mark.parametrize(("name", "budget"), CELLS)
def test_retained_mass_of_each_head_is_its_attention_to_what_is_held(result, attention, name, budget):
    mass = (attention * found_by_queries(result.kept[name, budget])).sum(-1).mean(-1)
    torch.testing.assert_close(by_head(result, name, budget, "retained"), mass.float(), rtol=0, atol=1e-6)
    assert result.row(name, budget)["retained"] == pytest.approx(float(mass.mean()))
    lowest = result.row(name, budget)["lowest_head"]
    assert lowest["retained"] == pytest.approx(float(mass.min()))
    assert float(mass[lowest["layer"], lowest["head"]]) == pytest.approx(float(mass.min()))


@pytest.mark.parametrize(("name", "budget"), CELLS)
def test_recall_of_each_head_counts_its_most_attended_tokens(result, attention, name, budget):
    held = found_by_queries(result.kept[name, budget])
    hits = torch.zeros(LAYERS, HEADS)
    for query in range(N):
        heavy = attention[:, :, query, : query + 1].topk(min(HEAVY, query + 1)).indices
        hits += held[:, :, query].gather(-1, heavy).sum(-1)
    possible = sum(min(HEAVY, query + 1) for query in range(N))
    torch.testing.assert_close(by_head(result, name, budget, "recall"), hits / possible)


@pytest.mark.parametrize(("name", "budget"), CELLS)
def test_missed_mass_is_what_evicted_tokens_would_have_received_later(result, attention, name, budget):
    left = result.kept[name, budget]
    later = torch.arange(N)[:, None] >= left.unsqueeze(2)  # (layers, KV heads, queries, positions)
    gone = (left > 0).unsqueeze(2)
    mean = attention.unflatten(1, (KV_HEADS, GROUP)).mean(2)
    missed = (mean * (later & gone)).sum(2)  # (layers, KV heads, positions)
    each = missed.sum(-1) / (left > 0).sum(-1)
    shown = by_head(result, name, budget, "missed_per_eviction")
    torch.testing.assert_close(shown, each.repeat_interleave(GROUP, 1).float())
    row = result.row(name, budget)
    assert row["evictions"] == int((left > 0).sum()) == LAYERS * KV_HEADS * (N - budget)
    assert row["missed_per_eviction"] == pytest.approx(float(missed.sum()) / row["evictions"])
    assert row["missed_worst"]["missed"] == pytest.approx(float(missed.max()))
    worst = row["missed_worst"]
    assert float(missed[worst["layer"], worst["kv_head"], worst["position"]]) == pytest.approx(float(missed.max()))
    most = [token["missed"] for token in row["most_missed"]]
    assert most == pytest.approx(missed.mean((0, 1)).topk(5).values.tolist())


@pytest.mark.parametrize(("name", "budget"), CELLS)
def test_each_query_s_numbers_are_its_own_and_their_means_are_the_row_s(trace, result, attention, name, budget):
    policies = {each: small(each) for each in POLICIES} | {"random": small("random", seed=3)}
    lab = simulate(trace, policies, [BUDGET, 12], renormalize=True, history=True)
    assert lab.history is not None
    retained, recall = lab.history.retained[name, budget], lab.history.recall[name, budget]
    assert retained.shape == recall.shape == (1, N)
    held = found_by_queries(result.kept[name, budget])
    torch.testing.assert_close(retained[0], (attention * held).sum(-1).mean((0, 1)))
    possible = [min(HEAVY, query + 1) for query in range(N)]
    heavy = attention[:, :, -1].topk(HEAVY).indices
    hits = held[:, :, -1].gather(-1, heavy).sum(-1).double().mean()
    assert float(recall[0, -1]) == pytest.approx(float(hits) * N / sum(possible))
    row = lab.row(name, budget)
    assert (float(retained.mean()), float(recall.mean())) == pytest.approx((row.retained, row.recall))


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Trace:
    """Ten blocks of queries."""
    folder = tmp_path_factory.mktemp("longer") / "trace"
    capture(tiny(), text(1, 640)[0], folder, source="tiny", block=128)
    return captured_trace(folder)


@pytest.fixture(scope="module")
def compared(longer) -> Diagnosis:
    """Two good policies, one of them under two names, and a bad one."""
    policies = {"h2o": small("h2o"), "tova": small("tova"), "again": small("tova"), "window": small("sliding_window")}
    return diagnose(longer, policies, [64])


@pytest.mark.parametrize("measure", ["retained", "recall"])
def test_differences_from_the_best_come_with_the_interval_over_queries(longer, compared, measure):
    policies = {"h2o": small("h2o"), "tova": small("tova"), "window": small("sliding_window")}
    history = simulate(longer, policies, [64], renormalize=True, history=True).history
    by_query = {name: getattr(history, measure)[name, 64][0] for name in policies}
    means = {name: float(values.mean()) for name, values in by_query.items()}
    best = max(means, key=means.__getitem__)
    for name in policies:
        row = compared.row(name, 64)
        interval = paired_bootstrap([by_query[name]], [by_query[best]])
        expected = (interval.difference, interval.low, interval.high)
        shown = tuple(row[f"{measure}_vs_best{end}"] for end in ("", "_low", "_high"))
        assert shown == pytest.approx(expected, abs=1e-12)
        assert (row[f"{measure}_is_best"], row[f"{measure}_tie_with_best"]) == (name == best, interval.tie)
        assert row["units"] == "10 blocks of 64 tokens"
        assert row[f"{measure}_vs_best"] == pytest.approx(row[measure] - compared.row(best, 64)[measure], abs=1e-6)
    assert not compared.row("window", 64)["retained_tie_with_best"]


def test_the_table_says_best_tie_or_how_far(compared):
    lines = {line.split("  ")[0]: line for line in compared.text().splitlines()}
    assert "tie +0.0000 [+0.0000, +0.0000]" in lines["again"]
    row = compared.row("window", 64)
    said = [f"{row[f'retained_vs_best{end}']:+.4f}" for end in ("", "_low", "_high")]
    assert f" {said[0]} [{said[1]}, {said[2]}]" in lines["window"] and f"tie {said[0]}" not in lines["window"]
    assert "best" in lines["tova"] + lines["h2o"]
    assert not any(word in lines[bound] for bound in ("oracle", "random", "ceiling") for word in ("tie", "best", "["))
    assert "interval over the queries in 10 blocks of 64 tokens" in compared.text()
    assert "too narrow" not in compared.text()


def test_too_few_queries_for_an_interval_are_ties(result):
    row = result.row("sliding_window", BUDGET)
    assert row["retained_tie_with_best"] and math.isnan(row["retained_vs_best_low"]) and row["retained_vs_best"] < 0
    assert f"tie {row['retained_vs_best']:+.4f} " in result.text() and "nan" not in result.text()
    assert "Intervals over fewer than 10 blocks are too narrow" in result.markdown()


def test_what_is_not_retained_is_missed(result):
    """Two ways to the same number, and they share nothing but the trace."""
    full = result.row("full cache", None)["retained"]
    for name, budget in CELLS:
        row = result.row(name, budget)
        assert row["retained"] + row["missed_mass"] == pytest.approx(full, abs=1e-6)


def test_head_room_lies_between_policy_oracle_and_full_cache(result):
    full = result.row("full cache", None)["retained"]
    assert full == pytest.approx(1, abs=1e-3)
    for row in result.rows[1:]:
        oracle = result.row("oracle", row["budget"])["retained"]
        assert row["policy_headroom"] == oracle - row["retained"]
        assert row["budget_headroom"] == pytest.approx(full - oracle)
        heads = [each for each in result.heads if (each["policy"], each["budget"]) == (row["policy"], row["budget"])]
        for name in ("policy_headroom", "budget_headroom"):
            assert sum(each[name] for each in heads) / len(heads) == pytest.approx(row[name], abs=1e-6)
    assert result.row("oracle", BUDGET)["policy_headroom"] == 0
    assert result.row("random", BUDGET)["policy_headroom"] > result.row("tova", BUDGET)["policy_headroom"]


def test_a_window_s_tokens_leave_one_by_one(result):
    left = result.kept["sliding_window", BUDGET]
    expected = [position + BUDGET + 1 if position < N - BUDGET else 0 for position in range(N)]
    assert left.tolist() == [[expected] * KV_HEADS] * LAYERS
    assert survival(left).tolist() == [1.0] * BUDGET + [0.0] * (N - BUDGET)
    row = result.row("sliding_window", BUDGET)["survival"]
    assert (row["ages"], row["held"]) == ([1, 2, 4, 8, 16, 32], [1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_the_first_layer_is_left_when_it_is_left_inside_the_model(result, name):
    model = tiny()
    with EvictingCache(model, small(name), BUDGET) as cache:
        for seen, token in enumerate(text(1, N)[0], 1):
            forward(model, cache, token.view(1, 1))
            held = held_after(result.kept[name, BUDGET][0], seen)
            assert [head.nonzero().flatten().tolist() for head in held] == cache.kept_positions(0)[0].tolist()


def test_the_oracle_misses_least_and_survival_counts_every_head(result):
    for budget in (BUDGET, 12):
        missed = {name: result.row(name, budget)["missed_mass"] for name, at in CELLS if at == budget}
        assert min(missed, key=missed.__getitem__) == "oracle"
    left = result.kept["tova", BUDGET]
    ages = torch.arange(N)
    for age in (0, 3, 20):
        held = [held_after(left, position + age + 1)[..., position] for position in ages[: N - age]]
        assert survival(left)[age] == pytest.approx(float(torch.stack(held).double().mean()))


def test_chosen_steps_say_how_many_heads_hold_each_token(trace):
    result = diagnose(trace, ["tova"], [BUDGET], steps=[30, 5])
    rows = [row for row in result.held if row["policy"] == "tova"]
    assert [row["seen"] for row in rows] == [5, 30]
    assert rows[0]["heads"] == [LAYERS * KV_HEADS] * 5
    assert rows[0]["kv_heads"] == LAYERS * KV_HEADS
    left = result.kept["tova", BUDGET].flatten(0, 1)
    count = [sum(not 0 < int(head[position]) <= 30 for head in left) for position in range(30)]
    assert rows[1]["heads"] == count and sum(count) == BUDGET * LAYERS * KV_HEADS
    assert held_by_heads(left, 30)[30:].tolist() == [0] * 10


def test_every_row_says_what_it_was_measured_on(result):
    named = {"measure": "diagnostics", "model": "LlamaForCausalLM", "revision": "1", "text": "random",
             "text_sha256": "ab", "tokens": N, "seed": 3, "protection": {}}  # fmt: skip  # one row
    for row in [*result.rows, *result.heads, *result.held]:
        assert named.items() <= row.items()
        assert {"kvevict", "torch", "transformers", "threads", "protocol", "options"} <= set(row)
    assert "seed=3" in result.row("random", BUDGET)["options"]


def test_numbers_are_those_of_the_simulator(trace, result):
    lab = simulate(trace, {name: small(name) for name in POLICIES}, [BUDGET, 12], renormalize=True)
    for row in lab.rows:
        mine = result.row(row.name, row.budget)
        if row.name != "random":  # another seed
            assert (mine["retained"], mine["recall"]) == (row.retained, row.recall)
    assert lab.history is None


def test_layers_have_the_model_s_numbers():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                              num_key_value_heads=1, head_dim=16, vocab_size=97, layer_types=kinds)  # fmt: skip
    assert evicting_layers(Gemma3ForCausalLM(config)) == [1, 3]


def test_rows_carry_the_layers_numbers(trace):
    result = diagnose(trace, ["tova"], [BUDGET], layers=[1, 3, 8])
    assert {row["layer"] for row in result.heads} == {1, 3, 8}
    assert result.row("tova", BUDGET)["lowest_head"]["layer"] in {1, 3, 8}
    assert result.row("tova", BUDGET)["missed_worst"]["layer"] in {1, 3, 8}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": [0]}, "step 0: the text has 40 tokens"),
        ({"steps": [41]}, "give from 1 to 40"),
        ({"layers": [0]}, "1 layers for a trace of 3"),
        ({"tokens": ["a"]}, "1 tokens for a trace of 40"),
        ({"budgets": [41]}, "budget=41 is above the 40 tokens"),
        ({"policies": ["tovaa"]}, "did you mean 'tova'"),
        ({"protection": {"sinks": 20}}, "cannot hold the 20"),
    ],
)
def test_what_cannot_be_is_refused(trace, options, said):
    with pytest.raises(OptionError, match=said):
        diagnose(trace, **{"policies": ["tova"], "budgets": [BUDGET], **options})


def test_folders_may_be_plain_strings(tmp_path, result):
    capture(tiny(), text(1, 12)[0], str(tmp_path / "trace"), block=16)
    assert captured_trace(str(tmp_path / "trace")).length == 12
    result.save(str(tmp_path / "out"))
    kept = read_kept(tmp_path / "out")
    assert all(torch.equal(kept[cell], left) for cell, left in result.kept.items()) and len(kept) == len(CELLS)


def test_traces_of_several_texts_are_refused():
    with pytest.raises(OptionError, match="2 runs side by side"):
        diagnose(decode_trace(64, (1, 2)), ["tova"], [16])


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    return save_reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(TEXT)
    return path


def command(reader: Path, words: Path, folder: Path, *more: str) -> int:
    given = ["--model", str(reader), "--text", str(words), "--tokens", "70", "--output", str(folder)]
    return main(["diagnose", *given, *more])


def read(path: Path) -> Any:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_command_writes_rows_heads_and_what_is_held(reader, words, tmp_path, capsys):
    options = ["--policies", "tova,random", "--budget", "24,32", "--protect", "sinks=2", "--seed", "5", "--steps", "50"]
    assert command(reader, words, tmp_path / "out", *options) == 0
    printed = capsys.readouterr().out
    rows = read_rows(tmp_path / "out")
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("full cache", None),
        *[(name, budget) for name in ("tova", "random", "oracle", "ceiling") for budget in (24, 32)],
    ]
    assert all(row["model"] == str(reader) and row["revision"].startswith("sha256:") for row in rows)
    assert all(row["dtype"] == "float32" and row["text"] == "words.txt" and row["seed"] == 5 for row in rows)
    assert (
        "sinks=2" in rows[1]["options"]
        and "sinks=2, recent=0, protect_prompt=None, evict_every=1, seed=5" in rows[3]["options"]
    )
    markdown = (tmp_path / "out" / "results.md").read_text("utf-8")
    for row in rows:
        assert f"{row['retained']:.4f}" in printed and f"{row['retained']:.4f}" in markdown
    heads = read_rows(tmp_path / "out", "heads.jsonl")
    assert len(heads) == 2 * 4 * len(rows)
    assert {row["seen"] for row in read_rows(tmp_path / "out", "held.jsonl")} == {50}
    assert "".join(json.loads((tmp_path / "out" / "tokens.json").read_text())) == TEXT[:70]
    kept = read_kept(tmp_path / "out")
    assert set(kept) == {(name, budget) for name in ("tova", "random", "oracle") for budget in (24, 32)}
    assert all((left[..., :2] == 0).all() for (name, _), left in kept.items() if name != "oracle")


def test_all_policies_are_measured_and_the_recorded_attention_is_used_again(reader, words, tmp_path, capsys):
    assert command(reader, words, tmp_path / "one", "--budget", "40", "--trace", str(tmp_path / "trace")) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "trace").iterdir()}
    assert command(reader, words, tmp_path / "two", "--budget", "40", "--trace", str(tmp_path / "trace")) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "trace").iterdir()} == before
    first, second = (read_rows(tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert len({row["policy"] for row in first if row["kind"] == "policy"}) == 10  # all but full; random is a bound
    assert main(["simulate", str(tmp_path / "trace"), "--budgets", "40", "--output", str(tmp_path / "lab")]) == 0


def test_attention_of_other_weights_is_not_used(reader, words, tmp_path, capsys):
    trace = str(tmp_path / "trace")
    assert command(reader, words, tmp_path / "one", "--budget", "40", "--policies", "tova", "--trace", trace) == 0
    header = tmp_path / "trace" / "capture.json"
    document = json.loads(header.read_text())
    document["about"]["revision"] = "sha256:other"
    header.write_text(json.dumps(document))
    assert command(reader, words, tmp_path / "two", "--budget", "40", "--policies", "tova", "--trace", trace) == 2
    assert "holds another capture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "0.5"], "takes budgets in tokens"),
        (["--budget", "16", "--policies", "snapkv"], "cannot hold the 32 tokens that snapkv protects"),
        (["--budget", "16", "--protect", "sinks=20"], "cannot hold the 20 tokens of --protect"),
        (["--budget", "70"], "do not outgrow a budget of 70"),
        (["--budget", "40", "--steps", "71"], "step 71"),
        (["--budget", "40", "--policies", "tovaa"], "did you mean 'tova'"),
    ],
)
def test_mistakes_are_said_before_anything_is_recorded(reader, words, tmp_path, capsys, options, said):
    assert command(reader, words, tmp_path / "out", *options) == 2
    assert said in capsys.readouterr().err
    assert not list((tmp_path).rglob("*.kva"))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "kept.npz").write_bytes(b"PK damaged")
    with pytest.raises(OutputError, match="run kvevict diagnose again"):
        read_kept(tmp_path)


@pytest.mark.parametrize(("name", "array"), [("tova", [[[0]]]), ("tova@many", [[[0]]]), ("tova@16", [[["a"]]])])
def test_arrays_of_something_else_are_not_what_was_kept(name, array, tmp_path):
    numpy.savez(tmp_path / "kept.npz", **{name: numpy.array(array)})
    with pytest.raises(OutputError, match=r"kept\.npz' cannot be read .* run kvevict diagnose again"):
        read_kept(tmp_path)


@pytest.mark.parametrize("content", ['["a', "3", "[1, 2]"])
def test_a_text_that_is_no_list_of_tokens_is_named(content, tmp_path):
    (tmp_path / "tokens.json").write_text(content)
    with pytest.raises(OutputError, match=r"tokens\.json' cannot be read .* run kvevict diagnose again"):
        read_tokens(tmp_path)


def test_a_foreign_folder_for_the_attention_is_refused(reader, words, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert command(reader, words, tmp_path / "out", "--budget", "40", "--trace", str(tmp_path)) == 2
    assert "not a captured trace" in capsys.readouterr().err


def test_a_token_that_leaves_before_any_query_saw_it_has_missed_all_that_it_would_have_received():
    synthetic = decode_trace(64)  # its queries see what is older than they are, and are not tokens themselves
    lab = simulate(synthetic, {"h2o": H2O(recent=0)}, [8], history=True)
    assert lab.history is not None
    whole = torch.zeros(64, dtype=torch.float64)
    for block in synthetic.blocks():
        whole[: block.weights.shape[-1]] += block.weights[0, 0].double().mean(0).sum(0)
    left, missed = (each["h2o", 8][0, 0, 0] for each in (lab.history.left, lab.history.missed))
    unseen = (left == torch.arange(64) + 1).nonzero().flatten()
    assert unseen.numel()  # a token without a query is the least attended
    torch.testing.assert_close(missed[unseen], whole[unseen])
