"""Who may import whom, and that importing kvevict costs and changes nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvevict
from kvevict.policies import POLICIES

PACKAGE = Path(kvevict.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
POLICY_FILES = [path for path in FILES if path.parts[0] == "policies"]

ORDER = [  # from the bottom up: a module imports from lower lines only
    {"errors"},
    {"files", "inference"},
    {"policies", "selection", "masks"},
    {"host", "statistics", "rope", "storage", "eviction"},
    {"spec", "drafts", "steady"},
    {"books", "checks"},
    {"layer"},
    {"quantized", "offloaded", "compiled"},
    {"observe"},
    {"cache"},
    {"models", "testing", "protocols", "bootstrap", "results", "kept"},
    {"text", "evaluation", "needles"},
    {"bench", "compare", "fidelity", "plan"},
    {"retrieval", "metrics", "harness", "growth"},
    {"plots"},
    {"maps", "timings"},
    {"pieces", "tables", "figures"},
    {"sweep"},
    {"lab"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
HOST = {"host", "books", "cache", "observe", "testing", "rope", "storage"}
MEASURING = {
    "bench", "bootstrap", "commands", "compare", "evaluation", "fidelity", "figures", "growth", "harness", "kept",
    "lab", "maps", "metrics", "models", "needles", "pieces", "plan", "plots", "protocols", "results", "retrieval",
    "sweep", "tables", "text", "timings",
}  # fmt: skip  # names, many to a line
EXTRAS = {"optimum", "datasets", "evaluate", "lm_eval", "accelerate", "matplotlib", "gguf", "tqdm"}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse((PACKAGE / path).read_text())
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) or _only_for_types(scope)
        for node in ast.walk(scope)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            whole = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "kvevict" else []
            found += [(name, id(node) not in inside) for name in whole or [str(node.module)]]
    return found


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _own(name: str) -> str | None:
    """The module of kvevict that an import names, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "kvevict" and len(parts) > 1 else None


def _level(module: str) -> int:
    return next(level for level, modules in enumerate(ORDER) if module in modules)


def test_every_module_has_its_place():
    modules = {path.parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert modules == set().union(*ORDER)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    module = path.parts[0].removesuffix(".py")
    if module == "__init__":
        pytest.skip("the package's own namespace names what users import")
    for name, at_import in _imports(path):
        own = _own(name)
        if own and own != module and at_import:
            assert _level(own) < _level(module), f"{module} imports {own}"


@pytest.mark.parametrize("path", [*POLICY_FILES, Path("selection.py")], ids=str)
def test_policies_and_selection_know_torch_and_nothing_of_the_host(path):
    for name, _ in _imports(path):
        top, own = name.split(".")[0], _own(name)
        if own:
            assert own in ("errors", "policies"), f"{path} imports {name}"
        else:
            assert top == "torch" or top in sys.stdlib_module_names, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_few_modules_know_transformers_and_fewer_the_extras(path):
    module = path.parts[0].removesuffix(".py")
    for name, _ in _imports(path):
        top = name.split(".")[0]
        assert top != "transformers" or module in HOST | MEASURING, f"{path} imports {name}"
        assert top not in EXTRAS or module in MEASURING, f"{path} imports {name}"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_one_file_of_its_name(name):
    policy = POLICIES[name]
    assert policy.__module__ == f"kvevict.policies.{name}"
    assert policy.name == name
    assert "Source:" in policy.__doc__
    assert "Differs from the" in policy.__doc__


def test_importing_kvevict_brings_no_extras_and_changes_nothing_in_transformers():
    script = f"""
import sys, torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama
before = set(sys.modules)
watched = [AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping, vars(transformers.Cache),
           vars(DynamicCache), vars(DynamicLayer), vars(modeling_llama.LlamaAttention), vars(modeling_llama),
           vars(torch.nn.functional), vars(torch.nn.Module), vars(transformers.PreTrainedModel),
           vars(transformers.PreTrainedConfig)]
copies = [dict(table) for table in watched]
import kvevict
assert [dict(table) for table in watched] == copies, "patched on import"
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not new & {EXTRAS!r}, sorted(new & {EXTRAS!r})
measuring = {{f"kvevict.{{name}}" for name in {MEASURING!r}}}
assert not measuring & set(sys.modules), sorted(measuring & set(sys.modules))
assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
"""
    done = subprocess.run([sys.executable, "-W", "error::UserWarning:kvevict", "-c", script], cwd=PACKAGE.parent,
                          capture_output=True, text=True, timeout=120)  # fmt: skip  # one call
    assert done.returncode == 0, done.stderr


def test_policies_can_be_used_without_transformers():
    script = """
import sys, types
sys.modules["transformers"] = None
package = types.ModuleType("kvevict")
package.__path__ = [sys.argv[1]]
sys.modules["kvevict"] = package
import torch
from kvevict.policies import POLICIES, make_policy
from kvevict import selection
order = selection.eviction_order(torch.tensor([[[3., 1., 2.]]]), torch.tensor([[[0, 1, 2]]]), None)
assert order.tolist() == [[[1, 2, 0]]], order
assert len([make_policy(name) for name in POLICIES]) == len(POLICIES)
"""
    done = subprocess.run([sys.executable, "-c", script, str(PACKAGE)], cwd=PACKAGE.parent, capture_output=True,
                          text=True, timeout=120)  # fmt: skip  # one call
    assert done.returncode == 0, done.stderr
