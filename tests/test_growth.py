"""A recorded generation: the tokens are generate()'s, the bytes those of the cache, and all caches take turns."""

from __future__ import annotations

import pytest
from helpers import generate, plain, save_reader, small, text, tiny

from kvevict import EvictingCache, OptionError, growth
from kvevict.cli import main
from kvevict.evaluation import cache_bytes
from kvevict.growth import growth as record
from kvevict.growth import growth_rows, growth_table
from kvevict.results import read_rows

PROMPT, NEW, BUDGET = 12, 10, 9


@pytest.fixture(scope="module")
def ids():
    return text(1, PROMPT)


def test_each_cache_generates_what_it_generates_alone(ids):
    model = tiny()
    found = record(model, ids, {"tova": (small("tova"), BUDGET), "half": (small("tova"), 0.5)}, NEW)
    assert list(found) == ["full cache", "tova", "half"]
    for name, cache in (
        ("full cache", plain(model)),
        ("tova", EvictingCache(model, small("tova"), BUDGET)),
        ("half", EvictingCache(model, small("tova"), 0.5)),
    ):
        out = generate(model, ids, cache, new=NEW).sequences[0, PROMPT:]
        assert found[name].tokens == out.tolist()


def test_bytes_are_those_of_the_cache_at_every_step(ids):
    model = tiny()
    found = record(model, ids, {"tova": (small("tova"), BUDGET)}, NEW)
    full = found["full cache"].held_bytes
    assert len(full) == NEW + 1 and len(found["full cache"].seconds) == NEW + 1
    assert full[1] - full[0] == full[-1] - full[-2] == full[0] // PROMPT  # a token's keys and values
    cache = EvictingCache(model, small("tova"), BUDGET)
    generate(model, ids, cache, new=NEW + 1)
    assert found["tova"].held_bytes[-1] == cache_bytes(cache) == found["tova"].held_bytes[-5]
    assert all(seconds > 0 for each in found.values() for seconds in each.seconds)


def test_all_caches_take_their_turn_before_any_takes_another(ids, monkeypatch):
    forward, order = growth._forward, []

    def watched(model, cache, ids):
        order.append(id(cache))
        return forward(model, cache, ids)

    monkeypatch.setattr(growth, "_forward", watched)
    caches = {name: (small(name), BUDGET) for name in ("tova", "h2o")}
    record(tiny(), ids, caches, NEW)
    rounds = [order[start : start + 3] for start in range(1, len(order), 3)]  # the first forward warms up
    assert len(rounds) == NEW + 1
    assert all(set(each) == set(rounds[0]) and len(set(each)) == 3 for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # in changing order


def test_figures_of_a_row_are_of_the_last_quarter():
    full = growth.Growth([1] * 8, [9.0, *[1.0] * 6, 2.0, 4.0], [10] * 8 + [20])
    other = growth.Growth([1] * 8, [18.0, *[1.0] * 6, 3.0, 6.0], [10, 30, *[10] * 7], prompt=90)
    _, row = growth_rows({"full cache": full, "a": other}, {"full cache": {}, "a": {"policy": "a", "budget": 3}}, {})
    assert (row["end_bytes"], row["peak_bytes"], row["end_bytes_of_full"]) == (10, 30, 0.5)
    assert (row["step_seconds"], row["step_of_full"]) == (4.5, 1.5)
    assert (row["prefill_tokens_per_second"], row["prefill_of_full"]) == (5, 2)
    assert row["decode_tokens_per_second"] == 1 / 4.5
    cells = ["a", "3", "0.0", "0.500", "0.0", "5.0", "2.000", "0.2", "4500.00", "1.500"]
    assert growth_table([row])[1] == [cells]


def test_the_model_is_left_in_its_mode_and_bad_numbers_are_refused(ids):
    model = tiny().train()
    record(model, ids, {}, 1)
    assert model.training
    with pytest.raises(OptionError, match="new=0"):
        record(model, ids, {}, 0)
    with pytest.raises(OptionError, match="one row"):
        record(model, text(2, PROMPT), {}, 1)
    with pytest.raises(OptionError, match="rename it"):
        record(model, ids, {"full cache": (small("tova"), 9)}, 1)


def test_the_command_writes_the_series_and_the_table(tmp_path, capsys):
    reader = save_reader(tmp_path / "reader")
    (tmp_path / "words.txt").write_text("The cat sat on a mat and saw a dog. " * 4)
    given = ["--model", str(reader), "--text", str(tmp_path / "words.txt"), "--prompt", "20"]
    options = ["--new", "12", "--policies", "tova", "--budget", "16,24", "--output", str(tmp_path / "out")]
    assert main(["growth", *given, *options]) == 0
    printed = capsys.readouterr().out
    rows = read_rows(tmp_path / "out")
    assert [(row["policy"], row["budget"]) for row in rows] == [("full cache", None), ("tova", 16), ("tova", 24)]
    for row in rows:
        assert len(row["seconds"]) == len(row["held_bytes"]) == 13 and len(row["tokens"]) == 12
        assert row["measure"] == "growth" and row["revision"].startswith("sha256:") and row["text"] == "words.txt"
        assert {"torch", "transformers", "threads", "seed", "text_sha256", "protocol", "prompt"} <= set(row)
        assert f"{row['step_of_full']:.3f}" in printed
    assert f"{rows[1]['end_bytes_of_full']:.3f}" in (tmp_path / "out" / "results.md").read_text("utf-8")
    assert main(["growth", *given[:-1], "500", *options]) == 2
    assert "has only 144 tokens" in capsys.readouterr().err
