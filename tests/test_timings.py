"""Charts of the bench show what it measured."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvevict import bench
from kvevict.bench import DYNAMIC, Bounded, Cost, Fit, Measured, Memory, Report, Waits
from kvevict.cli import main
from kvevict.errors import OutputError
from kvevict.figures import figures_of
from kvevict.timings import SECTIONS, charts_of

MIB = 2**20


def report() -> Report:
    """Several sizes, a single size, a section without DynamicCache, and a row of every other kind."""
    return Report(
        {"model": "small"},
        [],
        [
            Measured("decode", DYNAMIC, 256, 256, (0.2, 0.2, 0.4), 2 * MIB),
            Measured("decode", "h2o", 256, 256, (0.1, 0.1, 0.1), 2 * MIB),
            Measured("decode", "tova", 256, 256, (0.3, 0.3, 0.3), 3 * MIB),
            Measured("decode", DYNAMIC, 1024, 1024, (0.4, 0.4, 0.4), 8 * MIB),
            Measured("decode", "h2o", 1024, 1024, (0.1, 0.1, 0.1), 8 * MIB),
            Measured("after", DYNAMIC, 4096, 4096, (0.4, 0.4, 0.4), 32 * MIB),
            Measured("after", "tova", 4096, 512, (0.1, 0.1, 0.1), 4 * MIB),
            Measured("alone", "h2o", 8, 8, (0.1, 0.1, 0.1), MIB),
        ],
        [Memory(DYNAMIC, 8, 4 * MIB, 2 * MIB, 1), Memory("h2o", 8, 3 * MIB, MIB, 1)],
        [Cost("h2o", 8, (1e-6, 3e-6), 1e-4)],
        [Bounded("h2o", 25, 10, 10, (1.0, 2.0, 4.0), MIB, MIB, MIB)],
        [Fit(DYNAMIC, 8, 4, 4, 100), Fit("h2o", 8, 64, 64, 100)],
        [Waits("h2o", 8, {"cudaStreamSynchronize": 2, "cudaMemcpyAsync": 1})],
    )


@pytest.fixture(scope="module")
def charts() -> dict[str, Figure]:
    return dict(charts_of(report()))


def lines_of(figure: Figure, panel: int) -> dict[str, tuple[list[float], list[float], str]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()), line.get_linestyle())
        for line in figure.axes[panel].get_lines()
    }


def bars_of(figure: Figure, panel: int) -> dict[str, float]:
    axes = figure.axes[panel]
    names = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    return dict(zip(names, [bar.get_height() for bar in axes.patches], strict=True))


def test_every_section_has_a_picture_whose_axes_say_what_and_in_which_unit(charts):
    assert list(charts) == ["decode", "after", "alone", "memory", "policy-cost", "bounded-prefill", "largest-batch",
                            "host-waits"]  # fmt: skip  # one list
    for name, figure in charts.items():
        assert all("(" in axes.get_ylabel() for axes in figure.axes), name
        varies = figure.axes[-1].get_xlabel() + figure.axes[0].get_title(loc="left")
        assert "small" in varies and ("(tokens" in varies or "tokens" in varies.lower() or name == "alone"), name


def test_times_ratios_and_bytes_are_the_medians_against_the_size(charts):
    figure = charts["decode"]
    assert [axes.get_ylabel() for axes in figure.axes] == [
        "Time of a step\n(ratio to DynamicCache)", "Time of a step (ms)", "Memory held (MiB)",
    ]  # fmt: skip  # one list
    ratios, times, held = (lines_of(figure, panel) for panel in range(3))
    assert ratios[DYNAMIC] == ([256, 1024], [1, 1], "--")
    assert ratios["h2o"][:2] == ([256, 1024], [0.5, 0.25])
    assert times[DYNAMIC][1] == [200, 400] and times["h2o"][1] == [100, 100]
    assert held[DYNAMIC][1] == [2, 8] and held["h2o"][1] == [2, 8]
    assert ratios["tova"][1][0] == pytest.approx(1.5) and math.isnan(ratios["tova"][1][1])
    assert [axes.get_ylim()[0] for axes in figure.axes[1:]] == [0, 0]
    assert [tick.get_text() for tick in figure.axes[-1].get_xticklabels()] == ["256", "1,024"]


def test_a_single_size_is_drawn_as_bars_with_the_full_cache_dashed(charts):
    figure = charts["after"]
    assert [bars_of(figure, panel) for panel in range(3)] == [{"tova": 0.25}, {"tova": 100}, {"tova": 4}]
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["0.25", "100", "4"]
    assert [lines_of(figure, panel) for panel in range(3)] == [
        {f"{DYNAMIC}: {value}": ([0, 1], [value, value], "--")} for value in (1, 400, 32)
    ]
    assert "tokens seen (by every cache): 4,096" in figure.axes[0].get_title(loc="left")


def test_without_the_full_cache_there_is_no_ratio(charts):
    assert [axes.get_ylabel() for axes in charts["alone"].axes] == ["Time of a step (ms)", "Memory held (MiB)"]


def test_the_other_rows_are_drawn_in_their_units(charts):
    assert [bars_of(charts["memory"], panel) for panel in (0, 1)] == [{"h2o": 3}, {"h2o": 1}]
    assert bars_of(charts["policy-cost"], 0) == {"h2o": pytest.approx(2)}
    assert lines_of(charts["bounded-prefill"], 0)["h2o"][:2] == ([10, 20, 25], [1000, 2000, 4000])
    assert bars_of(charts["largest-batch"], 0) == {"h2o": 64}
    assert list(lines_of(charts["largest-batch"], 0)) == [f"{DYNAMIC}: 4"]
    assert bars_of(charts["host-waits"], 0) == {"h2o": 3}


def test_lines_can_be_told_apart_without_colour(charts):
    styles = [(line.get_marker(), str(line.get_linestyle())) for line in charts["decode"].axes[0].get_lines()]
    assert len(set(styles)) == 3


def test_every_section_of_the_bench_says_what_varies():
    timed = {"decode", "compiled", "after", "prefill", "seen", "budget", "batch", "layers"}
    assert timed | {"kvpress decode", "kvpress after"} == set(SECTIONS)


def test_the_command_takes_the_file_or_its_folder(tmp_path, capsys):
    (tmp_path / bench.FILE).write_text(report().json())
    assert main(["plot", str(tmp_path / bench.FILE)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert written[0] == tmp_path / "figures" / "bench-decode.png" and len(written) == 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert main(["plot", str(tmp_path), "--format", "svg"]) == 0
    assert len(capsys.readouterr().out.split()) == 8


def test_a_folder_with_other_results_gives_both(tmp_path):
    (tmp_path / bench.FILE).write_text(report().json())
    row = {"measure": "perplexity", "model": "m", "text": "t", "protocol": "p", "protection": {}, "options": ""}
    rows = [row | {"policy": "full cache", "budget": None, "perplexity": 2.0}]
    values = {"perplexity": 3.0, "perplexity_after_budget": 3.5}
    rows += [row | values | {"policy": "h2o", "budget": budget} for budget in (8, 16)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [name for name, _ in figures_of(tmp_path)]
    assert "bench-decode" in names and "1-perplexity-by-budget" in names


@pytest.mark.parametrize("content", ["[]", '{"settings": {}}', '{"measure": "perplexity"}\n{}', "no JSON"])
def test_other_files_are_refused_with_what_to_give(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(OutputError, match=r"is not what kvevict bench .*: give its bench\.json, or the folder"):
        list(figures_of(tmp_path / "other.json"))


def test_many_pieces_of_a_text_share_an_axis_with_room_for_its_marks():
    pieces = Bounded("h2o", 40_960, 1024, 1024, (1.0,) * 40, MIB, MIB, MIB)
    ((_, figure),) = charts_of(Report({"model": "small"}, [], [], [], [], [pieces], [], []))
    axes = figure.axes[0]
    figure.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert "40,000" in [tick.get_text() for tick in axes.get_xticklabels()]
