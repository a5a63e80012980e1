"""The commands of ``kvevict``, one file each: ``add`` declares its options, and imports nothing heavy.

A new command is one file and one name in ``COMMANDS``.
"""

from __future__ import annotations

COMMANDS = (
    "policies", "compare", "perplexity", "fidelity", "needle", "sweep", "diagnose", "growth", "plot",
    "simulate", "capture", "bench",
)  # fmt: skip  # names, many to a line
"""Modules of this package, in the order of ``kvevict --help``."""
