"""Capturing a model's attention, and replaying it: what is on disk is what the model attended to."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import HEADS, KV_HEADS, LAYERS, NAMES, forward, plain, small, snapshot, text, tiny
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from kvevict import EvictingCache, OptionError, UnsupportedModelError
from kvevict.cli import main
from kvevict.errors import EvaluationError, OutputError, TraceError
from kvevict.lab import capture as capture_module
from kvevict.lab.blockfile import ROW_ERROR, block_path, write_block
from kvevict.lab.capture import capture, plan
from kvevict.lab.captured import captured_trace
from kvevict.lab.closed import beside, rank_correlation
from kvevict.lab.harness import Lane, prepared
from kvevict.lab.simulation import simulate
from kvevict.policies import H2O, Full

TOKENS, BLOCK = 40, 16
README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return text(1, TOKENS)[0]


@pytest.fixture(scope="module")
def captured(tmp_path_factory, ids) -> Path:
    path = tmp_path_factory.mktemp("captured") / "trace"
    capture(tiny(), ids, path, source="tiny", block=BLOCK, about={"text": "random"})
    return path


@pytest.fixture
def copy(captured, tmp_path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "copy"))


def attention(ids: torch.Tensor) -> torch.Tensor:
    """The whole attention of the model in one forward: (layers, heads, tokens, tokens)."""
    model = tiny("eager")
    with torch.no_grad():
        return torch.cat(model(ids[None], output_attentions=True).attentions)


def whole(path: Path) -> torch.Tensor:
    """A captured trace as one tensor: (layers, heads, tokens, tokens)."""
    blocks = [block.weights.flatten(1, 2) for block in captured_trace(path).blocks()]
    width = blocks[-1].shape[-1]
    return torch.cat([torch.nn.functional.pad(block, (0, width - block.shape[-1])) for block in blocks], 2)


def test_the_trace_is_the_models_attention_to_half_precision(captured, ids):
    expected, got = attention(ids), whole(captured)
    assert got.shape == (LAYERS, HEADS, TOKENS, TOKENS)
    torch.testing.assert_close(got, expected, rtol=2**-10, atol=1e-6)  # half a unit of float16, and of the forward
    assert (got.sum(-1) - expected.sum(-1)).abs().max() < ROW_ERROR


def test_keys_and_values_are_those_of_the_cache(captured, ids):
    model = tiny()
    cache = plain(model)
    forward(model, cache, ids[None])
    blocks = list(captured_trace(captured).blocks())
    for name in ("keys", "values"):
        got = torch.cat([getattr(block, name) for block in blocks], 2)
        expected = torch.stack([getattr(layer, name)[0] for layer in cache.layers])
        torch.testing.assert_close(got, expected, rtol=2**-10, atol=1e-5)


def test_the_model_is_left_as_it_was(tmp_path, ids):
    model = tiny().train()
    before = snapshot(model)
    capture(model, ids, tmp_path / "new", block=BLOCK)
    assert snapshot(model) == before
    assert model.training


def test_the_size_is_known_before_and_the_disk_holds_less(captured, ids):
    shape = plan(tiny(), ids, BLOCK)
    pairs = sum(q * w for q, w in [(16, 16), (16, 32), (8, 40)])
    assert shape.nbytes == 2 * (LAYERS * HEADS * pairs + 2 * LAYERS * KV_HEADS * TOKENS * 16)
    assert sum(path.stat().st_size for path in captured.glob("*.kva")) < shape.nbytes


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path, ids, monkeypatch):
    monkeypatch.setattr(capture_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(OutputError, match=r"may need .* KiB and .* has 10 B free"):
        capture(tiny(), ids, tmp_path / "new", block=BLOCK)
    assert not (tmp_path / "new").exists()


# -- interruption -----------------------------------------------------------------------------------------------------


def interrupted(ids: torch.Tensor, path: Path, after: int) -> None:
    def stop(tokens: int) -> None:
        stop.done += tokens
        if stop.done >= after:
            raise KeyboardInterrupt

    stop.done = 0
    with pytest.raises(KeyboardInterrupt):
        capture(tiny(), ids, path, source="tiny", block=BLOCK, about={"text": "random"}, progress=stop)


def test_an_interrupted_capture_is_a_usable_prefix(tmp_path, ids, captured):
    interrupted(ids, tmp_path / "new", after=20)
    trace = captured_trace(tmp_path / "new")
    assert trace.length == 32
    assert trace.about["notice"] == "the capture was interrupted after 32 of 40 tokens"
    assert torch.equal(whole(tmp_path / "new"), whole(captured)[:, :, :32, :32])
    prefix = captured_trace(captured, 32)
    policies = {"h2o": H2O()}
    assert simulate(trace, policies, [9]).rows == simulate(prefix, policies, [9]).rows


def test_a_continued_capture_equals_an_unbroken_one_bit_for_bit(tmp_path, ids, captured):
    interrupted(ids, tmp_path / "new", after=20)
    before = block_path(tmp_path / "new", 0).stat().st_ino
    done = capture(tiny(), ids, tmp_path / "new", source="tiny", block=BLOCK, about={"text": "random"})
    assert done.resumed == 32
    assert block_path(tmp_path / "new", 0).stat().st_ino == before  # what was there is not written again
    for index in range(3):
        assert block_path(tmp_path / "new", index).read_bytes() == block_path(captured, index).read_bytes()
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".kva", ".json"}  # nothing half-written


def test_another_capture_in_the_folder_is_refused_and_left_alone(copy, ids):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    for changed in ({"ids": ids.flip(0)}, {"block": 8}, {"source": "other"}):
        arguments = {"ids": ids, "folder": copy, "source": "tiny", "block": BLOCK, **changed}
        with pytest.raises(TraceError, match="holds another capture"):
            capture(tiny(), **arguments)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_a_folder_of_something_else_is_refused(tmp_path, ids):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match="not a captured trace"):
        capture(tiny(), ids, tmp_path, block=BLOCK)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-5], r"has \d+ bytes, expected \d+: delete it, and the same kvevict capture makes it anew"),
        (lambda raw: raw[:10], "not a block of captured attention, or its beginning is lost"),
        (lambda raw: b"PK" + raw[2:], "not a block of captured attention"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "its checksum is wrong"),
    ],
    ids=["truncated", "cut to nothing", "foreign", "one bit"],
)
def test_a_damaged_block_is_named_and_can_be_made_anew(copy, captured, ids, damage, said):
    path = block_path(copy, 1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=said) as caught:
        list(captured_trace(copy).blocks())
    assert str(path) in str(caught.value)
    path.unlink()
    assert captured_trace(copy).length == 16
    capture(tiny(), ids, copy, source="tiny", block=BLOCK)
    assert torch.equal(whole(copy), whole(captured))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not the header of a captured trace"),
        ("{}", "is not the header of a captured trace"),
        ('{"format": "other"}', "is not the header of a captured trace"),
        ("[]", "is not the header of a captured trace"),
        (None, "has no capture.json"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "capture.json").write_text(content)
    with pytest.raises(TraceError, match=said):
        captured_trace(tmp_path)


def test_a_header_that_is_no_text_is_not_printed(tmp_path):
    (tmp_path / "capture.json").write_bytes(b"\xff" * 10_000)
    with pytest.raises(TraceError, match="is not the header of a captured trace") as caught:
        captured_trace(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "has format 2"),
        ({"tokens": 41}, "damaged"),
        ({"layers": 0}, "damaged"),
        ({"layers": float("inf")}, "is not the header"),
        ({"about": 3}, "is not the header"),
    ],
)
def test_headers_of_other_formats_are_refused(copy, change, said):
    header = copy / "capture.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), **change}))
    with pytest.raises(TraceError, match=said):
        captured_trace(copy)


def test_a_length_reads_the_beginning(captured):
    trace = captured_trace(captured, 20)
    blocks = list(trace.blocks())
    assert (trace.length, trace.about["length"]) == (20, 20)
    assert torch.equal(blocks[1].weights.flatten(1, 2), whole(captured)[:, :, 16:20, :20])
    assert blocks[1].keys.shape[2] == 4 and len(blocks) == 2


def test_lengths_beyond_the_capture_and_empty_ones_are_refused(copy):
    with pytest.raises(TraceError, match="holds 40 tokens; give from 2 to 40"):
        captured_trace(copy, 41)
    for path in copy.glob("*.kva"):
        path.unlink()
    with pytest.raises(TraceError, match="no finished block"):
        captured_trace(copy)


def test_weights_that_are_not_numbers_are_refused_and_not_written(tmp_path):
    weights, keys = torch.full((1, 1, 1, 2, 2), float("nan")), torch.zeros(1, 1, 2, 4)
    with pytest.raises(EvaluationError, match="float32"):
        write_block(tmp_path, 0, weights, keys, keys)
    assert not list(tmp_path.iterdir())


def test_small_weights_survive_half_precision(tmp_path):
    """A row over 70,000 tokens: float16 alone would lose the small ones, 0.0015 of the whole."""
    weights, keys = torch.full((1, 1, 1, 1, 70000), 1e-4), torch.zeros(1, 1, 1, 4)
    weights[..., 10000:] = 2.5e-8
    assert write_block(tmp_path, 0, weights, keys, keys) < ROW_ERROR / 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ids": torch.zeros(2, 3).long()}, "one row"),
        ({"ids": torch.tensor([1])}, "at least 2"),
        ({"block": 0}, "block=0"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, ids, arguments, said):
    with pytest.raises(OptionError, match=said):
        capture(tiny(), **{"ids": ids, "folder": tmp_path / "new", **arguments})
    assert not (tmp_path / "new").exists()


def test_models_that_no_cache_can_serve_are_refused(tmp_path, ids):
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 97}
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        capture(T5ForConditionalGeneration(T5Config(**sizes)), ids, tmp_path / "new")


def test_models_without_grouped_heads_are_captured(tmp_path, ids):
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97)).eval()
    capture(model, ids, tmp_path / "new", block=BLOCK)
    trace = captured_trace(tmp_path / "new")
    assert (trace.layers, trace.heads, trace.group) == (2, 4, 1)


# -- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adaptive_ema"])  # there all layers decide
def test_the_first_layer_keeps_what_it_keeps_inside_the_model(captured, ids, name):
    """Its queries and keys do not depend on evictions, so a replay whose rows sum to one must agree to the token."""
    model, trace, policy = tiny(), captured_trace(captured), small(name)
    lane = Lane(policy, trace, [9], renormalize=True)
    for block in trace.blocks():
        lane.run(block, *prepared(block, trace))
    with EvictingCache(model, policy, 9) as cache:
        for token in ids:
            forward(model, cache, token.view(1, 1))
        inside = cache.kept_positions(0)[0]
    kept = [sorted(position for position in head if position >= 0) for head in lane.positions[0].tolist()]
    assert kept == inside.tolist()


def test_rows_that_are_not_renormalised_are_another_measure(captured):
    plain, whole = (simulate(captured_trace(captured), ["tova"], [9], renormalize=each) for each in (False, True))
    assert plain.row("tova", 9).retained != whole.row("tova", 9).retained
    assert plain.row("oracle", 9) == whole.row("oracle", 9)


def test_every_policy_runs_on_a_captured_trace_and_none_beats_keeping_everything(captured):
    result = simulate(captured_trace(captured), budgets=[33])
    assert not result.left_out
    assert result.row("full", 33).retained == pytest.approx(1, abs=1e-3)
    for row in result.rows:
        assert row.retained <= result.row("full", 33).retained
    assert result.row("oracle", 33).retained > result.row("random", 33).retained


# -- closed loop ------------------------------------------------------------------------------------------------------


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert rank_correlation([1, 1], [1, 2]) is None


def test_perplexities_stand_beside_the_rows_and_what_forgets_nothing_is_not_ranked(captured):
    trace = captured_trace(captured)
    result = simulate(trace, {"full": Full(), "h2o": H2O(), "h2o 2": H2O(recent=2)}, [9, 12])
    mass = {(row.name, row.budget): row.retained for row in result.rows}
    worse = {key: 100 - value for key, value in mass.items() if key[0].startswith("h2o")}
    both = beside(result, {**worse, ("full", 9): 1e9, ("full", 12): 1e9}, 32)
    assert both.row("h2o", 9).perplexity == worse["h2o", 9]
    assert both.settings["rank_correlation"] == pytest.approx({"budget 9": 1, "budget 12": 1, "all budgets": 1})
    assert any("over 4 rows" in note for note in both.notes)
    assert both.table().splitlines()[0].endswith("perplexity@12")
    assert "–" in both.table()  # the oracle cannot run inside a model


def test_capture_then_simulate_with_the_closed_loop(folder, words, tmp_path, capsys):
    trace = tmp_path / "trace"
    arguments = [str(folder), str(words), "--tokens", "60", "--block", "16", "--output", str(trace)]
    assert main(["capture", *arguments]) == 0
    printed, progress = capsys.readouterr()
    assert re.search(r"layers of \d+ heads: [\d.]+ KiB before compression, in 4 files", progress)
    assert "Row sums differ from the model's by at most" in printed
    assert main(["capture", *arguments]) == 0  # nothing is left to do
    assert "60 tokens were there already" in capsys.readouterr().out

    options = ["--budgets", "16,24", "--policies", "h2o,tova,full", "--closed-loop", "--output", str(tmp_path / "out")]
    assert main(["simulate", str(trace), *options]) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert document["settings"]["text"] == "words.txt"
    assert "Rank correlation (Spearman)" in printed
    assert {row["name"] for row in document["rows"] if row["perplexity"]} == {"h2o", "tova", "full"}


@pytest.mark.parametrize("command", ["capture", "diagnose"])
def test_a_folder_that_is_refused_is_refused_before_the_capture_is_announced(command, folder, words, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    named = {
        "capture": [str(folder), str(words), "--output", str(tmp_path / "mine")],
        "diagnose": ["--model", str(folder), "--text", str(words), "--budget", "9", "--trace", str(tmp_path / "mine"),
                     "--policies", "tova", "--output", str(tmp_path / "out")],
    }  # fmt: skip  # one command a line
    assert main([command, *named[command], "--tokens", "40"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is not a captured trace" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_the_closed_loop_of_an_unnamed_model_is_refused(tmp_path, ids, capsys):
    capture(tiny(), ids, tmp_path / "new", block=BLOCK)
    arguments = ["simulate", str(tmp_path / "new"), "--budgets", "9", "--policies", "tova", "--closed-loop"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "does not say which model to load" in capsys.readouterr().err


def test_the_closed_loop_of_a_formula_is_refused(tmp_path, capsys):
    options = ["--budgets", "64", "--closed-loop", "--output", str(tmp_path / "out")]
    assert main(["simulate", "decode-200", *options]) == 2
    assert "no model has it" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path), "--budgets", "64", "--seeds", "1"]) == 2
    assert "has no seeds" in capsys.readouterr().err


def test_the_readmes_commands_run(folder, words, tmp_path, monkeypatch, capsys):
    section = README.read_text("utf-8").partition("## Simulate")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    words.rename(tmp_path / "wiki.test.raw")
    shutil.copytree(README.parent / "examples", tmp_path / "examples")
    commands = block.splitlines()
    assert len(commands) == 5
    for command in commands:
        small = command.replace("decode-4096", "decode-260 --budgets 64").replace(" smollm2 ", f" {folder} ")
        small = small.replace("2048", "80").replace("64,128,256", "40,48,56")
        assert main(small.split()[1:]) == 0, command
    assert "FairShare" in (tmp_path / "report.html").read_text("utf-8")
    assert "perplexity@56" in capsys.readouterr().out
