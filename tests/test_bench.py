"""The bench measures what it says, whatever the machine."""

from __future__ import annotations

import json

import pytest
from helpers import save_reader, small, tiny

from kvevict import OptionError, bench
from kvevict.cli import main

POLICIES = {"h2o": small("h2o"), "random": small("random")}


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
    assert sizes == [40] * 3 + [1] * (3 * (5 + bench.WARM_UP))
    assert rows[2].nbytes > 0.9 * rows[0].nbytes


def test_after_a_long_text_the_full_cache_holds_all_and_the_others_the_budget():
    rows = bench.against_full(tiny(), POLICIES, 60, 12, steps=3)
    assert {row.name: row.held for row in rows} == {bench.DYNAMIC: 60, bench.LIMIT: 12, "h2o": 12, "random": 12}
    assert {row.tokens for row in rows} == {60}


def test_prefill_cuts_each_prompt_and_counts_no_warm_up():
    rows = bench.prefill(tiny(), POLICIES, 50, 10, repeats=3)
    assert {row.name: row.held for row in rows} == {bench.DYNAMIC: 50, "h2o": 10, "random": 10}
    assert all(len(row.seconds) == 3 for row in rows)


def test_ratios_are_to_the_full_cache_of_the_same_section_and_size():
    rows = [
        bench.Measured("decode", bench.DYNAMIC, 8, 8, (2.0, 2.0, 4.0), 2**20),
        bench.Measured("decode", "h2o", 8, 8, (1.0, 1.0, 1.0), 2**19),
        bench.Measured("decode", bench.DYNAMIC, 16, 16, (4.0, 4.0, 4.0), 2**21),
        bench.Measured("decode", "h2o", 16, 16, (1.0, 1.0, 1.0), 2**19),
    ]
    lines = [line.split() for line in bench.table(rows).splitlines()]
    assert [line[4] for line in lines] == ["ratio", "1.000", "0.500", "1.000", "0.250"]
    assert lines[1][-1] == "1.0" and lines[2][-1] == "0.5"


@pytest.mark.parametrize(("held", "steps"), [(1, 5), (20, 1)])
def test_too_little_to_measure_is_refused(held, steps):
    with pytest.raises(OptionError, match="at least 2"):
        bench.decode(tiny(), POLICIES, held, steps=steps)


def test_the_command_prints_ratios_and_writes_every_time(tmp_path, capsys):
    model = str(save_reader(tmp_path / "model"))
    arguments = ["bench", "--model", model, "--policies", "h2o,random", "--held", "16,32", "--seen", "40",
                 "--prefill", "", "--budget", "16", "--steps", "3", "--output",
                 str(tmp_path / "out")]  # fmt: skip  # one command
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "bench.json").read_text())["rows"]
    assert len(rows) == 3 + 3 + 4 and all(len(row["seconds"]) == 3 for row in rows)
    assert {row["section"] for row in rows} == {"decode", "after"}
    for row in rows:
        assert row["name"] in printed


def test_an_unknown_policy_is_found_before_anything_is_loaded(capsys):
    assert main(["bench", "--policies", "h20"]) == 2
    assert "h2o" in capsys.readouterr().err
