"""Pictures: what is drawn is what is stored."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import save_reader
from matplotlib.figure import Figure

from kvevict.cli import main
from kvevict.errors import OutputError
from kvevict.figures import figures_of
from kvevict.plan import make_plan
from kvevict.plots import COLOURS, DASHES, MARKERS, bars, by_budget, loss_by_position, needle_map, picture
from kvevict.policies import POLICIES
from kvevict.results import json_line, read_parts, read_rows
from kvevict.sweep import run_plan

TEXT = "The cat sat on a mat and saw a dog. It ran to its old house, and the dog ran after it! Why? Nobody knows. " * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished results of each measure."""
    root = tmp_path_factory.mktemp("results")
    model = save_reader(root / "model")
    (root / "text.txt").write_text(TEXT)
    given = {"models": [str(model)], "texts": [{"source": str(root / "text.txt"), "tokens": 150}], "threads": 1}
    caches = {"policies": ["tova", "random"], "budgets": [32, 64], "seeds": [0, 1]}
    plans = {
        "perplexity": {**given, **caches, "protections": [{}, {"sinks": 2}]},
        "fidelity": {**given, "policies": ["tova"], "budgets": [32],
                     "generation": {"prompts": 1, "prompt": 50, "new": 3}},
        "needle": {"models": [str(model)], "texts": "noise", "policies": ["tova"], "budgets": [64],
                   "needle": {"tasks": "fact", "lengths": [200, 300], "depths": [0, 0.5, 1], "samples": 2}},
    }  # fmt: skip  # a plan for each
    for measure, plan in plans.items():
        run_plan(make_plan({**plan, "measure": measure}), root / measure)
    return {measure: root / measure for measure in plans}


def axes_of(figure: Figure) -> Any:
    return figure.axes[0]


