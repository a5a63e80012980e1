"""Sweeps: plans read from YAML, what they measure, resuming, sharing out, and the tables."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict import EvictingCache, OptionError
from kvevict import sweep as sweep_module
from kvevict.errors import OutputError
from kvevict.evaluation import perplexity
from kvevict.fidelity import fidelity, full_cache
from kvevict.models import load_model, revision
from kvevict.needles import NOISE_SENTENCES, make_case
from kvevict.plan import Plan, load_plan, make_plan
from kvevict.protocols import blocks, chunked, windows
from kvevict.retrieval import logprob_without, recall
from kvevict.sweep import run_plan
from kvevict.tables import Report

PROSE = "The cat sat on a mat and saw a dog. It ran to its old house, and the dog ran after it! Why? Nobody knows. "
ARTICLES = "".join(f" = Part {n} = \n\n{PROSE * 2}\n\n" for n in "abc")
TEXTS = [f" = Part{article}"[:100] for article in ARTICLES.split(" = Part")[1:]]
"""What the plans below read of each article: a token is a byte."""


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    path = tmp_path / "articles.txt"
    path.write_text(ARTICLES)
    return path


@pytest.fixture
def given(folder: Path, articles: Path) -> dict[str, Any]:
    """A plan of three documents, with a cell for the full cache and four for policies."""
    return {
        "models": [str(folder)],
        "texts": [{"source": str(articles), "documents": "articles", "tokens": 100}],
        "policies": ["tova", "random"],
        "budgets": [16, 32],
        "protocols": [{"name": "chunked", "chunk": 16}],
        "threads": 1,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(plan: Any, folder: Path, **options: Any) -> Report:
    report = run_plan(plan if isinstance(plan, Plan) else make_plan(plan), folder, **options)
    assert report is not None
    return report


# -- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 3}, r"unknown key 'budget' \(did you mean 'budgets'\?\); there are: measure, models"),
        ({"texts": [{"sorce": "a"}]}, r"texts\[0\]: unknown key 'sorce' \(did you mean 'source'\?\)"),
        ({"texts": [{"documents": "article"}]}, r"texts\[0\].documents: 'article' is none of .*mean 'articles'"),
        ({"texts": [{"tokens": 1}]}, r"texts\[0\].tokens: expected at least 2"),
        ({"texts": []}, "texts: the list is empty"),
        ({"policies": ["h20"]}, r"policies\[0\]: no policy is named 'h20' \(did you mean 'h2o'\?\)"),
        ({"policies": [{"name": "h2o", "recnt": 3}]}, r"has no option 'recnt' \(did you mean 'recent'\?\)"),
        ({"policies": [{"recent": 3}]}, r"policies\[0\]: expected a policy's name"),
        ({"protections": [{"sink": 4}]}, r"protections\[0\]: unknown key 'sink' \(did you mean 'sinks'\?\)"),
        ({"protections": [{"sinks": -4}]}, "sinks=-4"),
        ({"budgets": [0]}, r"budgets\[0\]: budget=0"),
        ({"budgets": ["128"]}, r"budgets\[0\]: budget='128'"),
        ({"seeds": [0.5]}, r"seeds\[0\]: expected a whole number"),
        ({"measure": "perplexty"}, "did you mean 'perplexity'"),
        ({"protocols": [{"name": "window"}]}, r"protocols\[0\]: protocol 'window'"),
        ({"protocols": [{"name": "blocks", "size": 8}]}, r"protocols\[0\]: unknown key 'size'"),
        ({"protocols": [{"name": "blocks", "window": 64}]}, "no policy can evict before its predictions: give chunk"),
        ({"needle": {"depths": [2]}}, r"needle.depths\[0\]: expected a depth from 0"),
        ({"needle": {"tasks": ["passkey", "fact"], "kinds": "words"}}, r"needle.kinds: values of passkey, fact are of"),
        ({"needle": {"tasks": ["singel"]}}, r"needle.tasks\[0\]: 'singel' is none of .*mean 'single'"),
        ({"generation": {"promts": 2}}, "did you mean 'prompts'"),
        ({"threads": 0}, "threads: expected at least 1"),
        ({"policies": ["streaming_llm"], "budgets": [2]}, "budget 2 cannot hold the 4 tokens"),
        ({"policies": [{"name": "h2o", "recent": 3}], "protections": [{"recent": 8}]}, "sets 'recent' itself"),
        ([], "expected a mapping of measure, models"),
    ],
)
def test_mistakes_in_a_plan_say_where_they_are(wrong, message, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps(wrong))  # JSON is YAML
    with pytest.raises(OptionError, match=message) as error:
        load_plan(path)
    assert str(error.value).startswith("wrong.yaml: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not YAML"),
        ("seeds: 1\nbudgets: 8\nseeds: 2\n", r"'seeds' is there twice \(line 3\)"),
        ("threads: 20000", "threads: expected at most 1024, got 20000: give the number of cores"),
    ],
)
def test_files_that_are_not_yaml_are_refused(content, message, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(OptionError, match=message):
        load_plan(path)
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        load_plan(tmp_path / "none.yaml")


def test_a_plan_has_one_cell_for_what_is_the_same():
    cells, _ = make_plan(
        {"policies": ["h2o", "random"], "budgets": [64, 64], "protections": [{}, {"sinks": 4}], "seeds": [0, 1]}
    ).cells()
    assert [cell.name for cell in cells].count("h2o") == 2  # it has no seed
    assert [cell.name for cell in cells].count("random") == 4
    assert [cell.name for cell in cells].count("full cache") == 1


def test_of_all_policies_those_that_a_budget_cannot_hold_are_left_out_with_the_reason():
    cells, left_out = make_plan({"policies": "all", "budgets": [16]}).cells()
    assert "snapkv at 16" in left_out and "cannot hold the 32 tokens" in left_out["snapkv at 16"]
    assert "snapkv" not in [cell.name for cell in cells]


def test_protections_reach_every_policy():
    cells, _ = make_plan(
        {"policies": ["h2o", "random"], "budgets": 64, "protections": {"sinks": 4, "recent": 32}}
    ).cells()
    assert {(cell.policy.sinks, cell.policy.recent) for cell in cells if cell.policy} == {(4, 32)}


# -- what is measured --------------------------------------------------------------------------------------------


def test_rows_are_what_the_library_measures(given, folder, tmp_path):
    report = run(given, tmp_path / "out")
    model, tokenizer, _ = load_model(str(folder))
    documents = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    full = torch.cat([perplexity(model, ids, DynamicCache, chunk=16).nll for ids in documents]).double()
    make = partial(EvictingCache, model, "tova", 16)
    read = [perplexity(model, ids, make, chunk=16) for ids in documents]
    nll = torch.cat([each.nll for each in read]).double()
    after = torch.cat([each.seen for each in read]) > 16
    first, tova = report.rows[:2]
    assert first["perplexity"] == pytest.approx(full.mean().exp().item(), rel=1e-12)
    assert first["bits_per_byte"] == pytest.approx(full.mean().item() / math.log(2), rel=1e-12)  # a token is a byte
    assert tova["perplexity"] == pytest.approx(nll.mean().exp().item(), rel=1e-12)
    assert tova["perplexity_after_budget"] == pytest.approx(nll[after].mean().exp().item(), rel=1e-12)
    assert tova["full_perplexity_after_budget"] == pytest.approx(full[after].mean().exp().item(), rel=1e-12)
    assert tova["vs_full"] == pytest.approx((nll.mean() - full.mean()).expm1().item(), rel=1e-9)
    assert tova["word_perplexity"] == pytest.approx(math.exp(nll.sum() / tova["predicted_words"]))
    assert tova["predicted_words"] == sum(len(text.split()) for text in TEXTS)  # they begin with a blank
    assert tova["predicted"] == 3 * 99 and tova["documents"] == 3


def test_every_row_says_what_made_it(given, tmp_path):
    run(given, tmp_path / "out")
    rows = lines(tmp_path / "out" / "results.jsonl")
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("full cache", None), ("tova", 16), ("random", 16), ("tova", 32), ("random", 32)
    ]  # fmt: skip  # one list
    known = {"model", "revision", "dtype", "device", "text", "text_sha256", "protocol", "options", "protection", "seed",
             "kvevict", "torch", "transformers", "threads"}  # fmt: skip  # one set
    for row in rows:
        assert known <= set(row)
        assert row["revision"].startswith("sha256:") and len(row["text_sha256"]) == 64
        assert row["protocol"] == "chunked streaming (chunk=16)"


def test_models_and_texts_are_measured_each_with_each(given, folder, articles, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    model, _, _ = load_model(str(folder))
    model.lm_head.weight.data *= 2
    model.save_pretrained(other)
    (tmp_path / "more.txt").write_text(PROSE * 3)
    given |= {"models": [str(folder), str(other)], "policies": ["tova"], "budgets": [16]}
    given["texts"] = [str(articles), {"source": str(tmp_path / "more.txt"), "tokens": 50}]
    rows = run(given, tmp_path / "out").rows
    assert [(row["model"], row["text"], row["policy"]) for row in rows] == [
        (str(name), text, policy)
        for name in (folder, other)
        for text in ("articles.txt", "more.txt")
        for policy in ("full cache", "tova")
    ]
    assert len({row["revision"] for row in rows}) == 2
    full = [row["perplexity"] for row in rows if row["policy"] == "full cache"]
    assert len(set(full)) == 4
    assert [row["full_perplexity"] for row in rows if row["policy"] == "tova"] == full  # each with its own


def test_nats_of_each_position_are_kept(given, tmp_path):
    report = run(given, tmp_path / "out")
    parts = [json.loads(path.read_text()) for path in (tmp_path / "out" / "parts").iterdir()]
    assert len(parts) == 5 * 3
    row = report.rows[1]
    nats = [part["result"]["nats"] for part in parts if part["key"]["policy"] == "tova" and part["key"]["budget"] == 16]
    assert [len(each) for each in nats] == [99, 99, 99]
    assert sum(map(sum, nats)) == pytest.approx(row["nats"])


def test_fidelity_rows_are_what_the_library_measures(given, folder, tmp_path):
    given |= {"measure": "fidelity", "budgets": 16, "generation": {"prompts": 2, "prompt": 40, "new": 5}}
    full, tova, _ = run(given, tmp_path / "out").rows
    model, tokenizer, _ = load_model(str(folder))
    documents = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    close = [fidelity(model, ids, partial(EvictingCache, model, "tova", 16), protocol=chunked(16)) for ids in documents]
    assert tova["kl"] == pytest.approx(torch.cat([each.kl for each in close]).double().mean().item(), rel=1e-9)
    assert tova["top1_agreement"] == torch.cat([each.agrees for each in close]).double().mean().item()
    assert len(tova["same_tokens"]) == 6 and max(tova["same_tokens"]) <= 5
    assert full["kl"] == 0 and full["top1_agreement"] == 1 and full["same_tokens"] == [5] * 6


def test_the_same_values_are_printed_as_a_tie(given, tmp_path):
    given |= {"policies": ["tova", {"name": "tova", "sinks": 0}, "full"], "budgets": [16]}
    report = run(given, tmp_path / "out")
    assert [row["policy"] for row in report.rows] == ["full cache", "tova", "full"]  # tova(sinks=0) is tova
    full = report.rows[-1]
    assert full["tie_with_full"] and full["vs_full"] == 0
    assert "tie +0.0% [+0.0%, +0.0%]" in report.text()
    assert "is_best" not in full  # what keeps everything is no rival


def test_intervals_are_over_blocks_when_documents_are_few_and_that_is_said(given, tmp_path):
    report = run(given, tmp_path / "out")
    assert {row["units"] for row in report.rows[1:]} == {"3 blocks of 64 tokens"}
    assert "over 3 blocks of 64 tokens" in report.markdown()
    assert "fewer than 10 units are too narrow" in report.markdown()


def test_full_cache_figures_need_no_policy(given, folder, articles, tmp_path):
    given |= {
        "policies": [],
        "protocols": [{"name": "blocks", "window": 64}, {"name": "windows", "window": 64, "stride": 16}],
    }
    given["texts"] = [str(articles)]
    rows = run(given, tmp_path / "out").rows
    model, tokenizer, _ = load_model(str(folder))
    ids = torch.tensor(tokenizer(ARTICLES)["input_ids"])
    for row, protocol in zip(rows, (blocks(64), windows(64, 16)), strict=True):
        assert row["perplexity"] == pytest.approx(perplexity(model, ids, DynamicCache, protocol=protocol).perplexity)
        assert row["protocol"] == str(protocol)


def test_needle_rows_are_what_the_library_measures(given, folder, tmp_path):
    given |= {"measure": "needle", "texts": "noise", "policies": ["tova"], "budgets": [64], "seeds": [0, 1]}
    given["needle"] = {"tasks": ["single", "fact"], "kinds": ["numbers", "words"], "lengths": 400, "depths": [0, 1]}
    report = run(given, tmp_path / "out")
    assert [(row["policy"], row["seed"]) for row in report.rows] == [
        ("full cache", 0), ("tova", 0), ("full cache", 1), ("tova", 1)
    ]  # fmt: skip  # one list
    model, tokenizer, _ = load_model(str(folder))
    for row in report.rows[1::2]:
        assert [(case["task"], case["kind"], case["depth"]) for case in row["cases"]] == [
            ("single", "numbers", 0), ("single", "numbers", 1), ("single", "words", 0), ("single", "words", 1),
            ("fact", "its own", 0), ("fact", "its own", 1)
        ]  # fmt: skip  # one list
        case = make_case(tokenizer, list(NOISE_SENTENCES), kind="words", length=400, depth=1.0, seed=row["seed"])
        got = recall(model, tokenizer, case, partial(EvictingCache, model, "tova", 64))
        full = recall(model, tokenizer, case, partial(full_cache, model))
        stored = row["cases"][3]
        assert stored["logprob"] == pytest.approx(got.logprob, abs=1e-4)
        assert stored["full_logprob"] == pytest.approx(full.logprob, abs=1e-4)
        assert stored["without_logprob"] == pytest.approx(logprob_without(model, tokenizer, case), abs=1e-4)
        sums = [sum(case[name] for case in row["cases"]) for name in ("logprob", "full_logprob", "without_logprob")]
        known = sums[1] - sums[2]
        assert (
            row["graded_recall"] == pytest.approx((sums[0] - sums[2]) / known)
            if known > 0
            else math.isnan(row["graded_recall"])
        )
        assert row["match"] == sum(case["match"] for case in row["cases"]) / 6
    assert "question after the context's compression" in report.text()


# -- resuming ----------------------------------------------------------------------------------------------------


def test_a_stopped_sweep_goes_on_and_equals_an_unbroken_one(given, tmp_path, monkeypatch):
    unbroken = run(given, tmp_path / "whole")
    measured = []
    real = sweep_module.measure_piece

    def stopping(*arguments: Any) -> Any:
        if len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(sweep_module, "measure_piece", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(given, tmp_path / "stopped")
    assert len(list((tmp_path / "stopped" / "parts").iterdir())) == 7
    monkeypatch.setattr(
        sweep_module, "measure_piece", lambda *arguments: measured.append(arguments) or real(*arguments)
    )
    said: list[str] = []
    report = run(given, tmp_path / "stopped", notify=said.append)
    assert len(measured) == 15  # none twice
    assert "7 of 15 parts" in said[0]
    assert report.rows == unbroken.rows
    for name in ("results.jsonl", "results.md"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_killed_run_leaves_whole_parts_only(given, tmp_path):
    """The process ends without any clean-up while it writes; what it was writing is not taken for a part."""
    config = tmp_path / "plan.yaml"
    config.write_text(json.dumps(given))
    script = """
