"""The page: what it says is what the simulation says, with a mouse, with keys, in the dark and on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from test_simulate import random_trace

from kvevict import OptionError
from kvevict.cli import main
from kvevict.lab import report as report_module
from kvevict.lab.report import report, strongest_attention, totals
from kvevict.lab.simulation import Simulation, simulate
from kvevict.lab.traces import Trace, decode_trace
from kvevict.policies import H2O, TOVA, Scissorhands, StreamingLLM

needs_browser = pytest.mark.skipif(
    browser.PROGRAM is None, reason=f"none of {', '.join(browser.NAMES)} is installed (Debian: chromium-headless-shell)"
)

BUDGETS = [48, 96]
ODD = '</script><b onclick="x">&'
POLICIES = {"tova": TOVA(), "h2o": H2O(), "scissorhands": Scissorhands(recent=4), ODD: StreamingLLM()}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return decode_trace(400, [3])


@pytest.fixture(scope="module")
def simulation(trace) -> Simulation:
    return simulate(trace, POLICIES, BUDGETS, log=(0, 0))


@pytest.fixture(scope="module")
def page(trace, simulation, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report(simulation, trace), "utf-8")
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[browser.Browser]:
    found = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def lanes(chromium: browser.Browser) -> dict[str, dict[str, str]]:
    """What each lane says now."""
    return chromium.run(
        "Object.fromEntries([...document.querySelectorAll('article')].map(a => [a.dataset.policy,"
        " Object.fromEntries([...a.querySelectorAll('b')].map(b => [b.className, b.textContent]))]))"
    )


def where(chromium: browser.Browser) -> int:
    """The query shown."""
    return int(re.match(r"query (\d+)", chromium.run("document.querySelector('#where').textContent"))[1])


def cells(chromium: browser.Browser, rows: str) -> list[list[str]]:
    """The text of a table."""
    return chromium.run(f"[...document.querySelectorAll('{rows}')].map(r => [...r.cells].map(c => c.textContent))")


def click(chromium: browser.Browser, selector: str) -> None:
    chromium.run(f"document.querySelector('{selector}').click()")


def choose_budget(chromium: browser.Browser, budget: int) -> None:
    chromium.run(f"(b => {{ b.value = {budget}; b.onchange({{target: b}}) }})(document.querySelector('#budget'))")


# -- without a browser ------------------------------------------------------------------------------------------------


def test_the_page_is_small_and_needs_no_network(page):
    text = page.read_text("utf-8")
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|[\"']//|url\(|@import|<link(?! rel=\"icon\" href=\"data:,\")", text)
    assert "default-src 'none'" in text


def test_names_cannot_break_out_of_the_page(page):
    text = page.read_text("utf-8")
    assert ODD not in text
    assert text.count("</script>") == 2


def test_the_logs_add_up_to_the_table(simulation, trace):
    for (name, budget), log in simulation.logs.items():
        row = simulation.row(name, budget)
        assert totals(log, trace) == (pytest.approx(row.retained), pytest.approx(row.recall))
        assert len(log.evicted) == trace.steps


def test_one_kv_head_of_many_is_shown_with_its_own_numbers():
    trace = random_trace()
    result = simulate(trace, {"h2o": H2O()}, [9], log=(2, 1))
    retained, _ = totals(result.logs["h2o", 9], trace)
    heads = result.row("h2o", 9).by_head[2][trace.group :]
    assert retained == pytest.approx(sum(heads) / len(heads))
    text = report(result, trace, (2, 1))
    assert "layer 2, KV head 1 with 2 query heads" in text
    assert f"<td>{retained:.4f}</td>" in text


def test_the_strongest_attention_is_that_of_the_trace(trace):
    positions, roots = strongest_attention(trace, (0, 0), 40)
    row = next(iter(trace.blocks())).weights[0, 0, 0, 199]
    best = row.sort(descending=True).values[:40]
    assert row[positions[199]].tolist() == best.tolist()
    assert roots[199].tolist() == [round(255 * weight**0.5) for weight in best.tolist()]
    assert roots[0].tolist() == [255] + [0] * 39  # the first query has one token to look at


def test_what_a_page_cannot_show_is_refused(simulation, trace, monkeypatch):
    with pytest.raises(OptionError, match="makes one that a page can show"):
        report(simulate(trace, ["tova"], [48]), trace)
    whole = len(report(simulation, trace))
    monkeypatch.setattr(report_module, "LIMIT", whole - 1)
    assert len(report(simulation, trace)) < whole  # fewer positions per query are drawn
    monkeypatch.setattr(report_module, "LIMIT", 10_000)
    with pytest.raises(OptionError, match="choose fewer policies or budgets"):
        report(simulation, trace)
    monkeypatch.setattr(report_module, "POSITIONS", 300)
    with pytest.raises(OptionError, match="400 tokens, and a page can show 300"):
        report(simulation, trace)


def test_the_command_writes_the_page(tmp_path, capsys):
    options = ["decode-200", "--budgets", "64", "--policies", "tova", "--output", str(tmp_path / "out")]
    assert main(["simulate", *options, "--html", str(tmp_path / "pages" / "page.html")]) == 0
    assert "page.html" in capsys.readouterr().out
    assert "<title>Policies on decode-200</title>" in (tmp_path / "pages" / "page.html").read_text("utf-8")
    for idle in (["--layer", "1"], ["--head", "0"], ["--chunk", "8"]):
        assert main(["simulate", *options, *idle]) == 2
        assert f"{idle[0]} changes nothing without" in capsys.readouterr().err
    assert main(["simulate", *options, "--html", str(tmp_path / "p.html"), "--head", "1"]) == 2
    assert "KV heads 0 to 0" in capsys.readouterr().err


# -- in Chromium ------------------------------------------------------------------------------------------------------


@needs_browser
def test_it_loads_without_errors_and_asks_for_nothing(chromium, page):
    chromium.open(page)
    assert where(chromium) == 1
    assert list(lanes(chromium)) == [*POLICIES, "oracle", "random"]
    assert chromium.problems == []


@needs_browser
@pytest.mark.parametrize("budget", BUDGETS)
def test_at_the_last_step_the_numbers_are_the_tables(chromium, page, simulation, budget):
    chromium.open(page)
    choose_budget(chromium, budget)
    chromium.press("End")
    assert where(chromium) == 399
    rows = cells(chromium, "#results tr")
    table = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    for name, said in lanes(chromium).items():
        row = simulation.row(name, budget)
        assert said["retained"] == table[name][f"retained@{budget}"] == f"{row.retained:.4f}"
        assert said["recall"] == table[name][f"recall@{budget}"] == f"{row.recall:.4f}"
    assert chromium.problems == []


@needs_browser
def test_every_step_shows_what_was_held_evicted_and_retained_so_far(chromium, page, simulation):
    chromium.open(page)
    for query in (1, 2, 47, 48, 49, 72, 150):
        chromium.run(f"(s => {{ s.value = {query - 1}; s.oninput({{target: s}}) }})(document.querySelector('#slider'))")
        assert where(chromium) == query
        for name, said in lanes(chromium).items():
            log = simulation.logs[name, 48]
            held = query - sum(map(len, log.evicted[: query - 1]))
            gone = log.evicted[query - 1]
            assert said["held"] == str(held), (name, query)
            assert said["evicted"] == (f"position {gone[0]}" if len(gone) == 1 else str(len(gone))), (name, query)
            assert said["retained"] == f"{sum(log.mass[:query]) / query:.4f}", (name, query)
    assert chromium.problems == []


@needs_browser
def test_keys_step_jump_and_play(chromium, page):
    chromium.open(page)
    chromium.press("ArrowRight")
    chromium.press("ArrowRight")
    assert where(chromium) == 3
    chromium.press("ArrowLeft")
    assert where(chromium) == 2
    chromium.press("ArrowRight", shift=True)
    assert where(chromium) == 102
    chromium.press("Home")
    assert where(chromium) == 1
    chromium.press("+")
    assert chromium.run("document.querySelector('#speed').value") == "256"
    chromium.press(" ")
    assert chromium.run("document.querySelector('#play').textContent") == "Pause"
    for _ in range(200):  # 399 steps at 256 a second, however busy the machine
        chromium.run("new Promise(r => setTimeout(r, 50))")
        if chromium.run("document.querySelector('#play').textContent") == "Play":
            break
    assert where(chromium) == 399
    assert chromium.problems == []


@needs_browser
def test_buttons_are_reached_with_tab_and_pause_holds(chromium, page):
    chromium.open(page)
    labels = []
    for _ in range(8):
        chromium.press("Tab")
        labels.append(chromium.run("document.activeElement.id"))
    assert labels == ["start", "back", "play", "step", "end", "slider", "speed", "budget"]
    chromium.run("document.querySelector('#step').focus()")
    chromium.press("Enter")
    assert where(chromium) == 2
    click(chromium, "#play")
    chromium.run("new Promise(r => setTimeout(r, 300))")
    click(chromium, "#play")
    stopped = where(chromium)
    chromium.run("new Promise(r => setTimeout(r, 300))")
    assert where(chromium) == stopped > 2


@needs_browser
def test_pointing_at_a_lane_tells_a_positions_history(chromium, page, simulation):
    chromium.open(page)
    chromium.press("ArrowRight", shift=True)
    box = chromium.run("(b => [b.left, b.top, b.width])(document.querySelector('article[data-policy=h2o] canvas')"
                       ".getBoundingClientRect())")  # fmt: skip  # one expression
    log = simulation.logs["h2o", 48]
    left = {position: step + 1 for step, gone in enumerate(log.evicted) for position in gone}
    position = next(position for position in sorted(left) if position > 20 and left[position] <= 100)
    chromium.point(box[0] + (position + 0.5) / 400 * box[2], box[1] + 20)
    tip = chromium.run("document.querySelector('#tip').textContent")
    assert tip.startswith(
        f"h2o, position {position}: joined after query {position}, left after query {left[position]}; "
    )
    assert "evicted" in tip
    row = chromium.run(
        "[...document.querySelectorAll('#history tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert ["h2o", f"after query {position}", f"after query {left[position]}", "evicted"] in row
    assert chromium.problems == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_a_phone_and_follows_light_and_dark(chromium, page, scheme, width):
    chromium.open(page, width=width, height=800, scheme=scheme)
    chromium.press("End")
    assert chromium.run("document.documentElement.scrollWidth") <= width
    shade = chromium.run("getComputedStyle(document.body).backgroundColor")
    red = int(re.match(r"rgb\((\d+)", shade)[1])
    assert (red < 80) == (scheme == "dark")
    drawn = chromium.run(
        "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v))"
        "(document.querySelector('canvas'))"
    )
    assert drawn
    assert chromium.problems == []
