"""The bench measures what it says, whatever the machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import HEADS, KV_HEADS, LAYERS, forward, save_reader, small, text, tiny
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from kvevict import EvictingCache, OptionError, bench, host, observe
from kvevict.bench import caches, memory, overhead, plan, scaling
from kvevict.cli import main
from kvevict.errors import EvaluationError, MissingPackageError, ModelError, OutputError
from kvevict.policies import POLICIES as ALL

POLICIES = {"h2o": small("h2o"), "random": small("random")}
EVERY = {name: small(name) for name in ALL}
BASELINES = tuple(bench.BASELINES)
TOKEN_BYTES = 2 * KV_HEADS * 16 * 4  # one layer's keys and values of one token, float32


# -- who takes part --------------------------------------------------------------------------------------------


def test_decode_holds_what_it_is_told_in_every_cache_at_every_step():
    model = tiny()
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(args[0].shape[1]), with_kwargs=True
    )
    rows = bench.decode(model, POLICIES, 40, steps=5)
    handle.remove()
    assert [row.name for row in rows] == [bench.DYNAMIC, "h2o", "random"]
    assert [row.held for row in rows] == [40, 40, 40]
    assert all(len(row.seconds) == 5 and min(row.seconds) > 0 for row in rows)
    assert sizes == [2, 40, 40] + [1] * (3 * (5 + bench.WARM_UP))  # of the first, only a few tokens are read
    assert rows[2].nbytes > 0.9 * rows[0].nbytes


def test_every_policy_and_every_baseline_takes_part():
    rows = bench.decode(tiny(), EVERY, 24, steps=2, baselines=BASELINES)
    assert [row.name for row in rows] == [bench.DYNAMIC, *bench.BASELINES.values(), *ALL]
    held = {row.name: row.held for row in rows}
    one_by_one = set(held) - {"scissorhands", "pyramidkv"}  # many at once, and more in early layers
    assert {held[name] for name in one_by_one} == {24}


def test_after_a_long_text_the_full_caches_hold_all_and_the_others_the_budget():
    rows = bench.against_full(tiny(), POLICIES, 60, 12, steps=3, baselines=BASELINES)
    full, budget = [bench.DYNAMIC, bench.EAGER, bench.STATIC], [bench.LIMIT, bench.SLIDING, bench.IN_PLACE, *POLICIES]
    assert {row.name: row.held for row in rows} == dict.fromkeys(full, 60) | dict.fromkeys(budget, 12)
    assert {row.at for row in rows} == {60}


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 16])
def test_filling_at_random_leaves_what_reading_would(tokens):
    model = tiny()
    group = caches.entrants(model, {}, tokens=tokens, budget=16, baselines=BASELINES)
    for each in group:
        filled, read = each.make(), each.make()
        caches.fill(each.model, filled, tokens)
        caches.forward(each.model, read, caches.random_ids(model, 1, tokens))
        for one, other in zip(filled.layers, read.layers, strict=True):
            assert one.keys.shape == other.keys.shape and one.values.shape == other.values.shape
        assert int(filled.get_seq_length()) == int(read.get_seq_length()) == tokens
        assert torch.allclose(filled.layers[0].keys[:, :, 0], read.layers[0].keys[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_computes_what_dynamic_cache_does_while_nothing_is_evicted(baseline):
    model, ids = tiny(), text(length=24)
    dynamic, other = caches.entrants(model, {}, tokens=20, budget=20, baselines=[baseline])
    results = []
    for each in (dynamic, other):
        cache = each.make()
        forward(each.model, cache, ids[:, :20])
        steps = []
        for position in range(20, 24):
            steps.append(forward(each.model, cache, ids[:, position : position + 1]))
            caches.rewind(cache)
        results.append(torch.cat(steps, 1))
    expected, got = results
    if baseline == "sliding":  # it evicts after the first step
        expected, got = expected[:, :1], got[:, :1]
    assert (got - expected).abs().max() < 1e-4  # float32 sums in another order, logits of size 10


def test_the_eager_twin_shares_every_weight_and_leaves_the_model_alone():
    model = tiny()
    cache = EvictingCache(model, small("h2o"), budget=9)  # prepares the model
    twin = caches.eager_twin(model)
    assert host.implementation(twin) == "eager" and host.implementation(model) == "sdpa"
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert forward(twin, DynamicCache(config=twin.config), text()).shape[1] == text().shape[1]
    forward(model, cache, text())
    assert cache.stored == [9] * LAYERS


def test_a_model_with_sliding_layers_of_its_own_leaves_out_what_cannot_serve_it():
    torch.manual_seed(0)
    config = Gemma3TextConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              num_key_value_heads=1, head_dim=16, vocab_size=64, sliding_window=8,
                              layer_types=["sliding_attention", "full_attention"])  # fmt: skip  # one model
    model = Gemma3ForCausalLM(config).eval()
    rows = bench.decode(model, POLICIES, 20, steps=2, baselines=BASELINES)
    assert [row.name for row in rows] == [bench.DYNAMIC, bench.EAGER, bench.IN_PLACE, *POLICIES]
    report = bench.Report()
    bench.jobs(model, POLICIES, dataclasses.replace(bench.QUICK, scale_policies=None, sections=("decode",)), report)
    assert sum("is left out: some of the model's layers" in note for note in report.notes) == 2


# -- prompts, scaling ------------------------------------------------------------------------------------------


def test_prefill_cuts_each_prompt_and_counts_no_warm_up():
    rows = bench.prefill(tiny(), POLICIES, 50, 10, repeats=3, baselines=BASELINES)
    full = [bench.DYNAMIC, bench.EAGER, bench.STATIC]
    assert {row.name: row.held for row in rows} == dict.fromkeys(full, 50) | {
        bench.SLIDING: 10,
        "h2o": 10,
        "h2o, fused": 10,
        "random": 10,
    }
    assert all(len(row.seconds) == 3 for row in rows)


def test_prompts_are_read_in_one_pass_too_where_a_policy_and_the_attention_can(monkeypatch):
    read: dict[bool, int] = {False: 0, True: 0}
    compute = observe.attention_rows

    def watched(*args: Any, **kwargs: Any) -> Any:
        read["output" in kwargs] += 1
        return compute(*args, **kwargs)

    monkeypatch.setattr(observe, "attention_rows", watched)
    rows = bench.prefill(tiny(), POLICIES, 50, 10, repeats=2)
    assert [row.name for row in rows] == [bench.DYNAMIC, "h2o", "h2o, fused", "random"]
    assert read == {False: 3 * LAYERS, True: 3 * LAYERS}
    rows = bench.prefill(caches.eager_twin(tiny()), POLICIES, 50, 10, repeats=2)
    assert [row.name for row in rows] == [bench.DYNAMIC, "h2o", "random"]


def test_scaling_by_tokens_seen_reads_on_and_keeps_the_budget():
    model = tiny()
    read: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(args[0].shape[1]) if args[0].shape[1] > 3 else None, with_kwargs=True
    )
    rows = bench.by_seen(model, {"random": small("random")}, [60, 30], 12, steps=2)
    handle.remove()
    assert [(row.at, row.name, row.held) for row in rows] == [
        (30, bench.DYNAMIC, 30), (30, bench.LIMIT, 12), (30, "random", 12),
        (60, bench.DYNAMIC, 60), (60, bench.LIMIT, 12), (60, "random", 12)]  # fmt: skip  # three caches a line
    assert read == [30, 60 - 30 - 2 - bench.WARM_UP]


def test_scaling_by_budget_rows_and_layers_varies_that_and_nothing_else():
    model = tiny()
    by_budget = bench.by_budget(model, POLICIES, [8, 16], steps=2)
    assert [(row.at, row.held) for row in by_budget] == [(8, 8)] * 3 + [(16, 16)] * 3
    one, *rest = (
        [row.nbytes for row in bench.by_batch(model, POLICIES, [rows], 16, steps=2)] for rows in (1, 2, 4)
    )  # bytes of DynamicCache, h2o, random
    assert [four[0] / one[0] for four in rest] == [2, 4]
    assert all(four[2] == pytest.approx(rows * one[2], rel=0.1) for four, rows in zip(rest, (2, 4), strict=True))
    layers = bench.by_layers(model, POLICIES, [1, 3], 16, steps=2)
    assert [row.nbytes for row in layers if row.name == bench.DYNAMIC] == [17 * TOKEN_BYTES, 3 * 17 * TOKEN_BYTES]
    assert {row.section for row in layers} == {"layers"}


def test_a_random_llama_has_the_shape_and_type_it_was_asked_for_and_changes_no_global_state():
    state = torch.random.get_rng_state()
    shape = bench.parse_shape("layers=2,hidden=64,heads=4,kv_heads=2,head_dim=32,vocabulary=100")
    model = bench.random_model(shape, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert torch.get_default_dtype() == torch.float32 and torch.random.get_rng_state().equal(state)
    assert scaling.shape_of(model, 5) == dataclasses.replace(shape, layers=5)


def test_the_named_shapes_have_their_models_parameters():
    counted = {name: shape.parameters / 1e9 for name, shape in bench.SHAPES.items()}
    # as published: 1.24 and 3.21 with shared embeddings; 8.03 has a second matrix of 0.53 for its output
    assert counted == pytest.approx({"1b": 1.24, "3b": 3.21, "8b": 8.03 - 0.53}, abs=0.01)


@pytest.mark.parametrize(
    "given", ["7c", "layers=2", "layers=2,hidden=64,heads=0", "layers=x,hidden=64,heads=4",
              "hidden=64,heads=4,layers=0",
              "layers=2,hidden=64,heads=4,kv_heads=3", "layers=1,hidden=64,heads=4,depth=3"]
)  # fmt: skip  # names to a line
def test_a_shape_that_makes_no_llama_is_refused(given):
    with pytest.raises(OptionError, match="give"):
        bench.parse_shape(given)


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made():
    giant = dataclasses.replace(bench.SHAPES["8b"], layers=100_000)
    with pytest.raises(ModelError, match="GiB left"):
        bench.random_model(giant)


# -- bytes -----------------------------------------------------------------------------------------------------


def test_the_peak_is_that_of_known_allocations():
    with bench.peak_memory(torch.device("cpu")) as peak:
        one = torch.empty(1 << 20, dtype=torch.uint8)
        two = torch.empty(2 << 20, dtype=torch.uint8)
        del one
        three = torch.empty(1 << 18, dtype=torch.uint8)
        del two, three
    assert peak.nbytes == 3 << 20


def test_the_peak_leaves_out_what_was_there_and_sees_inside_kernels():
    before = torch.ones(1 << 20, dtype=torch.uint8)
    with bench.peak_memory(torch.device("cpu")) as peak:
        before.zero_()
    assert peak.nbytes == 0
    rows = torch.randn(64, 64)
    with bench.peak_memory(torch.device("cpu")) as peak:
        rows.softmax(0).sum()  # the softmax's own result is let go inside the line
    assert peak.nbytes >= 64 * 64 * 4


def test_peaks_elsewhere_are_refused():
    with pytest.raises(OptionError, match="CUDA"), bench.peak_memory(torch.device("meta")):
        pass


def test_prompt_memory_tells_a_matrix_of_attention_from_none():
    tokens = 512
    model = tiny(num_hidden_layers=2)
    rows = {row.name: row for row in bench.prompt_memory(model, {"random": small("random")}, tokens, 32,
                                                         baselines=["eager"])}  # fmt: skip  # one call
    matrix = HEADS * tokens * tokens * 4
    assert {row.matrix_bytes for row in rows.values()} == {matrix}
    assert rows[bench.EAGER].peak_bytes >= rows[bench.DYNAMIC].peak_bytes + matrix
    assert rows["random"].peak_bytes < rows[bench.DYNAMIC].peak_bytes + matrix / 4
    assert rows[bench.DYNAMIC].held_bytes == 2 * tokens * TOKEN_BYTES
    assert rows["random"].held_bytes < rows[bench.DYNAMIC].held_bytes / 8


@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "snapkv"])
def test_a_long_prompt_in_pieces_holds_the_budget_and_one_piece_in_each_layer(name):
    full, own = bench.bounded_prefill(tiny(), {name: small(name)}, 120, 20, 12)
    assert len(full.seconds) == len(own.seconds) == 6
    assert full.peak_bytes == full.expected_bytes == 120 * TOKEN_BYTES
    assert own.expected_bytes == 32 * TOKEN_BYTES
    assert own.peak_bytes == own.expected_bytes
    assert own.held_bytes < full.held_bytes / 2


def test_growth_compares_the_last_third_with_the_first_and_leaves_out_the_first_piece():
    row = bench.Bounded("h2o", 80, 10, 10, (9.0, 1.0, 1.0, 1.5, 2.0, 3.0, 3.0), 1, 1, 1)
    assert row.growth == 3.0


@pytest.mark.parametrize("sizes", [(100, 30), (60, 20), (40, 1)])
def test_pieces_that_do_not_fill_the_prompt_are_refused(sizes):
    with pytest.raises(OptionError, match="multiple of the piece"):
        bench.bounded_prefill(tiny(), POLICIES, *sizes, 10)


def test_the_largest_that_fits_is_found_in_few_tries():
    for most in range(103):
        tried: list[int] = []

        def fits(rows: int, most: int = most, tried: list[int] = tried) -> bool:
            tried.append(rows)
            return rows <= most

        assert bench.largest(fits, 100) == min(most, 100)
        assert len(tried) == len(set(tried)) <= 15 and max(tried) <= 100


def test_a_batch_that_fits_gives_its_bytes_and_one_that_does_not_gives_none():
    model = tiny()
    dynamic, h2o = caches.entrants(model, {"h2o": small("h2o")}, tokens=30, budget=12)
    assert memory._step_fits(dynamic, 30, 3) == 3 * 31 * LAYERS * TOKEN_BYTES
    one, four = memory._step_fits(h2o, 13, 1), memory._step_fits(h2o, 13, 4)
    assert four == pytest.approx(4 * one, rel=0.05)

    def full() -> DynamicCache:
        raise torch.OutOfMemoryError("no room")

    assert memory._step_fits(dataclasses.replace(dynamic, make=full), 30, 3) is None


def test_the_largest_batch_does_not_apply_to_a_cpu():
    with pytest.raises(OptionError, match="only be measured on an accelerator"):
        bench.largest_batches(tiny(), POLICIES, 30, 12)


# -- what a policy costs ---------------------------------------------------------------------------------------


def test_policy_cost_has_a_number_for_each_layer_and_a_share_of_the_layer():
    rows = bench.policy_cost(tiny(), EVERY, 24, steps=3)
    assert [row.name for row in rows] == list(ALL)
    assert all(len(row.seconds) == LAYERS and row.layer_seconds > 0 and row.held == 24 for row in rows)
    row = bench.Cost("h2o", 24, (1e-6, 3e-6), 1e-4)
    assert (row.microseconds, row.share) == pytest.approx((2.0, 0.02))


def test_policy_cost_is_what_the_attention_modules_take_beyond_the_plain_cache(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: next(clock))
    model, ticks = tiny(), 5

    def slow(module, args, kwargs, output):
        if isinstance(kwargs.get("cache", kwargs.get("past_key_values")), EvictingCache):
            for _ in range(ticks):
                next(clock)

    for module in host.attention_modules(model):
        module.register_forward_hook(slow, with_kwargs=True)
    [row] = bench.policy_cost(model, {"random": small("random")}, 24, steps=3)
    assert row.seconds == (ticks,) * LAYERS
    assert row.layer_seconds == 3  # its own begin and end, and those of the attention within


def test_the_stopwatch_takes_its_hooks_off():
    model = tiny()
    with overhead.stopwatch(list(model.model.layers), torch.device("cpu")) as seconds:
        forward(model, DynamicCache(), text())
    assert len(seconds) == LAYERS and min(seconds) > 0
    forward(model, DynamicCache(), text())
    assert len(seconds) == LAYERS


def test_waits_are_counted_by_what_made_them():
    model = tiny()
    seen = {row.name: row.calls for row in bench.host_waits(model, {"random": small("random")}, 12)}
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output.sum().item() and None)
    more = {row.name: row.calls for row in bench.host_waits(model, {"random": small("random")}, 12)}
    handle.remove()
    item = "aten::_local_scalar_dense"
    assert {name: calls.get(item, 0) + 1 for name, calls in seen.items()} == {
        name: calls[item] for name, calls in more.items()
    }


# -- rows and tables -------------------------------------------------------------------------------------------


def report() -> bench.Report:
    """One row of each kind, and a second section with its own base."""
    return bench.Report(
        {"model": "none"},
        ["a note"],
        [
            bench.Measured("decode", bench.DYNAMIC, 8, 8, (2.0, 2.0, 4.0), 2**20),
            bench.Measured("decode", "h2o", 8, 8, (1.0, 1.0, 1.0), 2**19),
            bench.Measured("decode", bench.DYNAMIC, 16, 16, (4.0, 4.0, 4.0), 2**21),
            bench.Measured("decode", "h2o", 16, 16, (1.0, 1.0, 1.0), 2**19),
            bench.Measured("kvpress decode", bench.DYNAMIC, 16, 16, (8.0, 8.0, 8.0), 2**21),
            bench.Measured("kvpress decode", "tova", 16, 16, (4.0, 4.0, 4.0), 2**19),
            bench.Measured("alone", "h2o", 16, 16, (4.0, 4.0, 4.0), 2**19),
        ],
        [bench.Memory(bench.DYNAMIC, 8, 100, 50, 1000), bench.Memory("h2o", 8, 80, 20, 1000)],
        [bench.Cost("h2o", 8, (1e-6, 3e-6), 1e-4)],
        [bench.Bounded("h2o", 40, 10, 10, (1.0, 1.0, 1.0, 2.0), 2**20, 2**20, 2**19)],
        [bench.Fit("h2o", 8, 4, 4, 100)],
        [bench.Waits("h2o", 8, {"cudaStreamSynchronize": 2})],
    )


def test_ratios_are_to_the_full_cache_of_the_same_section_and_size():
    found = report()
    assert [bench.ratio(row, found.timings) for row in found.timings] == [1, 0.5, 1, 0.25, 1, 0.5, None]
    lines = [line.split() for line in found.text().splitlines() if line.startswith("decode")]
    assert [line[4] for line in lines] == ["1.000", "0.500", "1.000", "0.250"]


def test_the_text_has_every_row_of_every_kind_and_the_notes():
    printed = report().text()
    for words in (["memory", "8", "h2o", "80", "B", "-20", "B", "20", "B", "1000", "B"],
                  ["policy", "cost", "8", "h2o", "2.0", "2.0%", "100"],
                  ["largest", "batch", "8", "h2o", "4+", "100", "B"],
                  ["host", "waits", "8", "h2o", "2", "cudaStreamSynchronize", "2"],
                  ["Note:", "a", "note"]):  # fmt: skip  # a line each
        assert words in [line.split() for line in printed.splitlines()]
    assert "2.00" in next(line for line in printed.splitlines() if line.startswith("bounded"))


def test_a_written_report_is_read_as_it_was(tmp_path):
    found = report()
    (tmp_path / "bench.json").write_text(found.json())
    assert bench.read(tmp_path / "bench.json") == found
    document = json.loads(found.json())
    assert document["timings"][1]["ratio"] == 0.5 and document["timings"][6]["ratio"] is None
    assert document["policy_cost"][0]["microseconds"] == pytest.approx(2.0)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("{", "is not what"), ("{}", "is not what")])
def test_a_file_that_is_no_report_is_refused(content, said, tmp_path):
    if content is not None:
        (tmp_path / "bench.json").write_text(content)
    with pytest.raises(OutputError, match=said):
        bench.read(tmp_path / "bench.json")


def test_a_file_that_is_no_text_is_not_printed(tmp_path):
    (tmp_path / "bench.json").write_bytes(b"\xff" * 5000)
    with pytest.raises(OutputError, match="UnicodeDecodeError") as caught:
        bench.read(tmp_path / "bench.json")
    assert len(str(caught.value)) < 500


# -- what is asked for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "steps"), [(1, 5), (20, 1)])
def test_too_little_to_measure_is_refused(held, steps):
    with pytest.raises(OptionError, match="at least 2"):
        bench.decode(tiny(), POLICIES, held, steps=steps)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sections": ("decode", "speed")}, "section 'speed'"),
        ({"baselines": ("quantized",)}, "baseline 'quantized'"),
        ({"held": (1,)}, "at least 2"),
        ({"scale_budget": (1,)}, "at least 2"),
        ({"long": 100, "chunk": 30}, "multiple of the piece"),
        ({"kvpress": "python", "sections": ("memory",)}, "decode and after"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_runs(given, said):
    with pytest.raises(OptionError, match=said):
        bench.Settings(**given)


def test_jobs_refuse_a_budget_that_a_policy_cannot_use_and_strangers_in_scaling():
    model, settings = tiny(), dataclasses.replace(bench.QUICK, scale_policies=None)
    with pytest.raises(OptionError, match="cannot hold"):
        bench.jobs(model, {"snapkv": ALL["snapkv"]()}, dataclasses.replace(settings, held=(16,)), bench.Report())
    with pytest.raises(OptionError, match="tova, which is not among"):
        bench.jobs(model, POLICIES, dataclasses.replace(settings, scale_policies=("tova",)), bench.Report())
    with pytest.raises(OptionError, match="nothing to measure"):
        bench.jobs(model, POLICIES, dataclasses.replace(settings, sections=("fit",)), bench.Report())


def test_sizes_beyond_learned_positions_are_refused_and_rotary_ones_go_on():
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=64)
    learned, settings = (
        GPT2LMHeadModel(config).eval(),
        dataclasses.replace(bench.QUICK, sections=("decode",), scale_policies=None, steps=2),
    )
    with pytest.raises(OptionError, match="has learned 64 positions"):
        bench.jobs(learned, POLICIES, dataclasses.replace(settings, held=(60,)), bench.Report())
    found = bench.Report()
    for job in bench.jobs(learned, POLICIES, dataclasses.replace(settings, held=(20,)), found):
        job.run(None)
    assert len(found.timings) == 1 + len(bench.BASELINES) + len(POLICIES)
    rotary = tiny(max_position_embeddings=16)
    assert bench.jobs(rotary, POLICIES, dataclasses.replace(settings, held=(60,)), bench.Report())


def test_every_job_tells_all_of_its_progress():
    settings = dataclasses.replace(bench.QUICK, held=(16,), seen=(40,), prefill=(30,), budget=16, cost=(16,), steps=2,
                                   scale_policies=("random",), scale_seen=(30, 60), scale_budget=(8, 16),
                                   scale_held=16, long=80, chunk=16)  # fmt: skip  # many options
    found = bench.Report()
    for job in bench.jobs(tiny(), POLICIES, settings, found):
        told: list[float] = []
        job.run(told.append)
        assert sum(told) == pytest.approx(1), job.title
        assert job.weight > 0
    assert {row.section for row in found.timings} == {
        "decode", "after", "prefill", "seen", "budget", "batch", "layers"
    }  # fmt: skip  # one set
    assert found.memory and found.policy_cost and found.bounded and not found.fits
    assert any("does not apply to a CPU" in note for note in found.notes)


# -- kvpress in an environment of its own ----------------------------------------------------------------------

STAND_IN = '''
"""Has the parts of kvpress that are used: a press that drops the oldest tokens after each step, and one that fails."""
import contextlib
from dataclasses import dataclass


class KnormPress:
    pass


class TOVAPress:
    pass


@dataclass
class DecodingPress:
    base_press: object
    compression_interval: int
    target_size: int

    @contextlib.contextmanager
    def __call__(self, model):
        assert self.compression_interval == 1
        if isinstance(self.base_press, TOVAPress):
            raise ValueError("needs a longer window")

        def cut(module, args, kwargs, output):
            layer = kwargs["past_key_values" if "past_key_values" in kwargs else "cache"].layers[module.layer_idx]
            layer.keys = layer.keys[:, :, -self.target_size :].contiguous()
            layer.values = layer.values[:, :, -self.target_size :].contiguous()

        handles = [each.self_attn.register_forward_hook(cut, with_kwargs=True) for each in model.model.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
'''


def python_with(folder: Path, kvpress: str | None) -> str:
    """An interpreter that has what this one has, and a kvpress of its own."""
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = [path for path in folder.rglob("site-packages") if path.is_dir()]
    (site / "parent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    if kvpress is not None:
        (site / "kvpress.py").write_text(kvpress)
        (site / "kvpress-0.5.dist-info").mkdir()
        (site / "kvpress-0.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 0.5\n")
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    return str(scripts / "python")


def test_the_command_takes_in_rows_of_another_environment_and_says_so(tmp_path, capsys):
    python, model = python_with(tmp_path / "other", STAND_IN), save_reader(tmp_path / "model")
    arguments = ["bench", "--model", str(model), "--policies", "random", "--baselines", "", "--sections",
                 "decode,after", "--held", "16", "--seen", "40", "--budget", "12", "--steps", "2", "--kvpress", python,
                 "--output", str(tmp_path / "out")]  # fmt: skip  # one command
    assert main(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    found = bench.read(tmp_path / "out" / "bench.json")
    rows = [(row.section, row.name, row.at, row.held) for row in found.timings if row.section.startswith("kvpress")]
    assert rows == [
        ("kvpress decode", bench.DYNAMIC, 16, 16), ("kvpress decode", "knorm", 16, 16),
        ("kvpress after", bench.DYNAMIC, 40, 40), ("kvpress after", "knorm", 40, 12),
    ]  # fmt: skip  # two rows a line
    assert all(bench.ratio(row, found.timings) is not None for row in found.timings)
    assert "kvpress ran in another process: kvpress 0.5, transformers" in printed
    assert "kvpress tova cannot decode like this: ValueError: needs a longer window" in printed
    assert "kvpress snapkv cannot decode like this: AttributeError" in printed


def test_an_interpreter_without_kvpress_is_refused_before_anything_is_loaded(tmp_path, capsys):
    assert main(["bench", "--kvpress", str(tmp_path / "python")]) == 2
    assert "is not a program" in capsys.readouterr().err
    with pytest.raises(MissingPackageError, match="pip install kvpress"):
        bench.check_kvpress(python_with(tmp_path / "other", None))
    with pytest.raises(OptionError, match="does not run Python"):
        bench.check_kvpress("ls")


def test_a_kvpress_that_cannot_start_says_why(tmp_path):
    python = python_with(tmp_path / "other", "raise RuntimeError('built for another torch')")
    model = tiny()
    model.name_or_path = str(save_reader(tmp_path / "model"))
    with pytest.raises(EvaluationError, match="built for another torch"):
        bench.measure_kvpress(python, model, [16], [], 16, steps=2)
    with pytest.raises(OptionError, match="sdpa"):
        bench.measure_kvpress(python, caches.eager_twin(model), [16], [], 16, steps=2)


# -- the command -----------------------------------------------------------------------------------------------

TINY = ["--held", "16,32", "--seen", "40", "--prefill", "24", "--budget", "16", "--steps", "3", "--repeats", "2",
        "--cost", "16", "--scale-seen", "20,40", "--scale-budget", "8,16", "--scale-batch", "1,2", "--scale-layers",
        "1,2", "--long", "64", "--chunk", "16"]  # fmt: skip  # one command


def test_the_command_prints_every_row_and_writes_every_time(tmp_path, capsys):
    model = str(save_reader(tmp_path / "model"))
    out = str(tmp_path / "out")
    assert main(["bench", "--model", model, "--policies", "h2o,random", *TINY, "--output", out]) == 0
    printed = capsys.readouterr().out
    found = bench.read(tmp_path / "out" / "bench.json")
    sections = [row.section for row in found.timings]
    counts = {section: sections.count(section) for section in sections}
    assert counts == {"decode": 2 * 7, "after": 8, "prefill": 7, "seen": 6, "budget": 4, "batch": 4, "layers": 4}
    assert all(len(row.seconds) == (2 if row.section == "prefill" else 3) for row in found.timings)
    assert (len(found.memory), len(found.policy_cost), len(found.bounded)) == (7, 2, 2)
    for row in [*found.timings, *found.memory, *found.policy_cost, *found.bounded]:
        assert row.name in printed
    assert "does not apply to a CPU" in printed


def test_the_command_takes_a_shape_and_all_policies(tmp_path, capsys):
    shape = "layers=2,hidden=32,heads=2,kv_heads=1,vocabulary=64"
    arguments = ["bench", "--shape", shape, "--dtype", "bfloat16", "--device", "cpu", "--policies", "all", "--quick",
                 "--sections", "decode", "--held", "48", "--steps", "2", "--output", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0, capsys.readouterr().err
    found = bench.read(tmp_path / "bench.json")
    assert {row.name for row in found.timings} == {bench.DYNAMIC, *bench.BASELINES.values(), *ALL}
    assert "bfloat16" in found.settings["model"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policies", "h20"], "h2o"),
        (["--sections", "speed"], "section 'speed'"),
        (["--baselines", "quantized"], "baseline 'quantized'"),
        (["--shape", "9z"], "shape '9z'"),
        (["--shape", "layers=1,hidden=64,heads=4,layers=3"], "shape 'layers=1,hidden=64,heads=4,layers=3'"),
        (
            ["--sections", "decode", "--prefill", "64"],
            "sections prefill and memory, and --sections is decode",
        ),
        (["--sections", "decode", "--scale-policies", "h2o"], "--scale-policies is for the sections scaling and"),
        (["--shape", "1b", "--model", "smollm2"], "leave out --model"),
        (["--shape", "1b", "--dtype", "auto"], "dtype='auto'"),
        (["--device", "auto"], "name one device"),
        (["--long", "100", "--chunk", "30"], "multiple of the piece"),
        (["--steps", "1"], "at least 2"),
    ],
)
def test_what_cannot_work_is_found_before_anything_is_loaded(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("kvevict.models.load_model", None)  # calling it would fail
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_compiled_steps_stand_beside_the_same_ones_uncompiled(monkeypatch, request):
    request.addfinalizer(torch.compiler.reset)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, found = tiny(num_hidden_layers=1), bench.Report()
    settings = dataclasses.replace(bench.QUICK, sections=("compiled",), held=(24,), steps=4, scale_policies=None)
    [job] = bench.jobs(model, {"h2o": ALL["h2o"]()}, settings, found)
    job.run(None)
    names = ["DynamicCache", "StaticCache", "h2o", "StaticCache, compiled", "h2o, compiled"]
    assert [row.name for row in found.timings] == names
    assert all(row.held == 24 and row.section == "compiled" and len(row.seconds) == 4 for row in found.timings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert "forward" not in vars(model), "the model itself is not compiled"


def test_a_compiler_that_does_not_work_is_found_before_anything_runs(monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nmore")

    monkeypatch.setattr(torch, "compile", lambda module: broken)
    settings = dataclasses.replace(bench.QUICK, sections=("compiled",), scale_policies=None)
    with pytest.raises(OptionError, match=r"does not work here \(No working C\+\+ compiler found\): install"):
        bench.jobs(tiny(), POLICIES, settings, bench.Report())


def test_quick_measures_less_of_everything_than_the_default():
    quick, whole = bench.QUICK, bench.DEFAULT
    assert {*quick.sections} == {*whole.sections} == {*bench.SECTIONS} - {"compiled"}
    for field in dataclasses.fields(plan.Settings):
        small_one, large_one = getattr(quick, field.name), getattr(whole, field.name)
        if isinstance(large_one, int):
            assert small_one < large_one
        elif field.name not in ("sections", "baselines", "scale_policies", "kvpress"):
            assert len(small_one) <= len(large_one) and max(small_one) <= max(large_one)