import os, sys
from pathlib import Path
from kvevict import sweep
from kvevict.plan import load_plan
whole, written = Path.write_bytes, 0
def dying(path, content):
    global written
    written += 1
    if written == 5:
        whole(path, content[: len(content) // 2])
        os._exit(9)
    return whole(path, content)
Path.write_bytes = dying
sweep.run_plan(load_plan(Path(sys.argv[1])), Path(sys.argv[2]))
"""
    killed = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", script, str(config), str(killed)], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    parts = [path for path in (killed / "parts").iterdir() if not path.name.startswith(".")]
    assert len(parts) == 4 and all(json.loads(path.read_text())["result"] for path in parts)
    assert not (killed / "results.jsonl").exists()
    run(given, killed)
    run(given, tmp_path / "whole")
    assert (killed / "results.jsonl").read_bytes() == (tmp_path / "whole" / "results.jsonl").read_bytes()


def test_a_part_that_something_else_damaged_is_named(given, tmp_path):
    run(given, tmp_path / "out")
    part = next((tmp_path / "out" / "parts").iterdir())
    part.write_text("{")
    with pytest.raises(OutputError, match=f"{part.name} is damaged .* delete it"):
        run(given, tmp_path / "out")
    part.unlink()
    assert len(run(given, tmp_path / "out").rows) == 5


def test_a_finished_sweep_measures_nothing_again(given, tmp_path, monkeypatch):
    first = run(given, tmp_path / "out")
    monkeypatch.setattr(sweep_module, "measure_piece", pytest.fail)
    assert run(given, tmp_path / "out").rows == first.rows


def test_another_text_seed_or_protocol_is_measured_anew(given, articles, tmp_path):
    first = run(given, tmp_path / "out").rows
    articles.write_text(ARTICLES.replace("cat", "rat"))
    second = run(given, tmp_path / "out").rows
    assert first[0]["perplexity"] != second[0]["perplexity"]
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 5  # of this plan alone
    assert len(list((tmp_path / "out" / "parts").iterdir())) == 30
    assert run({**given, "seeds": [1]}, tmp_path / "out").rows[2]["perplexity"] != second[2]["perplexity"]


def test_other_weights_in_the_same_folder_are_another_revision(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    model, _, _ = load_model(str(copy))
    before = revision(str(copy), model)
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(copy)
    assert revision(str(folder), model) == before != revision(str(copy), model)


def test_threads_are_put_back(given, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run(given, tmp_path / "out").rows[0]["threads"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- many processes ----------------------------------------------------------------------------------------------


def test_a_command_leaves_the_group_that_it_joined_and_no_other():
    def join() -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    @sweep_module.leaving_processes()
    def interrupted() -> None:
        join()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not torch.distributed.is_initialized()
    join()
    try:
        with sweep_module.leaving_processes():
            pass
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_give_the_table_of_one(given, tmp_path):
    config = tmp_path / "plan.yaml"
    config.write_text(json.dumps({**given, "device": "cpu"}))
    out = tmp_path / "two"
    # --multi_gpu is what makes it start several processes; device: cpu keeps them off any GPU
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0 -m kvevict sweep"
    command = [sys.executable, "-m", *launch.split(), str(config), "--output", str(out)]
    paths = os.pathsep.join(filter(None, [str(Path(sweep_module.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written:") == 1
    processes = {json.loads(path.read_text())["timing"]["process"] for path in (out / "parts").iterdir()}
    assert processes == {0, 1}
    run({**given, "device": "cpu"}, tmp_path / "one")
    for name in ("results.jsonl", "results.md"):
        assert (out / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
