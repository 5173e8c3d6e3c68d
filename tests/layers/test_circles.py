"""No circles: the modules of the package, and its layers, form graphs without any, over all import statements.

Statements inside functions and under TYPE_CHECKING count too. An import of a name that a package's `__init__` only
hands on is an edge to the module that defines it; of anything else in the package, an edge to the `__init__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.layers.modules import FILES, imports_of, layer_of, module_of

Graph = dict[str, set[str]]


def handed_on(module: str, source: str) -> dict[str, str]:
    """The names that a package's `__init__` imports and does not use, with where they come from."""
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {
        f"{module}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pypto_serving")
        for alias in node.names
        if (alias.asname or alias.name) not in used
    }


def import_graph(sources: Mapping[str, str], packages: Iterable[str] = ()) -> Graph:
    """Each module of `sources` with the modules that it imports; `packages` are those that are an `__init__`."""
    names: dict[str, str] = {}
    for package in packages:
        names |= handed_on(package, sources[package])
    return {
        module: {cut(names.get(name, name), sources) for name in imports_of(source)} - {module, ""}
        for module, source in sources.items()
    }


def cut(name: str, modules: Mapping[str, str]) -> str:
    """The module among `modules` that `name` is in, or "" for a foreign one."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle(graph: Graph) -> list[str]:
    """One circle in the graph, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.fixture(scope="module")
def graph() -> Graph:
    sources = {module_of(path): path.read_text() for path in FILES}
    return import_graph(sources, [module_of(path) for path in FILES if path.name == "__init__.py"])


def test_modules_form_no_circle(graph: Graph) -> None:
    assert circle(graph) == []


def test_layers_form_no_circle(graph: Graph) -> None:
    """The package's own version is read everywhere, and is no layer."""
    layers: Graph = {}
    for module, targets in graph.items():
        if module != "pypto_serving":
            wanted = layers.setdefault(layer_of(module), set())
            wanted |= {layer_of(target) for target in targets} - {layer_of(module), "pypto_serving"}
    assert circle(layers) == []


def test_rooms_of_the_api_form_no_circle(graph: Graph) -> None:
    rooms: Graph = {}
    for module, targets in graph.items():
        wanted = rooms.setdefault(room_of_api(module), set())
        wanted |= {room_of_api(target) for target in targets} - {room_of_api(module), ""}
    del rooms[""]
    assert {"http", "common", "grammars", "service", "server"} <= rooms.keys()
    assert circle(rooms) == []


def room_of_api(module: str) -> str:
    """The folder of the API, or the file beside its folders, that `module` is in; "" for none."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["api"] and len(parts) > 2 else ""


@pytest.mark.parametrize(
    ("sources", "circular"),
    [
        ({"p.a": "from p import b", "p.b": "import os"}, False),
        ({"p.a": "from p import b", "p.b": "from p.a import X"}, True),
        ({"p.a": "from p import b", "p.b": "def f():\n    import p.a"}, True),
        ({"p.a": "from p import b", "p.b": "if TYPE_CHECKING:\n    from p.a import X"}, True),
        ({"p.a": "import p.b", "p.b": "import p.c", "p.c": "import p.a"}, True),
    ],
)
def test_the_rule_itself(sources: dict[str, str], circular: bool) -> None:
    assert bool(circle(import_graph(sources))) is circular


@pytest.mark.parametrize(
    ("source", "circular"),
    [
        ("from pypto_serving.k import Z", False),
        ("from pypto_serving.k import version", True),
        ("def f():\n    import pypto_serving.k", True),
    ],
)
def test_a_package_that_hands_names_on_is_a_circle_only_for_its_own(source: str, circular: bool) -> None:
    init = "from pypto_serving.k.a import X\nfrom pypto_serving.k.b import Y, Z\nversion = Y()"
    sources = {"pypto_serving.k": init, "pypto_serving.k.a": source}
    sources |= {"pypto_serving.k.b": "", "pypto_serving.x": "from pypto_serving.k import X"}
    graph = import_graph(sources, ["pypto_serving.k"])
    assert graph["pypto_serving.k"] == {"pypto_serving.k.a", "pypto_serving.k.b"}
    assert graph["pypto_serving.x"] == {"pypto_serving.k.a"}
    assert bool(circle(graph)) is circular


def test_every_package_has_a_file() -> None:
    """Namespace packages would hide from the graph."""
    assert all((path.parent / "__init__.py").exists() for path in map(Path, FILES))
