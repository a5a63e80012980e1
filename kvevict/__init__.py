"""A Hugging Face transformers cache that stays small: ``EvictingCache`` keeps what the model attends to."""

from importlib.metadata import PackageNotFoundError, version

from kvevict.cache import EvictingCache
from kvevict.errors import (
    KvevictError,
    ObservationError,
    OptionError,
    PolicyError,
    UnsupportedModelError,
    UnsupportedOperationError,
    WrongModelError,
)
from kvevict.observe import detach
from kvevict.policies.base import ALL_QUERIES, Column, Held, Policy, Rows
from kvevict.quantized import Quantized

try:
    __version__ = version("kvevict")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "ALL_QUERIES",
    "Column",
    "EvictingCache",
    "Held",
    "KvevictError",
    "ObservationError",
    "OptionError",
    "Policy",
    "PolicyError",
    "Quantized",
    "Rows",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "WrongModelError",
    "__version__",
    "detach",
]
