"""Who may import whom: the table of the design, for every import statement, those inside functions included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layers.modules import FILES, PACKAGE, ROOT, imports_of, layer_of, module_of

MAX_LINES = 500
WRITTEN = ("pypto_serving", "tests", "benchmarks", "scripts", "csrc")
SOURCES = {".cpp", ".h", ".py"}

FLOOR = {
    "errors",
    "fair_queue",
    "guidance",
    "ipc",
    "limits",
    "logs",
    "parallel",
    "processes",
    "threads",
    "types",
    "util",
}
ALLOWED: dict[str, set[str]] = {
    "cli": {"api", "bench", "engine", "model", "offline", "pypto_serving", "setup", "store"},
    "api": {"engine", "pypto_serving", "setup"},
    "offline": {"api", "engine", "setup"},
    "bench": {"kv", "sched"},
    "setup": {"kernels"},
    "engine": {"kv", "sched"},
    "sched": {"kv"},
    "kv": set(),
    "worker": {"backend", "kernels", "store"},
    "backend": {"kernels", "model"},
    "model": {"kernels"},
    "kernels": set(),
    "store": set(),
    "pypto_serving": {"offline"},
    "__main__": {"cli"},
}
TORCH_FREE = {
    "api",
    "bench",
    "cli",
    "engine",
    "kernels",
    "kv",
    "offline",
    "pypto_serving",
    "sched",
    "setup",
    "store",
    "worker",
    *FLOOR,
}
TORCH_BACKENDS = {"cpu_torch", "cuda", "npu"}
TORCH_FREE_MODEL = {
    "checkpoint",
    "config",
    "contents",
    "contract",
    "convert",
    "families",
    "fields",
    "fingerprint",
    "folder",
    "formats",
    "gguf",
    "inventory",
    "native",
    "null_models",
    "openmp",
    "packed_weights",
    "packed_weights_file",
    "pypto",
    "raw_config",
    "recipe",
    "registry",
    "rope",
    "spec",
    "stored_names",
}
PROGRAMS = {"native"}
"""Modules of models that are torch-free, and compute."""
SPEC_READERS = {"api", "setup"}
"""Layers that may read of models what neither loads torch nor computes."""
DEFAULTS_READERS = {"setup"}
"""Layers that may read the defaults of backends, which import no backend."""


def is_torch_free_model(module: str) -> bool:
    parts = module.split(".")
    return layer_of(module) == "model" and not TORCH_FREE_MODEL.isdisjoint(parts[2:])


def is_spec(module: str) -> bool:
    return is_torch_free_model(module) and PROGRAMS.isdisjoint(module.split("."))


def is_torch_free(module: str) -> bool:
    """All but the backends on torch, their kernels, and the readable programs of the models."""
    layer = layer_of(module)
    if module.startswith("pypto_serving.kernels.cuda"):
        return False
    if layer == "backend":
        return TORCH_BACKENDS.isdisjoint(module.split(".")[2:])
    return layer in TORCH_FREE or is_torch_free_model(module)


def resolve_ours(name: str) -> str:
    """`pypto_serving.a.b.c` cut to the module in it; a name of the package's own stays with the package."""
    parts = name.split(".")
    while len(parts) > 1:
        path = PACKAGE.parent.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").is_file():
            break
        parts.pop()
    return ".".join(parts)


def violations(module: str, source: str) -> list[str]:
    """What `module` imports and must not."""
    layer, found = layer_of(module), []
    for name in imports_of(source):
        top = name.split(".")[0]
        if top == "torch" and is_torch_free(module):
            found.append(f"{module} imports torch")
        if top != "pypto_serving":
            continue
        target = resolve_ours(name)
        wanted = layer_of(target)
        spec_only = layer in SPEC_READERS and is_spec(name)
        defaults_only = layer in DEFAULTS_READERS and target == "pypto_serving.backend.defaults"
        allowed = {layer} | ALLOWED.get(layer, set()) | FLOOR
        if wanted not in allowed and not (spec_only or defaults_only):
            found.append(f"{module} imports {target}")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_follow_the_layers(path: Path) -> None:
    assert violations(module_of(path), path.read_text()) == []


def test_every_layer_is_in_the_table() -> None:
    assert {layer_of(module_of(path)) for path in FILES} <= set(ALLOWED) | FLOOR


