"""The command line, run in this process on a tiny model with a tokenizer made here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvevict
from kvevict import text as text_module
from kvevict.cli import main
from kvevict.policies import POLICIES


@pytest.fixture
def arguments(folder: Path, words: Path, tmp_path: Path) -> list[str]:
    return ["compare", "--model", str(folder), "--text", str(words), "--output", str(tmp_path / "out")]


def test_compare_prints_the_table_and_writes_three_files(arguments, tmp_path, capsys):
    assert main([*arguments, "--budget", "40", "--tokens", "100"]) == 0
    printed, progress = capsys.readouterr()
    for name in ["full cache", *POLICIES]:
        assert any(line.startswith(name) for line in printed.splitlines())
    assert "one run each" in printed
    assert "100%" in progress
    settings = json.loads((tmp_path / "out" / "results.json").read_text())["settings"]
    assert (settings["tokens"], settings["budget"], settings["text"]) == (100, 40, "words.txt")
    assert len(settings["text_sha256"]) == 64
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.md", "comparison.png"}


def test_policies_and_shares_can_be_chosen(arguments, tmp_path):
    assert main([*arguments, "--budget", "0.5", "--policies", "h2o, tova,h2o", "--tokens", "60"]) == 0
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in document["rows"]] == ["full cache", "h2o", "tova"]
    assert document["settings"]["budget"] == 0.5


def test_a_text_shorter_than_asked_for_is_read_whole_and_said(arguments, capsys):
    assert main([*arguments, "--policies", "tova", "--budget", "16", "--tokens", "5000"]) == 0
    assert "words.txt has only 200 tokens" in capsys.readouterr().err


def test_another_text_than_wikitext_is_said_and_kept(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(text_module, "hub_answers", lambda: False)
    del arguments[3:5]
    assert main([*arguments, "--policies", "tova", "--budget", "16", "--tokens", "40"]) == 0
    printed, said = capsys.readouterr()
    assert "pydoc_data.topics" in printed and "pydoc_data.topics" in said
    assert "pydoc_data.topics" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--policies", "h20"], "did you mean 'h2o'?"),
        (["--policies", ""], "at least one"),
        (["--budget", "0"], "budget=0"),
        (["--budget", "1.5"], "budget=1.5"),
        (["--policies", "streaming_llm", "--budget", "2"], "raise budget"),
        (["--device", "nonsense"], "device 'nonsense'"),
        (["--device", ""], "device ''"),
        (["--model", ""], "model ''"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_loaded(arguments, extra, message, capsys, monkeypatch):
    monkeypatch.setattr("kvevict.models.load_model", pytest.fail)
    assert main([*arguments, *extra]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvevict: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(("option", "value"), [("--text", "none.txt"), ("--model", "./none"), ("--output", __file__)])
def test_paths_that_cannot_be_used_are_one_line(arguments, option, value, capsys):
    arguments[arguments.index(option) + 1] = value
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvevict: ") and said.count("\n") == 1
    assert Path(value).name in said


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--model", "MODEL", "--text", "none.txt"],
        ["perplexity", "--model", "MODEL", "--text", "none.txt"],
        ["diagnose", "--model", "MODEL", "--text", "none.txt"],
        ["growth", "--model", "MODEL", "--text", "none.txt"],
        ["capture", "MODEL", "none.txt"],
        ["bench", "--model", "./none"],
    ],
    ids=" ".join,
)
def test_a_refused_command_leaves_no_folder(command, folder, tmp_path, capsys):
    given = [str(folder) if each == "MODEL" else each for each in command]
    assert main([*given, "--output", str(tmp_path / "new" / "out")]) == 2
    assert "none" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_output_beneath_a_file_is_one_line_before_anything_is_loaded(arguments, capsys, monkeypatch):
    monkeypatch.setattr("kvevict.models.load_model", pytest.fail)
    arguments[arguments.index("--output") + 1] = f"{__file__}/new/out"
    assert main(arguments) == 2
    assert "results cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra", [["--budget", "many"], ["--tokens", "0"], ["--tokens", "1"], ["--chunk", "-1"], ["--nonsense"]]
)
def test_malformed_arguments_are_refused_with_the_usage(arguments, extra, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *extra])
    assert stop.value.code == 2
    assert "usage: kvevict" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(arguments, capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvevict.compare.compare", interrupted)
    assert main(arguments) == 130
    assert capsys.readouterr().err.endswith("kvevict: interrupted\n")


def test_a_missing_package_is_named(arguments, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    assert main(arguments) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# -- commands that run a plan --------------------------------------------------------------------------------------


@pytest.fixture
def asked(folder: Path, words: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Each command with what it needs."""
    model = ["--model", str(folder), "--output", str(tmp_path / "out")]
    text = ["--text", str(words), "--tokens", "100", "--policies", "h2o,tova", "--budget", "16,0.5"]
    needle = ["--tasks", "fact", "--lengths", "200", "--depths", "0.5", "--policies", "tova", "--budget", "64"]
    return {
        "perplexity": ["perplexity", *model, *text],
        "fidelity": ["fidelity", *model, *text, "--prompts", "1", "--prompt", "40", "--new", "3"],
        "needle": ["needle", *model, *needle],
    }


