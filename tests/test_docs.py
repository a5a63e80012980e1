"""What the documents say is what the code does."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib.util
import inspect
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers import save_reader
from transformers import LlamaForCausalLM

import kvevict
from kvevict import cli, host
from kvevict.policies import POLICIES
from kvevict.policies.base import ALL_QUERIES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(kvevict.__file__).parent
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def module_names() -> list[str]:
    found = (module.name for module in pkgutil.walk_packages([str(PACKAGE)], "kvevict."))
    return ["kvevict", *(name for name in found if name != "kvevict.__main__")]  # importing that runs it


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of two layers whose tokens are bytes."""
    return save_reader(tmp_path_factory.mktemp("tiny"))


def runnable(source: str) -> str:
    """The source itself; on old releases with the argument name that the README gives for them."""
    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return source if "cache" in names else re.sub(r"\bcache=cache\b", "past_key_values=cache", source)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_run_in_order_as_printed(document, tiny, tmp_path, monkeypatch, capsys):
    text = (ROOT / document).read_text("utf-8")
    sources = blocks(text, "python")
    if not sources:
        assert "```python" not in text
    for name in set(re.findall(r'^name = "(.+)"$', "\n".join(sources), re.MULTILINE)):
        shutil.copytree(tiny, tmp_path / name)  # a folder of the model's name is loaded in its place
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "document"}
    monkeypatch.setitem(sys.modules, "document", type(sys)("document"))  # dataclasses look their module up
    for source in sources:
        exec(compile(runnable(source), document, "exec"), namespace)


def test_first_block_evicts(tiny, tmp_path, monkeypatch, capsys):
    first = blocks(README, "python")[0]
    shutil.copytree(tiny, tmp_path / re.search(r'^name = "(.+)"$', first, re.MULTILINE)[1])
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(runnable(first), namespace)
    cache = namespace["cache"]
    assert cache.get_seq_length() > cache.budget == 128
    assert cache.stored == [128, 128]
    assert "policy='h2o', budget=128, seen=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "arguments", "last"),
    [
        ("quickstart.py", ["--budget", "24", "--new", "4"], "EvictingCache(policy="),
        ("your_own_policy.py", ["--new", "40"], "EvictingCache(policy="),
        ("perplexity.py", ["--text", str(ROOT / "README.md"), "--tokens", "80", "--budget", "16"], "after the budget"),
    ],
)
def test_examples_run(example, arguments, last, tiny, monkeypatch, capsys):
    if host.cache_argument(LlamaForCausalLM) != "cache":
        pytest.skip("examples are written for transformers 5.23 and later")
    path = ROOT / "examples" / example
    monkeypatch.setattr(sys, "argv", [str(path), "--model", str(tiny), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    assert last in capsys.readouterr().out.splitlines()[-1]


def test_every_example_is_run():
    run = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert all(f'"{path.name}"' in run for path in (ROOT / "examples").glob("*.py"))


def test_own_policy_example_is_short():
    assert len((ROOT / "examples" / "your_own_policy.py").read_text("utf-8").splitlines()) <= 40


def policy_rows() -> dict[str, list[str]]:
    """The README's table of policies: the cells of each row, by name."""
    table = README.partition("| policy |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row for row in rows}


def test_readme_rows_registry_and_files_are_the_same_names():
    files = {path.stem for path in (PACKAGE / "policies").glob("*.py")} - {"__init__", "base"}
    assert list(policy_rows()) == list(POLICIES)
    assert files == set(POLICIES)
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert policy.__module__ == f"kvevict.policies.{name}"


@pytest.mark.parametrize("name", POLICIES)
def test_readme_says_which_attention_a_policy_reads(name):
    wanted = POLICIES[name]().queries
    said = {0: "none", 1: "last query", ALL_QUERIES: "every query"}.get(wanted, f"last {wanted} queries")
    assert policy_rows()[name][3] == said


@pytest.mark.parametrize("name", POLICIES)
def test_readme_sources_are_those_of_the_docstring(name):
    documented = re.sub(r"\s+", " ", inspect.getdoc(POLICIES[name]))
    for year, link in re.findall(r"\[[^]]*?(\d{4})\]\((.+?)\)", policy_rows()[name][2]):
        assert link in documented
        assert year in documented


@pytest.mark.parametrize("name", POLICIES)
def test_policy_docstring_names_source_formula_and_differences(name):
    lines = inspect.getdoc(POLICIES[name]).splitlines()
    assert lines[0].startswith("Keeps ")
    assert any(line.startswith("    ") and "=" in line for line in lines)
    assert any(line.startswith("Source: ") for line in lines)
    assert any(re.match(r"Differs from the (paper|source|note): \S", line) for line in lines)
    options = {option.name for option in dataclasses.fields(POLICIES[name])} & {
        *inspect.get_annotations(POLICIES[name])
    }
    missing = [option for option in options if not re.search(rf"\b{option}\b", "\n".join(lines))]
    assert missing == []


def test_readme_has_one_command_that_compares_and_one_that_tests_and_ci_runs_both():
    commands = "".join(blocks(README, "bash")).splitlines()
    assert len(commands) == 2
    assert commands[0].endswith("kvevict compare")
    assert "pytest" in commands[1]
    steps = [line.strip() for line in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()]
    assert [step for step in steps if step in commands] == commands
    assert commands[1] in (ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()


def test_readme_tells_what_compare_does_by_default():
    options = cli._parser().parse_args(["compare"])
    assert f"reads {options.tokens:,} tokens of WikiText-2 at a budget of {options.budget}," in README


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_are_shown_are_understood(document):
    shown = "".join(blocks((ROOT / document).read_text("utf-8"), "(?:sh|bash)")).replace("\\\n", " ")
    for line in shown.splitlines():
        command = shlex.split(line.rpartition("&&")[2], comments=True)
        if command[:1] == ["kvevict"]:
            assert cli._parser().parse_args(command[1:]).run
        elif command[:1] == ["python"] and command[1] != "-m":
            assert (ROOT / command[1]).is_file()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text("utf-8"))
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("name", module_names())
def test_examples_in_docstrings_are_right(name):
    if host.cache_argument(LlamaForCausalLM) != "cache":
        pytest.skip("examples are written for transformers 5.23 and later")
    if name == "kvevict.harness" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("the package lm-eval is not installed")
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_modules_import_downwards_only():
    table = (ROOT / "docs" / "design.md").read_text("utf-8").partition("| level | modules |")[2].partition("\n\n")[0]
    levels = [re.findall(r"`(\w+)`", row) for row in table.splitlines()[2:]]
    level = {module: depth for depth, modules in enumerate(levels) for module in modules}
    files = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(level) == {*files, *packages}
    for module, path in files.items():
        for target in imported(path):
            if target in level:
                assert level[target] >= level[module], f"{module} imports {target}"


def imported(path: Path) -> set[str]:
    """What a file imports when it is loaded: modules of kvevict by their own names, others by the top one."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in found]
        names |= {part[1] if part[0] == "kvevict" and len(part) > 1 else part[0] for part in parts}
    return names
