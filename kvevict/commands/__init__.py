"""The commands of ``kvevict``, one file each: ``add`` declares its options, and imports nothing heavy.

A new command is one file and one name in ``COMMANDS``.
"""

from __future__ import annotations

COMMANDS = (
    "policies", "compare", "perplexity", "fidelity", "needle", "sweep", "plot", "simulate", "capture", "bench",
)  # fmt: skip  # one line of names
"""Modules of this package, in the order of ``kvevict --help``."""
