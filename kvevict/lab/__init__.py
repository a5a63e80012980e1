"""The policy lab: policies stepped over attention that does not depend on them, with bounds on what any could do.

traces      attention to replay: made from a formula, or read from a captured model
harness     steps policies over a trace; the policy objects and the selection are those of the cache
bounds      the clairvoyant policy
simulation  many policies, budgets and seeds on one trace, and the table of them
capture     records a real model's attention as a trace
diagnostics what policies keep of it, head by head
"""

from kvevict.lab.bounds import Clairvoyant
from kvevict.lab.captured import captured_trace
from kvevict.lab.catalogue import CATALOGUE
from kvevict.lab.diagnostics import Diagnosis, diagnose
from kvevict.lab.simulation import Simulation, simulate
from kvevict.lab.traces import Block, Trace, decode_trace, named_trace

__all__ = [
    "CATALOGUE", "Block", "Clairvoyant", "Diagnosis", "Simulation", "Trace", "captured_trace", "decode_trace",
    "diagnose", "named_trace", "simulate",
]  # fmt: skip  # names, many to a line
