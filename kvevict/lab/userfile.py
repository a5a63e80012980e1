"""Policies from users' files: ``my_file.py:MyPolicy``."""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path

from kvevict.errors import KvevictError, OptionError
from kvevict.policies.base import Policy


def load_policy(given: str) -> tuple[str, Policy]:
    """The policy's name and instance from "FILE.py:NAME", a class that needs no options or a finished instance.

    The file is run as a module. Raises OptionError.
    """
    file, colon, name = given.rpartition(":")
    if not colon or not name.isidentifier():
        raise OptionError(f"policy {given!r}: expected a file and a name in it, such as my_file.py:MyPolicy")
    path = Path(file).expanduser()
    if not path.is_file():
        raise OptionError(f"policy {given!r}: there is no file {file!r}")
    module_name = f"kvevict_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"policy {given!r}: {file!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise OptionError(
            f"policy {given!r}: running {file!r} failed with {type(error).__name__}: {error}. What should happen only "
            'when it is run as a script belongs under: if __name__ == "__main__"'
        ) from error
    found = getattr(module, name, None)
    if isinstance(found, Policy):
        return name, found
    if isinstance(found, type) and issubclass(found, Policy):
        try:
            return name, found()
        except (TypeError, KvevictError) as error:
            raise OptionError(
                f"policy {given!r} cannot be made without options ({error}): give them defaults, or put an instance in "
                "the file and name that"
            ) from error
    own = [key for key, value in vars(module).items() if isinstance(value, Policy) or _is_policy_of(value, module_name)]
    near = get_close_matches(name, own, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    there = f"; there are: {', '.join(own)}" if own else "; it has none"
    raise OptionError(f"policy {given!r}: {name!r} is not a policy in {file!r}{hint}{there}")


def _is_policy_of(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module
