"""What results of all kinds share: the versions that made them, and files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import kvevict
from kvevict.errors import OutputError
from kvevict.files import write_file

RESULTS = "results.jsonl"
PARTS = "parts"
"""The folder of finished parts: one file for each cell and piece, written whole or not at all."""


def versions() -> dict[str, Any]:
    """What a number depends on beside the inputs."""
    return {
        "kvevict": kvevict.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def environment() -> dict[str, Any]:
    """Versions, machine and time, as they go into results."""
    found = versions()
    threads = found.pop("threads")
    return {
        **found,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": threads,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def check_folder(folder: Path) -> None:
    """Makes ``folder`` if it is not there; raises OutputError if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"results cannot be written to {str(folder)!r}: {error.strerror}") from error


def save_files(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Writes files by name, each whole or not at all; returns their paths. Raises OutputError."""
    check_folder(folder)
    for name, content in contents.items():
        write_file(folder / name, content)
    return [folder / name for name in contents]


def finite(value: Any) -> Any:
    """The same with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_line(value: Any) -> str:
    """One line of JSON; a number that is not finite is null."""
    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False) + "\n"


def read_rows(folder: Path, name: str = RESULTS) -> list[dict[str, Any]]:
    """The rows of a file of results. Raises OutputError if there is none that can be read."""
    try:
        rows = [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]
    except OSError as error:
        raise OutputError(
            f"no {name} in {str(folder)!r} ({error.strerror}): give the folder that a finished kvevict perplexity, "
            "fidelity, needle, sweep, diagnose, growth or bench wrote"
        ) from error
    except ValueError as error:
        raise OutputError(f"{name} in {str(folder)!r} is damaged: {error}") from error
    return rows


def read_parts(folder: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a row's parts, by piece: "nats" holds a number for each predicted token."""
    found = []
    for path in sorted((folder / PARTS).glob("*.json")):
        part = json.loads(path.read_text("utf-8"))
        if all(row.get(name) == value for name, value in part["key"].items()):
            found.append(part)
    return [part["result"] for part in sorted(found, key=lambda part: (len(part["piece"]), part["piece"]))]


def markdown_table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    rule = "|---" + "|---:" * (len(head) - 1) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def aligned_table(head: list[str], lines: list[list[str]]) -> str:
    """The same as aligned text."""
    cells = [head, *lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)
