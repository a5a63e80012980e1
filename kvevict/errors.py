"""Every error kvevict raises on purpose. Each also inherits the builtin a caller would expect."""


class KvevictError(Exception):
    """Base of all errors raised by kvevict."""


class OptionError(KvevictError, ValueError):
    """A policy, budget or option has a value that cannot work."""


class UnsupportedModelError(KvevictError, TypeError):
    """The model has a kind of attention or cache that kvevict does not handle."""


class UnsupportedOperationError(KvevictError, NotImplementedError):
    """Something that transformers' caches can do and an evicting cache cannot."""


class WrongModelError(KvevictError, ValueError):
    """The cache was given to a model, or a batch, other than the one it holds tokens of."""


class PolicyError(KvevictError, ValueError):
    """A policy broke its contract: wrong shapes, NaN, or tokens it does not hold."""


class ObservationError(KvevictError, RuntimeError):
    """The attention that a policy needs never reached the cache."""


class MissingPackageError(KvevictError, ImportError):
    """A package of the extra ``eval`` is not installed."""


class StoredCacheError(KvevictError, ValueError):
    """The files are not a cache that this release can continue."""


class OutputError(KvevictError, OSError):
    """A file cannot be written."""


class EvaluationError(KvevictError, ArithmeticError):
    """The model gave no number."""


class ModelError(KvevictError, OSError):
    """A model cannot be loaded."""


class TextError(KvevictError, ValueError):
    """A text cannot be read, or has nothing in it."""


class TraceError(KvevictError, ValueError):
    """A trace of attention does not exist, cannot be read, or cannot be made."""