def test_every_allowance_is_used() -> None:
    """Delete from the tables what no import needs any more."""
    targets: dict[str, set[str]] = {}
    for path in FILES:
        found = {resolve_ours(name) for name in imports_of(path.read_text()) if name.startswith("pypto_serving")}
        targets.setdefault(layer_of(module_of(path)), set()).update(found)
    used = {layer: {layer_of(target) for target in found} for layer, found in targets.items()}
    assert {layer: allowed - used[layer] for layer, allowed in ALLOWED.items() if allowed - used[layer]} == {}
    assert all(any(map(is_spec, targets[layer])) for layer in SPEC_READERS)
    assert all("pypto_serving.backend.defaults" in targets[layer] for layer in DEFAULTS_READERS)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("pypto_serving.sched.x", "from pypto_serving.kv.pool import BlockPool", True),
        ("pypto_serving.kv.x", "from pypto_serving.sched import scheduler", False),
        ("pypto_serving.sched.x", "def f():\n    import pypto_serving.worker.runner", False),
        ("pypto_serving.engine.x", "import torch.nn", False),
        ("pypto_serving.worker.x", "import torch", False),
        ("pypto_serving.backend.cpu", "def f():\n    import torch", False),
        ("pypto_serving.backend.cpu_torch", "import torch", True),
        ("pypto_serving.engine.x", "from pypto_serving.backend import base", False),
        ("pypto_serving.api.x", "from pypto_serving.model.registry import load_spec", True),
        ("pypto_serving.api.x", "from pypto_serving.model.decoder.program import Qwen3", False),
        ("pypto_serving.api.x", "from pypto_serving.model.decoder.native import NativeDecoder", False),
        ("pypto_serving.model.decoder.native", "import torch", False),
        ("pypto_serving.engine.x", "from pypto_serving.model.registry import load_spec", False),
        ("pypto_serving.model.decoder.spec", "import torch", False),
        ("pypto_serving.types.x", "from pypto_serving.kv import pool", False),
        ("pypto_serving.worker.x", "from pypto_serving.backend import base", True),
        ("pypto_serving.worker.x", "from pypto_serving.sched import scheduler", False),
        ("pypto_serving.bench.x", "from pypto_serving.sched import scheduler", True),
        ("pypto_serving.bench.x", "from pypto_serving.backend import null", False),
        ("pypto_serving.setup.x", "from pypto_serving.backend.defaults import BACKEND_DEFAULTS", True),
        ("pypto_serving.setup.x", "from pypto_serving.backend import base", False),
        ("pypto_serving.setup.x", "from pypto_serving.engine import core", False),
        ("pypto_serving.cli.x", "from pypto_serving.worker import runner", False),
        ("pypto_serving.cli.x", "from pypto_serving import __version__", True),
    ],
)
def test_the_rules_themselves(module: str, source: str, allowed: bool) -> None:
    assert (violations(module, source) == []) is allowed


FAMILIES = ("openai", "responses", "anthropic", "decisions", "ollama")
COMPOSITION = ("routes", "openapi", "server", "reading")
"""What knows all families of endpoints: who puts the server together, and who reads all bodies."""


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_endpoints_imports_another(family: str) -> None:
    """What several need is in `api/common/`."""
    inside = f"pypto_serving.api.{family}."
    allowed = tuple(f"pypto_serving.api.{name}" for name in (family, *COMPOSITION))
    importers = [
        module_of(path) for path in FILES if any(f"{name}.".startswith(inside) for name in imports_of(path.read_text()))
    ]
    assert importers and [module for module in importers if not module.startswith(allowed)] == []


def test_no_test_imports_another() -> None:
    """Shared helpers have modules of their own."""
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [name for name in imports_of(path.read_text()) if name.startswith("tests.") and ".test_" in name], (
            path
        )


@pytest.mark.parametrize("folder", WRITTEN)
def test_no_file_is_too_long(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    assert files
    assert [str(path) for path in files if len(path.read_text().splitlines()) > MAX_LINES] == []


def test_only_torch_programs_load_torch() -> None:
    """Import every module of front, core and the kernels' path in one process, so that indirect imports count too."""
    modules = [m for m in map(module_of, FILES) if is_torch_free(m) and not m.endswith("__main__")]
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


@pytest.mark.parametrize("module", ["pypto_serving", "pypto_serving.cli", "pypto_serving.cli.app"])
def test_the_package_and_its_command_line_import_little(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'starlette', 'rich', 'yaml'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


OPTION_TABLE = "pypto_serving.setup.option_table"
"""Has the help texts of flags."""


def flags_in(source: str) -> list[str]:
    """The strings that hold a flag, docstrings aside."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        if re.search(r"(?<!\S)--[a-z]", node.value)
    ]


def test_flags_in_messages_are_found() -> None:
    assert flags_in('"""Take --a."""\nx = f"{y} needs --b, not -- or a--b"\n') == [" needs --b, not -- or a--b"]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_commands_speak_of_flags(path: Path) -> None:
    """An option may come from a file or a Python call too: `setup.options.Options.label` knows; others say "option"."""
    if layer_of(module_of(path)) not in ("cli", "bench") and module_of(path) != OPTION_TABLE:
        assert flags_in(path.read_text()) == []


def test_threads_are_started_in_one_way() -> None:
    """One that an error ends in silence would leave others waiting; see `threads.py`."""
    ways = re.compile(r"\bthreading\.Thread\(|\bto_thread\b|run_in_executor\(None")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if ways.search(path.read_text())}
    assert found == {"threads.py"}