def lines_of(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    found = {line.get_label(): line for line in axes_of(figure).get_lines()}
    return {str(name): (list(line.get_xdata()), list(line.get_ydata())) for name, line in found.items()}


def labelled(figure: Figure) -> bool:
    """Whether both axes and the picture say what they show, with a unit in brackets."""
    axes = axes_of(figure)
    return all("(" in label for label in (axes.get_xlabel(), axes.get_ylabel())) and bool(axes.get_title(loc="left"))


@pytest.mark.parametrize("value", ["perplexity", "perplexity_after_budget"])
def test_lines_against_the_budget_are_the_rows(folders, value):
    rows = [row for row in read_rows(folders["perplexity"]) if row["protection"] == {}]
    figure = by_budget(rows, value)
    drawn = lines_of(figure)
    stored = {(row["policy"], row["budget"], row["seed"]): row.get(value) for row in rows}
    assert drawn["tova"] == ([32, 64], [stored["tova", 32, 0], stored["tova", 64, 0]])
    means = [sum(stored["random", budget, seed] for seed in (0, 1)) / 2 for budget in (32, 64)]
    assert drawn["random"] == ([32, 64], pytest.approx(means))
    if value == "perplexity":
        full = f"full cache: {stored['full cache', None, 0]:.2f}"
        assert drawn[full][1] == [stored["full cache", None, 0]] * 2
        assert next(line for line in axes_of(figure).get_lines() if line.get_label() == full).get_linestyle() == "--"
    assert labelled(figure) and "lower is better" in axes_of(figure).get_ylabel()


def test_lines_can_be_told_apart_without_colour():
    styles = {(MARKERS[n % len(MARKERS)], DASHES[n % len(DASHES)]) for n in range(len(POLICIES))}
    assert len(styles) == len(POLICIES) <= len(MARKERS)
    assert len(set(COLOURS)) == len(COLOURS)


def test_far_apart_values_are_on_a_logarithmic_axis_and_gaps_stay_gaps():
    row = {"model": "m", "text": "t", "protocol": "p", "protection": {}, "policy": "a"}
    rows = [row | {"budget": budget, "perplexity": value} for budget, value in ((8, 2.0), (16, None), (32, 90.0))]
    figure = by_budget(rows)
    assert axes_of(figure).get_yscale() == "log" and "log scale" in axes_of(figure).get_ylabel()
    assert math.isnan(lines_of(figure)["a"][1][1])
    assert axes_of(by_budget(rows[:1])).get_yscale() == "linear"


def test_a_single_budget_is_drawn_as_bars(folders):
    rows = read_rows(folders["fidelity"])
    figure = dict(figures_of(folders["fidelity"]))["1-kl-budget-32"]
    assert [bar.get_height() for bar in axes_of(figure).patches] == [rows[1]["kl"]]
    assert [tick.get_text() for tick in axes_of(figure).get_xticklabels()] == ["tova"]
    assert lines_of(figure) == {"full cache: 0.000": ([0, 1], [0, 0])}
    assert axes_of(figure).get_ylabel() == "KL from the full cache (nats per token, lower is better)"
    assert "budget 32" in figure.get_suptitle()


@pytest.mark.parametrize(("values", "scale"), [([1.0, 20.0], "log"), ([0.0, 20.0], "linear"), ([-0.5, 1.0], "linear")])
def test_bars_are_logarithmic_only_where_they_can_be(values, scale):
    axes = axes_of(bars(dict(zip("ab", values, strict=True)), 1.0, "title", "graded_recall"))
    assert axes.get_yscale() == scale
    assert axes.get_ylim()[0] <= min(values) and axes.get_ylim()[1] > max(values)


def test_loss_by_position_is_the_mean_of_the_stored_nats():
    curves = {"full cache": [[1.0, 1.0, 3.0, 3.0]], "tova": [[2.0, 4.0, 6.0, 8.0], [4.0]]}
    figure = loss_by_position(curves, 2, "title")
    drawn = lines_of(figure)
    assert drawn["tova"] == ([1, 2, 3, 4], [3.0, 4.0, 6.0, 8.0])
    assert drawn["full cache"] == ([1, 2, 3, 4], [1.0, 1.0, 3.0, 3.0])
    assert drawn["budget: 2"][0] == [2, 2]
    assert labelled(figure)


def test_long_texts_are_drawn_in_bins():
    nats = [float(n) for n in range(320)]
    x, y = lines_of(loss_by_position({"tova": [nats]}, 100, "title"))["tova"]
    assert len(x) == 32
    assert (x[0], y[0]) == (5.5, 4.5)  # positions 1 to 10, nats 0 to 9
    assert y == pytest.approx([value - 1 for value in x])


def test_loss_by_position_is_drawn_from_the_parts(folders):
    rows = read_rows(folders["perplexity"])
    figure = dict(figures_of(folders["perplexity"]))["1-loss-by-position-budget-32"]
    (part,) = read_parts(folders["perplexity"], rows[1])
    assert len(part["nats"]) == 149
    width = math.ceil(149 / 32)
    assert lines_of(figure)["tova"][1][0] == pytest.approx(sum(part["nats"][:width]) / width)
    assert set(lines_of(figure)) == {"full cache", "tova", "random", "random seed 1", "budget: 32"}


@pytest.mark.parametrize("value", ["match", "graded_recall"])
def test_needle_maps_show_each_depth_and_length(folders, value):
    row = read_rows(folders["needle"])[1]
    figure = needle_map(row, value)
    axes = axes_of(figure)
    grid = axes.get_images()[0].get_array().filled(math.nan)
    assert grid.shape == (3, 2)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["200", "300"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0%", "50%", "100%"]
    cases = [case for case in row["cases"] if case["depth"] == 0.5 and case["length"] == 300]
    assert len(cases) == 2
    if value == "match":
        assert grid[1, 1] == sum(case["match"] for case in cases) / 2
    else:
        full, without, got = (
            sum(case[name] for case in cases) for name in ("full_logprob", "without_logprob", "logprob")
        )
        expected = (got - without) / (full - without) if full > without else math.nan
        assert grid[1, 1] == pytest.approx(expected, nan_ok=True)
    assert len(axes.texts) == 6
    assert labelled(figure) and "budget 64" in axes.get_title(loc="left")


def test_numbers_on_a_map_stand_out_from_their_cells():
    case = {"length": 8, "match": 1.0}
    row = {"policy": "a", "budget": 4, "model": "m", "text": "t", "protocol": "p", "protection": {},
           "cases": [case | {"depth": 0.0}, case | {"depth": 1.0, "match": 0.0}]}  # fmt: skip  # one row
    light, dark = axes_of(needle_map(row)).texts
    assert (light.get_text(), light.get_color()) == ("1.00", "black")
    assert (dark.get_text(), dark.get_color()) == ("0.00", "white")


def test_a_folder_gives_every_picture_once_per_protection(folders):
    assert [name for name, _ in figures_of(folders["perplexity"])] == [
        f"{number}-{name}"
        for number in (1, 2)
        for name in ("perplexity-by-budget", "perplexity-after-budget-by-budget", "loss-by-position-budget-32",
                     "loss-by-position-budget-64")
    ]  # fmt: skip  # one list
    for number, protection in (("1", {}), ("2", {"sinks": 2})):
        rows = [row for row in read_rows(folders["perplexity"]) if row["protection"] == protection]
        stored = [row["perplexity"] for row in rows if row["policy"] == "tova"]
        drawn = dict(figures_of(folders["perplexity"]))[f"{number}-perplexity-by-budget"]
        assert lines_of(drawn)["tova"][1] == stored and len(stored) == 2
    assert [name for name, _ in figures_of(folders["fidelity"])][:2] == ["1-kl-budget-32", "1-top1-agreement-budget-32"]
    assert "1-tova-64-match-map" in [name for name, _ in figures_of(folders["needle"])]


def test_the_command_writes_png_and_svg(folders, tmp_path, capsys):
    assert main(["plot", str(folders["fidelity"]), "--format", "png,svg", "--output", str(tmp_path)]) == 0
    written = capsys.readouterr().out.split()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(Path(path).name for path in written)
    assert (tmp_path / "1-kl-budget-32.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "1-kl-budget-32.svg").read_text()


def test_pictures_leave_the_user_s_matplotlib_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    picture(loss_by_position({"a": [[1.0]]}, 0.5, "t"), "svg")
    assert dict(matplotlib.rcParams) == before


def test_folders_without_results_are_one_line(tmp_path, capsys):
    with pytest.raises(OutputError, match="give the folder"):
        list(figures_of(tmp_path))
    (tmp_path / "results.jsonl").write_text("{")
    assert main(["plot", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err
    (tmp_path / "results.jsonl").write_text(json.dumps({"measure": "perplexity"}))
    assert main(["plot", str(tmp_path), "--format", "gif"]) == 2
    assert "there are png and svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("parts/zzz.json", "[]", "zzz.json' is damaged, or not a part of results"),
        ("parts/zzz.json", '{"key": {', "zzz.json' is damaged, or not a part of results"),
        ("results.jsonl", "5\n", "expected a JSON object on every line"),
        ("results.jsonl", "", "expected a JSON object on every line, and at least one"),
        ("results.jsonl", "{}\n", "a row with the measure None"),
        ("results.jsonl", '{"measure": "perplexity"}\n', "is damaged: it has no 'budget'"),
    ],
)
def test_damaged_results_are_one_line(folders, tmp_path, capsys, name, content, said):
    folder = shutil.copytree(folders["perplexity"], tmp_path / "copy")
    (folder / name).write_text(content)
    assert main(["plot", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("change", [{"budget": "many"}, {"perplexity": "high"}, {"protocol": None}, {"options": None}])
def test_rows_that_cannot_be_drawn_are_one_line(folders, tmp_path, capsys, change):
    folder = tmp_path / "copy"
    shutil.copytree(folders["perplexity"], folder)
    rows = "".join(json_line({**row, **change}) for row in read_rows(folder))
    (folder / "results.jsonl").write_text(rows)
    assert main(["plot", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "are damaged and cannot be drawn" in line and "run the command that wrote them again" in line


def test_results_of_the_full_cache_alone_have_nothing_to_draw_and_it_is_said(folders, tmp_path, capsys):
    rows = [row for row in read_rows(folders["perplexity"]) if row["budget"] is None]
    (tmp_path / "results.jsonl").write_text("".join(map(json_line, rows)))
    assert main(["plot", str(tmp_path)]) == 2
    assert "has nothing to draw" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_results_of_texts_with_unusual_names_are_read_again(tmp_path):
    row = {"text": "a\u2028b\x85c\x1cd"}  # what str.splitlines() takes for ends of lines
    (tmp_path / "results.jsonl").write_text(json_line(row) * 2, "utf-8")
    assert read_rows(tmp_path) == [row] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["plot", ".", "--format", ""], "--format '': give png or svg"),
        (["diagnose", "--policies", ""], "no policy to diagnose: name at least one"),
        (["simulate", "mixed", "--policies", ""], "no policy to simulate: name at least one"),
        (["compare", "--policies", ""], "no policy to compare: name at least one"),
        (["bench", "--quick", "--policies", "", "--model", "none"], "no policy to measure: name at least one"),
    ],
)
def test_an_empty_list_is_a_mistake_where_it_leaves_nothing(options, said, capsys):
    assert main(options) == 2
    assert said in capsys.readouterr().err