@pytest.mark.parametrize("command", ["perplexity", "fidelity", "needle"])
def test_commands_print_a_table_and_write_rows(command, asked, tmp_path, capsys):
    assert main(asked[command]) == 0
    printed, progress = capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {row["measure"] for row in rows} == {command}
    budgets = [64] if command == "needle" else [16, 0.5]
    policies = ["tova"] if command == "needle" else ["h2o", "tova"]
    expected = [("full cache", None), *((policy, budget) for budget in budgets for policy in policies)]
    assert [(row["policy"], row["budget"]) for row in rows] == expected
    for policy in ("full cache", *policies):
        assert any(line.startswith(policy) for line in printed.splitlines())
    assert rows[0]["protocol"] in printed
    assert "100%" in progress
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"results.jsonl", "results.md", "timings.jsonl", "parts"}


@pytest.mark.parametrize("given", ["sinks=2,sinks=4", "sinks=2, sinks =4", "sinks", "sinks="])
def test_a_protection_is_said_once_with_its_number(given, asked, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*asked["perplexity"], "--protect", given])
    assert stop.value.code == 2
    assert f"invalid list of options, each once, value: {given!r}" in capsys.readouterr().err


def test_protocols_and_protection_reach_the_rows(asked, tmp_path):
    extra = [
        "--protocol",
        "windows",
        "--window",
        "64",
        "--stride",
        "16",
        "--chunk",
        "8",
        "--protect",
        "sinks=2,recent=4",
    ]
    assert main([*asked["perplexity"], *extra]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {row["protocol"] for row in rows} == {"strided windows (window=64, stride=16, chunk=8)"}
    assert all(row["protection"] == {"sinks": 2, "recent": 4} for row in rows[1:])
    assert all("sinks=2, recent=4" in row["options"] for row in rows[1:])


def test_whole_windows_read_with_the_full_cache_alone_where_no_policy_is_named(asked, tmp_path, capsys):
    whole = ["--protocol", "windows", "--window", "64", "--stride", "16"]
    assert main([*asked["perplexity"], *whole]) == 2
    assert '--policies ""' in capsys.readouterr().err
    assert main([*asked["perplexity"], *whole, "--policies", ""]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["full cache"]


def test_running_a_command_again_measures_nothing_again(asked, capsys, monkeypatch):
    assert main(asked["perplexity"]) == 0
    first = capsys.readouterr().out
    monkeypatch.setattr("kvevict.sweep.measure_piece", pytest.fail)
    assert main(asked["perplexity"]) == 0
    printed, said = capsys.readouterr()
    assert printed == first and "5 of 5 parts" in said


@pytest.mark.parametrize(
    ("command", "extra", "message"),
    [
        ("perplexity", ["--policies", "h20"], "did you mean 'h2o'?"),
        ("perplexity", ["--budget", "0"], "budgets[0]: budget=0"),
        ("perplexity", ["--protect", "sink=4"], "did you mean 'sinks'?"),
        ("perplexity", ["--protocol", "windows", "--window", "64"], "needs stride"),
        ("perplexity", ["--protocol", "blocks", "--window", "64"], "give chunk"),
        ("perplexity", ["--documents", "articles"], "no WikiText titles"),
        ("fidelity", ["--protocol", "streaming", "--chunk", "2"], "one token per forward"),
        ("needle", ["--tasks", "singel"], "did you mean 'single'?"),
        ("needle", ["--depths", "3"], "expected a depth from 0"),
        ("needle", ["--lengths", "32"], "length=32 cannot hold"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_results(command, extra, message, asked, tmp_path, capsys):
    assert main([*asked[command], *extra]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvevict: ")]
    assert len(said) == 1 and message in said[0]
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_an_interrupted_command_says_how_to_go_on(asked, tmp_path, capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvevict.sweep.measure_piece", interrupted)
    assert main(asked["perplexity"]) == 130
    assert f"{tmp_path / 'out'}: the same command goes on from there" in capsys.readouterr().err


def test_a_launcher_that_started_one_process_instead_of_several_is_told(asked, capsys, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` does this, without a word."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(asked["perplexity"]) == 0
    assert "it needs --multi_gpu" in capsys.readouterr().err


def test_a_sweep_s_options_replace_what_its_file_says(folder, words, tmp_path):
    config = tmp_path / "plan.yaml"
    config.write_text("models: [none]\ntexts: [{source: none, tokens: 50}]\npolicies: [tova]\nbudgets: [16]\n")
    arguments = ["sweep", str(config), "--model", str(folder), "--text", str(words), "--tokens", "60"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(row["model"], row["text"], row["predicted"]) for row in rows] == [(str(folder), "words.txt", 59)] * 2


@pytest.mark.parametrize("option", ["model", "device", "text"])
def test_an_empty_option_of_a_sweep_does_not_stand_for_what_its_file_says(option, folder, words, tmp_path, capsys):
    config = tmp_path / "plan.yaml"
    config.write_text(f"models: [{folder}]\ntexts: [{{source: {words}, tokens: 50}}]\npolicies: [tova]\n")
    assert main(["sweep", str(config), f"--{option}", "", "--output", str(tmp_path / "out")]) == 2
    assert f"{option} ''" in capsys.readouterr().err


def test_policies_are_listed_with_what_they_keep(capsys):
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(POLICIES)
    assert all(len(line.split()) > 2 for line in lines)


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvevict {kvevict.__version__}\n"


def test_importing_kvevict_imports_nothing_of_the_evaluation():
    script = "import sys, kvevict; print({'datasets', 'evaluate', 'matplotlib', 'gguf'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_python_m_kvevict_is_the_command():
    run = subprocess.run([sys.executable, "-m", "kvevict", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("kvevict ")
