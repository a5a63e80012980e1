"""Pictures of what caches hold: what is drawn is what kvevict diagnose and kvevict growth stored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import pytest
import torch
from helpers import save_reader
from matplotlib.colors import rgb_to_hsv, to_rgb
from matplotlib.figure import Figure

from kvevict.cli import main
from kvevict.errors import OutputError
from kvevict.figures import figures_of
from kvevict.kept import held_after, read_kept, read_tokens, survival
from kvevict.maps import CELLS, CHARACTERS, TOKENS, held_grid, raster, retained_by_head, survival_by_age, token_map
from kvevict.plots import growth_curves, headroom, picture
from kvevict.results import read_rows

TEXT = "The cat sat on a mat.\nIt ran to $5 & its house,\tand {the} dog ran after it! Why? Nobody knows \\alpha. " * 2
N = 90


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("results")
    model = save_reader(root / "model")
    (root / "text.txt").write_text(TEXT)
    given = ["--model", str(model), "--text", str(root / "text.txt"), "--policies", "tova,h2o", "--budget", "24,32"]
    assert main(["diagnose", *given, "--tokens", str(N), "--steps", "40,90", "--output", str(root / "diagnose")]) == 0
    assert main(["growth", *given, "--prompt", "20", "--new", "40", "--output", str(root / "growth")]) == 0
    return {name: root / name for name in ("diagnose", "growth")}


@pytest.fixture(scope="module")
def figures(folders) -> dict[str, Figure]:
    return {name: figure for folder in folders.values() for name, figure in figures_of(folder)}


@pytest.fixture(scope="module")
def kept(folders) -> dict[str, torch.Tensor]:
    return {name: left for (name, budget), left in read_kept(folders["diagnose"]).items() if budget == 24}


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def panels_of(figure: Figure) -> list[Any]:
    return [axes for axes in figure.axes if axes.get_title()]


def test_a_folder_gives_every_picture(figures):
    maps = [
        f"1-tokens-held-{name}-{budget}-after-{seen}"
        for budget in (24, 32)
        for name in ("tova", "h2o", "oracle", "random")
        for seen in (40, 90)
    ]
    measures = ["retained", "recall", "missed-per-eviction"]
    pictures = ["policies-and-oracle", "retained-by-layer-and-head", "recall-by-layer-and-head", "survival-by-age"]
    assert set(figures) == {
        *maps,
        *(f"1-{measure}-by-budget" for measure in measures),
        *(f"1-{name}-budget-{budget}" for name in [*pictures, "kept-positions"] for budget in (24, 32)),
        "1-memory-and-speed",
    }


def test_every_axis_says_what_it_shows_and_in_what_unit(figures):
    for name, figure in figures.items():
        figure.canvas.draw()  # ticks are made when they are needed
        panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
        said = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
        assert all("(" in label and ")" in label for label in said), (name, said)
        assert any(axes.get_ylabel() for axes in panels), name
        if "tokens-held" not in name:  # a text has no measure across
            assert any(axes.get_xlabel() for axes in panels), name
        assert figure.get_suptitle() or panels[0].get_title(loc="left"), name


def test_nothing_that_is_written_is_cut_off(figures):
    for name, figure in figures.items():
        figure.canvas.draw()
        width, height = figure.get_size_inches() * figure.dpi
        box = figure.get_tightbbox().padded(-0.02)
        assert box.x0 >= 0 and box.y0 >= 0, name
        assert box.x1 * figure.dpi <= width and box.y1 * figure.dpi <= height, name


@pytest.mark.parametrize("value", ["retained", "recall"])
def test_heads_are_drawn_by_layer_and_head(folders, figures, value):
    panels = panels_of(figures[f"1-{value}-by-layer-and-head-budget-24"])
    assert [axes.get_title() for axes in panels] == ["tova", "h2o", "random", "oracle"]
    heads = [row for row in read_rows(folders["diagnose"], "heads.jsonl") if row["budget"] == 24]
    for axes in panels:
        grid = axes.get_images()[0].get_array()
        assert grid.shape == (2, 4)
        for row in heads:
            if row["policy"] == axes.get_title():
                assert grid[row["layer"], row["head"]] == row[value]
        assert len(axes.get_lines()) == 1  # between the query heads of two KV heads
    assert len({axes.get_images()[0].get_clim() for axes in panels}) == 1


def test_layers_keep_their_numbers():
    rows = [
        {"policy": "a", "layer": layer, "head": head, "kv_head": 0, "retained": 0.5}
        for layer in (5, 11, 17)
        for head in (0, 1)
    ]
    (axes,) = panels_of(retained_by_head(rows, "title"))
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["5", "11", "17"]


def test_survival_is_the_stored_one(kept, figures):
    axes = figures["1-survival-by-age-budget-24"].axes[0]
    drawn = lines_of(axes)
    assert set(drawn) == {"tova", "h2o", "oracle", "random", "budget: 24"}
    last = N - N // 16
    for name, left in kept.items():
        ages, shares = drawn[name]
        assert ages == list(range(1, last + 1)) and shares == survival(left)[1 : last + 1].tolist()
    assert drawn["budget: 24"][0] == [24, 24]
    assert axes.get_xscale() == "log" and "log scale" in axes.get_xlabel()


def test_a_raster_shows_what_was_held_after_each_step(kept, figures):
    panels = panels_of(figures["1-kept-positions-budget-24"])
    assert [axes.get_title() for axes in panels] == list(kept)
    for axes in panels:
        grid = axes.get_images()[0].get_array()
        assert grid.shape == (N, N)
        for seen in (1, 24, 50, N):
            shares = held_after(kept[axes.get_title()], seen).double().mean((0, 1))
            assert grid[:seen, seen - 1].filled(math.nan).tolist() == pytest.approx(shares[:seen].tolist())
            assert grid.mask[seen:, seen - 1].all()
        assert axes.get_images()[0].get_extent() == [0, N, 0, N]


def test_a_raster_of_one_head_is_black_and_white(kept):
    (axes,) = panels_of(raster({"tova": kept["tova"]}, "title", layer=1, head=0))
    grid = axes.get_images()[0].get_array()
    assert set(grid.compressed()) == {0.0, 1.0}
    assert grid[:, -1].filled(0).tolist() == (kept["tova"][1, 0] == 0).double().tolist()


def test_long_rasters_are_means_of_groups_of_positions():
    left = torch.zeros(1, 1, 2 * CELLS, dtype=torch.int32)
    left[..., 0] = 3
    grid = held_grid(left)
    assert grid.shape == (CELLS, CELLS)
    assert (grid[0, 0], grid[0, 1], grid[1, 1]) == (1.0, 0.5, 1.0)  # after 2 tokens both are held, then the second


@pytest.mark.parametrize("seen", [40, 90])
def test_a_token_map_shades_each_token_by_its_heads(folders, figures, seen):
    figure = figures[f"1-tokens-held-h2o-24-after-{seen}"]
    axes = figure.axes[0]
    (row,) = (
        each
        for each in read_rows(folders["diagnose"], "held.jsonl")
        if (each["policy"], each["budget"], each["seen"]) == ("h2o", 24, seen)
    )
    tokens = read_tokens(folders["diagnose"])
    letters = [text.get_text() for text in axes.texts]
    signs = str.maketrans({"\n": "↵", "\t": "→"})
    assert letters == [token.translate(signs) for token in tokens[:seen]]
    (patches,) = axes.collections
    assert list(patches.get_array()) == [count / row["kv_heads"] for count in row["heads"]]
    assert patches.get_clim() == (0, 1)
    starts = [tick.get_text() for tick in axes.get_yticklabels()]
    assert starts == ["0", "22"]
    assert f"h2o, budget 24, after {seen} tokens" in figure.get_suptitle()


def test_letters_stand_out_from_their_shade():
    figure = token_map(["dark", " light"], [10, 0], 10, "title")
    figure.canvas.draw()
    (patches,) = figure.axes[0].collections
    for text, colour in zip(figure.axes[0].texts, patches.get_facecolor(), strict=True):
        brightness = [rgb_to_hsv(to_rgb(each))[2] for each in (text.get_color(), colour[:3])]
        assert abs(brightness[0] - brightness[1]) > 0.5


@pytest.mark.parametrize("colours", ["cividis", "Greys", "Blues"])
def test_shades_grow_lighter_or_darker_all_the_way(colours):
    shades = matplotlib.colormaps[colours]([step / 20 for step in range(21)])[:, :3]
    brightness = shades @ [0.2126, 0.7152, 0.0722]
    steps = brightness[1:] - brightness[:-1]
    assert (steps > 0).all() or (steps < 0).all()


def test_lines_break_at_ends_of_line_and_where_a_token_does_not_fit():
    tokens = ["a" * 50, "b" * 50, "\n", "c", "d" * (2 * CHARACTERS + 3), "日", "\x00"]
    axes = token_map(tokens, [1] * len(tokens), 1, "title").axes[0]
    assert [text.get_text() for text in axes.texts] == [
        "a" * 50, "b" * 50, "↵", "c", "d" * CHARACTERS, "d" * CHARACTERS, "ddd", "□", "□",
    ]  # fmt: skip  # one list
    assert [int(text.get_position()[1]) for text in axes.texts] == [0, 1, 1, 2, 3, 4, 5, 5, 5]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0", "1", "3", "4", "4", "4"]


def test_of_long_texts_the_middle_is_left_out_and_the_gap_is_seen():
    count = TOKENS + 50
    axes = token_map(["ab"] * count, [1] * count, 1, "title").axes[0]
    starts = [tick.get_text() for tick in axes.get_yticklabels()]
    gap = starts.index("")
    assert starts[gap + 1] == str(count - TOKENS // 2)
    assert len(axes.texts) == TOKENS
    assert gap not in {int(text.get_position()[1]) for text in axes.texts}


def test_policies_are_drawn_beside_the_oracle_with_their_head_room(folders, figures):
    axes = figures["1-policies-and-oracle-budget-32"].axes[0]
    rows = {row["policy"]: row for row in read_rows(folders["diagnose"]) if row["budget"] in (None, 32)}
    drawn = lines_of(axes)
    for name in ("oracle", "random", "ceiling", "full cache"):
        value = rows[name]["retained"]
        assert drawn[f"{name}: {value:.3f}"][0] == [value, value]
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == sorted(["tova", "h2o"], key=lambda name: rows[name]["retained"])
    points = [line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() == "o"]
    assert points == [rows[name]["retained"] for name in names]
    assert [text.get_text() for text in axes.texts] == [
        f"{rows[name]['retained']:.3f}, head-room {rows[name]['policy_headroom']:.3f}" for name in names
    ]
    assert f"{rows['oracle']['budget_headroom']:.3f}" in axes.get_title(loc="left")


def test_measures_against_the_budget_have_the_bounds_beside_the_policies(folders, figures):
    rows = {(row["policy"], row["budget"]): row for row in read_rows(folders["diagnose"])}
    for value, others in (("retained", {"ceiling"}), ("missed_per_eviction", set())):
        drawn = lines_of(figures[f"1-{value.replace('_', '-')}-by-budget"].axes[0])
        full = {name for name in drawn if name.startswith("full cache")}
        assert set(drawn) - full == {"tova", "h2o", "oracle", "random"} | others
        assert len(full) == (value == "retained")
        assert drawn["oracle"] == ([24, 32], [rows["oracle", budget][value] for budget in (24, 32)])


def test_memory_and_speed_are_the_recorded_series(folders, figures):
    rows = read_rows(folders["growth"])
    memory, speed, ratio = figures["1-memory-and-speed"].axes
    names = ["full cache", "tova at 24", "h2o at 24", "tova at 32", "h2o at 32"]
    assert list(lines_of(memory)) == names
    for name, row in zip(names, rows, strict=True):
        steps, held = lines_of(memory)[name]
        assert steps == list(range(41)) and held == [each / 2**20 for each in row["held_bytes"]]
        middles, times = lines_of(speed)[name]
        assert middles[:2] == [1.5, 3.5]  # of two steps each
        assert times[0] == pytest.approx(1e3 * median(row["seconds"][1:3]))
    full = rows[0]["seconds"]
    pairs = [one / other for one, other in zip(rows[1]["seconds"], full, strict=True)]
    assert list(ratio.get_lines()[1].get_ydata())[-1] == pytest.approx(median(pairs[-2:]))
    assert set(ratio.get_lines()[0].get_ydata()) == {1.0}
    assert [line.get_linestyle() for line in memory.get_lines()].count("--") >= 1


def test_pictures_become_files(figures, tmp_path):
    for name in ("1-kept-positions-budget-24", "1-tokens-held-tova-24-after-90", "1-memory-and-speed"):
        assert picture(figures[name]).startswith(b"\x89PNG")
        assert b"<svg" in picture(figures[name], "svg")


def test_the_command_draws_them(folders, tmp_path, capsys):
    assert main(["plot", str(folders["growth"]), "--output", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["1-memory-and-speed.png"]


def test_missing_files_are_named(folders, tmp_path):
    (tmp_path / "results.jsonl").write_bytes((folders["diagnose"] / "results.jsonl").read_bytes())
    with pytest.raises(OutputError, match=r"no heads\.jsonl"):
        list(figures_of(tmp_path))
    (tmp_path / "heads.jsonl").write_bytes((folders["diagnose"] / "heads.jsonl").read_bytes())
    with pytest.raises(OutputError, match=r"kept\.npz.*run kvevict diagnose again"):
        list(figures_of(tmp_path))


def test_results_without_the_text_give_the_other_pictures(folders, tmp_path):
    for name in ("results.jsonl", "heads.jsonl", "kept.npz", "held.jsonl"):
        (tmp_path / name).write_bytes((folders["diagnose"] / name).read_bytes())
    (tmp_path / "tokens.json").write_text(json.dumps([]))
    assert not [name for name, _ in figures_of(tmp_path) if "tokens-held" in name]


def test_one_policy_is_enough(folders, kept):
    rows = [row for row in read_rows(folders["diagnose"]) if row["budget"] in (None, 24) and row["policy"] != "h2o"]
    assert len(headroom(rows).axes[0].texts) == 1
    assert len(survival_by_age({"tova": kept["tova"]}, 24, "title").axes[0].get_lines()) == 2
    assert len(growth_curves(read_rows(folders["growth"])[:1]).axes) == 3
