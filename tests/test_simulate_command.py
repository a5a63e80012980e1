"""The command ``kvevict simulate``, in this process on short traces."""

from __future__ import annotations

import json
import re

import pytest

from kvevict.cli import main
from kvevict.lab.catalogue import CATALOGUE

MINE = '''
from dataclasses import dataclass
from kvevict import ALL_QUERIES, Column, Policy

@dataclass(frozen=True, kw_only=True)
class Sum(Policy):
    """Keeps what H2O keeps."""
    queries = ALL_QUERIES
    def columns(self, budget):
        return {"sum": Column()}
    def observe(self, held, rows):
        held["sum"].add_(rows.weights.mean(2).sum(2))
    def score(self, held):
        return held["sum"]

@dataclass(frozen=True, kw_only=True)
class Demanding(Sum):
    power: float

ready = Sum(recent=32)
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def command(tmp_path, *arguments: str) -> int:
    return main(["simulate", *arguments, "--output", str(tmp_path / "out")])


def test_the_command_prints_the_table_and_writes_two_files(tmp_path, capsys):
    assert command(tmp_path, "decode-300", "--budgets", "64,128") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == ["policy", "retained@64", "retained@128", "recall@64", "recall@128"]
    assert "options of the policybook catalogue" in printed
    document = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert [row["name"] for row in document["rows"][::2]] == [*CATALOGUE, "oracle", "random", "ceiling"]
    assert document["settings"]["seeds"] == [7] and document["settings"]["budgets"] == [64, 128]
    table = (tmp_path / "out" / "simulation.md").read_text()
    for row in document["rows"]:
        assert f"{row['retained']:.4f}" in printed and f"{row['retained']:.4f}" in table
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"simulation.json", "simulation.md"}


def test_several_seeds_give_mean_and_spread(tmp_path, capsys):
    assert command(tmp_path, "decode-300", "--budgets", "64", "--seeds", "1-3", "--policies", "h2o") == 0
    assert "±" in capsys.readouterr().out
    row = json.loads((tmp_path / "out" / "simulation.json").read_text())["rows"][0]
    runs = [run[0] for run in row["by_run"]]
    mean = sum(runs) / 3
    assert len(set(runs)) == 3 and row["retained"] == pytest.approx(mean)
    assert row["retained_spread"] == pytest.approx((sum((run - mean) ** 2 for run in runs) / 2) ** 0.5)


def test_ordinary_names_are_at_the_librarys_defaults_and_the_output_says_so(tmp_path, capsys):
    assert command(tmp_path, "decode-300", "--budgets", "128", "--policies", "h2o,catalogue:h2o", "--no-bounds") == 0
    assert "Policies are at their defaults" in capsys.readouterr().out
    ours, theirs = json.loads((tmp_path / "out" / "simulation.json").read_text())["rows"]
    assert (ours["name"], theirs["name"]) == ("h2o", "catalogue:h2o")
    assert "recent=None" in ours["policy"] and "recent=32" in theirs["policy"]
    assert ours["retained"] != theirs["retained"]


def test_all_leaves_out_what_cannot_run(tmp_path, capsys):
    assert command(tmp_path, "mixed", "--budgets", "16", "--policies", "all") == 0
    printed = capsys.readouterr().out
    assert "snapkv was left out: a budget of 16 cannot hold" in printed
    assert "key_norm was left out: key_norm reads keys or values" in printed


def test_a_policy_of_the_users_file_runs(tmp_path, mine, capsys):
    arguments = ["decode-300", "--budgets", "64", "--policies", "catalogue:h2o", "--no-bounds"]
    assert command(tmp_path, *arguments, "--policy", f"{mine}:ready", "--policy", f"{mine}:Sum") == 0
    catalogue, ready, plain = json.loads((tmp_path / "out" / "simulation.json").read_text())["rows"]
    assert (ready["name"], plain["name"]) == ("ready", "Sum")
    assert ready["retained"] == catalogue["retained"] != plain["retained"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Summ", "'Summ' is not a policy in .*did you mean 'Sum'.*there are: Sum, Demanding, ready"),
        ("dataclass", "'dataclass' is not a policy"),
        ("Demanding", "cannot be made without options"),
    ],
)
def test_what_is_wrong_with_a_users_policy_is_said(tmp_path, mine, capsys, name, said):
    assert command(tmp_path, "decode-300", "--budgets", "64", "--policy", f"{mine}:{name}") == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode-4096x"], "did you mean 'decode-4096'"),
        (["decode-300", "--budgets", "64,512"], "budget=512 is above the 300 tokens"),
        (["decode-300", "--seeds", ""], "give at least one"),
        (["decode-99999999999", "--budgets", "64"], "at most 1048576 tokens"),
        (["mixed", "--budgets", "64", "--length", "99999999999"], "at most 1048576 tokens"),
        (["decode-300", "--budgets", "64", "--html", "."], "--html '.' is a folder: name the file"),
        (["decode-300", "--budgets", "64", "--html", ""], "--html '.' is a folder: name the file"),
        (["decode-300", "--budgets", "64", "--policies", "tovaa"], "did you mean 'tova'"),
        (["decode-300", "--budgets", "64", "--policies", "catalogue:tovaa"], "the catalogue has no policy 'tovaa'"),
        (["decode-300", "--budgets", "64", "--policy", "nowhere.py:X"], "there is no file 'nowhere.py'"),
        (["decode-300", "--budgets", "64", "--policy", "nowhere.py"], "such as my_file.py:MyPolicy"),
    ],
)
def test_errors_of_the_command_come_before_anything_is_written(tmp_path, capsys, arguments, said):
    assert command(tmp_path, *arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_that_fails_when_it_is_run_is_told_so(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--nonsense'])")
    assert command(tmp_path, "decode-300", "--budgets", "64", "--policy", f"{script}:X") == 2
    assert "__main__" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    assert command(tmp_path, "decode-300", "--budgets", "64") == 2
    assert "cannot be written" in capsys.readouterr().err
