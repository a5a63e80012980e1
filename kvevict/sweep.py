"""Runs a plan: every cell on every piece, shared out over processes, resumed where it was stopped."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvevict.cache import EvictingCache
from kvevict.errors import OptionError, OutputError
from kvevict.models import load_model, revision
from kvevict.pieces import Piece, load_source, make_pieces, measure_piece
from kvevict.plan import Cell, Plan, Source
from kvevict.results import PARTS, check_folder, environment, save_files, versions
from kvevict.tables import Finished, Report
from kvevict.text import Text

PATIENCE = timedelta(days=7)
"""How long a process waits for the others at the end; the default of half an hour would lose a long sweep's table."""


@dataclass(frozen=True)
class Part:
    """One cell on one piece: what is measured, shared out and resumed.

    key: everything that the result depends on; the file is named for it.
    """

    cell: Cell
    piece: Piece
    key: dict[str, Any]

    @property
    def size(self) -> int:
        """Tokens to read, roughly: how far a progress bar moves."""
        if self.piece.tokens is None or self.cell.protocol is None:
            return self.piece.size
        return self.cell.protocol.work(len(self.piece.tokens.ids))

    @property
    def file(self) -> str:
        """The name of its file."""
        text = json.dumps([self.key, self.piece.name], sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class Processes:
    """The processes that share the work: which one this is, how many there are, and what all of them say."""

    index: int = 0
    count: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in their order; all must call it."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return list(gather_object([value]))


@dataclass(frozen=True)
class Progress:
    """How far a sweep is: ``tokens`` more of about ``total``, in the cell ``name``."""

    name: str
    tokens: int
    total: int


def run_plan(
    plan: Plan,
    folder: Path,
    *,
    notify: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report | None:
    """Measures what ``folder`` does not hold yet, and writes its tables.

    Written are ``parts/``, one file for each cell and piece with the nats of each position, as soon as it is measured;
    at the end ``results.jsonl``, one row for each cell, ``results.md``, and ``timings.jsonl``. Under
    ``accelerate launch`` each process measures its share, and the first writes the tables; it alone gets the report,
    the others None. Parts in ``folder`` that another plan or version made are left alone and out of the tables.

    Raises OptionError, OutputError, and what loading models and texts raises.
    """
    say = notify or (lambda line: None)
    processes, device = _processes(plan)
    threads = torch.get_num_threads()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        cells, left_out = plan.cells()
        check_folder(folder / PARTS)
        texts = [(source, load_source(plan, source)) for source in plan.texts]
        for _, text in texts:
            if text.notice:
                say(text.notice)
        parts: list[Part] = []
        for number, name in enumerate(plan.models):
            loaded = load_model(name, device=device, dtype=plan.dtype, notify=say)
            usable = _usable(plan, loaded.model, cells, left_out)
            own = _parts(plan, name, loaded.model, loaded.tokenizer, texts, usable)
            done = set().union(*processes.gather([part.file for part in own if (folder / PARTS / part.file).exists()]))
            pending = [part for part in own if part.file not in done]
            if done:
                say(f"{len(done)} of {len(own)} parts of {name} are finished already")
            share = pending[processes.index :: processes.count]
            total = sum(part.size for part in share) * (len(plan.models) - number)
            _measure(plan, loaded.model, loaded.tokenizer, share, folder, processes.index, progress, total)
            parts += own
            del loaded
        finished = _collect(parts, folder, processes)
        if processes.index:
            return None
        report = Report(plan, finished, left_out, {text.name: text.notice for _, text in texts if text.notice})
        save_files(folder, report.files())
        return report
    finally:
        torch.set_num_threads(threads)


def _processes(plan: Plan) -> tuple[Processes, str | None]:
    """The processes that accelerate started, or this one alone; and the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(), plan.device
    from accelerate import PartialState

    cpu = (plan.device or "").startswith("cpu") or not torch.cuda.is_available()
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if plan.device == "auto":
        raise OptionError("device 'auto' spreads one model over all devices: run it in one process, without a launcher")
    return Processes(state.process_index, state.num_processes), plan.device or str(state.device)


@contextmanager
def leaving_processes() -> Iterator[None]:
    """Leaves the group of processes that was joined meanwhile.

    Its threads would outlive the interpreter, which now and then aborts a process that had finished its work.
    """
    distributed = torch.distributed
    before = distributed.is_available() and distributed.is_initialized()
    try:
        yield
    finally:
        if distributed.is_available() and distributed.is_initialized() and not before:
            distributed.destroy_process_group()


def _usable(plan: Plan, model: PreTrainedModel, cells: list[Cell], left_out: dict[str, str]) -> list[Cell]:
    """The cells that this model can do; every cache is built once, so that an error comes before hours of work."""
    usable = []
    for cell in cells:
        try:
            if cell.policy is not None and cell.budget is not None:
                with EvictingCache(model, cell.policy, cell.budget):
                    pass
            usable.append(cell)
        except OptionError as error:
            if plan.policies is not None:
                raise OptionError(f"{cell.name}: {error}") from error
            left_out[f"{cell.name} at {cell.budget}"] = str(error)
    return usable


def _parts(
    plan: Plan,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[tuple[Source, Text]],
    cells: list[Cell],
) -> list[Part]:
    made = {"model": name, "revision": revision(name, model), "dtype": str(model.dtype).removeprefix("torch.")}
    made["device"] = model.device.type
    parts = []
    for source, text in texts:
        read: dict[str, Any] = {"text": text.name, "text_sha256": text.sha256, "documents_by": source.documents}
        read |= {"tokens_most": source.tokens, "documents_most": source.limit}
        pieces = {seed: make_pieces(plan, source, text, tokenizer, seed) for seed in {cell.seed for cell in cells}}
        for cell in cells:
            key = {"measure": plan.measure, **made, **read, **_cell_key(plan, cell), **_versions(model)}
            parts += [Part(cell, piece, key) for piece in pieces[cell.seed]]
    return parts


def _cell_key(plan: Plan, cell: Cell) -> dict[str, Any]:
    if plan.measure == "needle":
        fed = "whole" if plan.needle.chunk is None else f"chunk={plan.needle.chunk}"
        protocol = f"needle (question {plan.needle.question} the context's compression, prompt {fed})"
        if plan.needle.question == "with":
            protocol = f"needle (question with the context, prompt {fed})"
    else:
        protocol = str(cell.protocol)
    if plan.measure == "fidelity":
        protocol += (
            f"; greedy: up to {plan.generation.prompts} prompts of {plan.generation.prompt}, {plan.generation.new} new"
        )
    return {
        "protocol": protocol,
        "policy": cell.name,
        "options": "transformers.DynamicCache" if cell.policy is None else repr(cell.policy),
        "budget": cell.budget,
        "protection": dict(cell.protection),
        "seed": cell.seed,
    }


def _versions(model: PreTrainedModel) -> dict[str, Any]:
    found = versions()
    if model.device.type != "cpu":
        del found["threads"]  # nothing on an accelerator depends on them
    return found


def _measure(
    plan: Plan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parts: list[Part],
    folder: Path,
    process: int,
    progress: Callable[[Progress], None] | None,
    total: int,
) -> None:
    for part in parts:

        def moved(tokens: int, name: str = f"{part.cell.name} {part.cell.budget or ''}".strip()) -> None:
            if progress is not None:
                progress(Progress(name, tokens, total))

        begin = time.perf_counter()
        result = measure_piece(plan, model, tokenizer, part.cell, part.piece, moved)
        # what differs from run to run stands apart, so that the tables of two runs are equal
        timing = {"seconds": result.pop("seconds", time.perf_counter() - begin), "process": process, **environment()}
        record = {"key": part.key, "piece": part.piece.name, "result": result, "timing": timing}
        save_files(folder / PARTS, {part.file: json.dumps(record).encode()})


def _collect(parts: list[Part], folder: Path, processes: Processes) -> list[Finished]:
    """What all processes finished, in the plan's order, at the first process; other machines send theirs."""
    own = {part.file for part in parts if (folder / PARTS / part.file).exists()}
    first = processes.gather(own)[0]
    sent = processes.gather({file: _read(folder / PARTS / file) for file in own - first})
    if processes.index:
        return []
    elsewhere = {file: record for records in sent for file, record in records.items()}
    return [Finished(part.cell, **(elsewhere.get(part.file) or _read(folder / PARTS / part.file))) for part in parts]


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise OutputError(f"{path} is damaged ({error}): delete it and run the command again") from error
    return record
