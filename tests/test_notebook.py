"""The notebook runs from its first cell to its last, at a small size, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers import save_reader
from nbclient import NotebookClient
from transformers import LlamaForCausalLM

from kvevict import host

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "tour.ipynb"
WORDS = "The keeper wrote the weather down, and what ships went by. Why? Nobody knows; it was 1860.\n"


def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def shown(cell: Any, kind: str) -> list[Any]:
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


def test_the_notebook_is_valid_and_kept_without_outputs():
    found = notebook()
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert len(code) >= 8
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_notebook_runs_and_shows_every_picture(tmp_path, monkeypatch):
    if host.cache_argument(LlamaForCausalLM) != "cache":
        pytest.skip("examples are written for transformers 5.23 and later")
    (tmp_path / "words.txt").write_text(WORDS * 6)
    given = {"TOUR_MODEL": save_reader(tmp_path / "model"), "TOUR_TEXT": tmp_path / "words.txt", "TOUR_TOKENS": 400}
    own = {name: tmp_path / name for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR")}  # nothing in the home
    for name, value in {**given, **own}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "TMPDIR").mkdir()
    found = notebook()
    NotebookClient(found, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    images = [len(shown(cell, "image/png")) for cell in code]
    # perplexity in all and after the budget, by position at both budgets; a needle map at both; diagnostics; growth
    assert images == [0, 0, 0, 4, 2, 0, 2, 4, 1]
    tables = "".join(
        table for cell in found.cells if cell.cell_type == "code" for table in shown(cell, "text/markdown")
    )
    assert all(f"| {name} | 50 |" in tables for name in ("sliding_window", "streaming_llm", "h2o", "tova"))
    assert "# Attention diagnostics" in tables and "| oracle | 100 |" in tables
    printed = "".join(output["text"] for output in code[2].outputs if output.get("name") == "stdout")
    assert "EvictingCache(policy='h2o', budget=50" in printed and "KV head 0 holds [" in printed
