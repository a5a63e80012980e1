"""kvpress's decode presses, measured in a Python environment of their own on the same model, tokens and budget."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvevict import host
from kvevict.bench.caches import random_ids
from kvevict.bench.rows import Measured
from kvevict.bench.timing import WARM_UP, Progress, check_counts
from kvevict.errors import EvaluationError, MissingPackageError, OptionError

PRESSES = ("knorm", "keydiff", "random", "snapkv", "streaming_llm", "tova")
SCRIPT = Path(__file__).with_name("kvpress_process.py")
_QUESTION = """
import importlib.metadata as m, json
names = ("kvpress", "transformers", "torch")
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print(json.dumps({name: found.get(name) for name in names}))
"""


@dataclass(frozen=True)
class Peer:
    """Rows of another environment, which versions it has, and what it could not run."""

    rows: list[Measured]
    versions: dict[str, str]
    failures: dict[str, str]

    def notes(self) -> list[str]:
        """What must be known beside the rows."""
        here = {"transformers": transformers.__version__, "torch": torch.__version__}
        there = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        ours = ", ".join(f"{name} {version}" for name, version in here.items())
        same = all(self.versions.get(name) == version for name, version in here.items())
        first = (
            f"kvpress ran in another process{'' if same else ' and another environment'}: {there}; here: {ours}. Its "
            "ratios are to the DynamicCache of its own process. Each press cuts to the budget after every token."
        )
        return [first, *(f"kvpress {name} cannot decode like this: {why}" for name, why in self.failures.items())]


def check_kvpress(python: str) -> None:
    """Raises OptionError if ``python`` is no interpreter, MissingPackageError if it has no kvpress."""
    if shutil.which(python) is None:
        raise OptionError(f"kvpress={python!r} is not a program: give the python of an environment that has kvpress")
    asked = subprocess.run([python, "-I", "-c", _QUESTION], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(asked.stdout)
    except ValueError as error:
        raise OptionError(
            f"kvpress={python!r} does not run Python: {_last_line(asked.stderr) or f'exit code {asked.returncode}'}"
        ) from error
    if found.get("kvpress") is None:
        raise MissingPackageError(f"{python} has no kvpress. Run: {python} -m pip install kvpress")


def measure_kvpress(
    python: str,
    model: PreTrainedModel,
    held: Sequence[int],
    seen: Sequence[int],
    budget: int,
    *,
    steps: int,
    presses: Sequence[str] = PRESSES,
    progress: Progress | None = None,
) -> Peer:
    """Decode steps as ``decode`` and ``against_full`` measure them, by another interpreter.

    python: path of an interpreter whose environment has kvpress. It loads the model from where ``model`` came from.
    Raises EvaluationError if it fails, with its last line.
    """
    check_counts(steps, *held, *seen, budget)
    check_kvpress(python)
    sections = [("kvpress decode", n, n) for n in held] + [("kvpress after", n, budget) for n in seen]
    longest = max([*held, *seen, steps + WARM_UP])
    request = {
        "model": str(model.name_or_path),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "ids": random_ids(model, 1, longest).tolist(),
        "steps": steps,
        "presses": list(presses),
        "sections": sections,
    }
    if not request["model"]:
        raise OptionError("a model that came from no folder or Hub id cannot be loaded by another interpreter")
    if host.implementation(model) != "sdpa":
        raise OptionError(
            f"kvpress is measured with sdpa attention, and this model runs {host.implementation(model)}: the ratios "
            "would not compare. Call model.set_attn_implementation('sdpa')"
        )
    answer = _ask(python, request, progress)
    rows = [Measured(**{**row, "seconds": tuple(row["seconds"])}) for row in answer["rows"]]
    return Peer(rows, answer["versions"], answer["failures"])


def _ask(python: str, request: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    """The answer of the process; its ticks become progress."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
        asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(request), "utf-8")
        command = [python, "-I", str(SCRIPT), str(asked), str(answered)]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"} if Path(request["model"]).is_dir() else None
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=offline) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("tick ") and progress is not None:
                        progress(float(line.split()[1]))
                process.wait()
            finally:
                process.kill()  # a stopped bench leaves nobody measuring
        if not answered.exists():
            complaints.seek(0)
            why = _last_line(complaints.read()) or f"exit code {process.returncode}"
            raise EvaluationError(f"{python} could not measure kvpress: {why}")
        found: dict[str, Any] = json.loads(answered.read_text("utf-8"))
        return found


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
