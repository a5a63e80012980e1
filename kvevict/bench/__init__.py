"""Speed and memory of evicting caches beside transformers' own, measured in one process, taking turns."""

from __future__ import annotations

from kvevict.bench.caches import BASELINES, EAGER, IN_PLACE, LIMIT, SLIDING, STATIC
from kvevict.bench.compiling import compiled_steps
from kvevict.bench.memory import bounded_prefill, largest, largest_batches, peak_memory, prompt_memory
from kvevict.bench.overhead import host_waits, policy_cost
from kvevict.bench.peers import check_kvpress, measure_kvpress
from kvevict.bench.plan import DEFAULT, QUICK, SECTIONS, Job, Settings, jobs
from kvevict.bench.rows import DYNAMIC, FILE, Bounded, Cost, Fit, Measured, Memory, Report, Waits, ratio, read
from kvevict.bench.scaling import by_batch, by_budget, by_layers, by_seen
from kvevict.bench.shapes import SHAPES, Shape, parse_shape, random_model
from kvevict.bench.timing import WARM_UP, against_full, decode, prefill

__all__ = [
    "BASELINES",
    "DEFAULT",
    "DYNAMIC",
    "EAGER",
    "FILE",
    "IN_PLACE",
    "LIMIT",
    "QUICK",
    "SECTIONS",
    "SHAPES",
    "SLIDING",
    "STATIC",
    "WARM_UP",
    "Bounded",
    "Cost",
    "Fit",
    "Job",
    "Measured",
    "Memory",
    "Report",
    "Settings",
    "Shape",
    "Waits",
    "against_full",
    "bounded_prefill",
    "by_batch",
    "by_budget",
    "by_layers",
    "by_seen",
    "check_kvpress",
    "compiled_steps",
    "decode",
    "host_waits",
    "jobs",
    "largest",
    "largest_batches",
    "measure_kvpress",
    "parse_shape",
    "peak_memory",
    "policy_cost",
    "prefill",
    "prompt_memory",
    "random_model",
    "ratio",
    "read",
]
