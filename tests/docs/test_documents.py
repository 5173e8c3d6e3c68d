"""What the documents name exists: files and folders, links with their headings, and flags."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pypto_serving.cli.app import app
from tests.docs.documents import PATH, ROOT, exists, files_of, named_paths, text_of

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))
GUIDE = [f"docs/{page}" for page in re.findall(r"\]\((\w+\.md)\)", text_of("docs/guide.md"))]
"""The pages for users."""

OTHER_PROGRAMS = {"docs/agents.md", "docs/cuda.md", "docs/deploy.md", "docs/migrating.md"}
"""Pages that name flags of other programs."""

FLAG_NAMERS = ("README.md", *(name for name in GUIDE if name not in OTHER_PROGRAMS))
FOREIGN_PATHS = {"dist/", "encoding/encoding_dsv4.py"}
"""Paths that are made by a build, or are in a checkpoint."""

OTHER_FLAGS = {"--help", "--protocol", "--unix-socket"}
"""Flags that every program has, and those of other programs; so are all with an underscore."""

SOURCES = {".py", ".h", ".cpp"}
OTHER_WORDS = {"json"}
"""Parts of names of files that are no code, such as config.json."""

INITS = sorted((ROOT / "pypto_serving").rglob("__init__.py"))

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def headings(text: str) -> set[str]:
    """Anchors of a document as GitHub makes them."""
    plain = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in plain}


def listed_modules(docstring: str) -> list[str]:
    """Names in backticks before the colon of a list's lines: modules and sub-packages of the package described."""
    heads = [line.split(":")[0] for line in docstring.splitlines() if re.match(r"\s*- `", line)]
    return [name for head in heads for name in re.findall(r"`([^`]+)`", head)]


def flags_of(command: Any) -> Iterator[str]:
    """Flags of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for child in getattr(command, "commands", {}).values():
        yield from flags_of(child)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_exist(name: str) -> None:
    assert sorted(path for path in named_paths(text_of(name)) - FOREIGN_PATHS if not exists(path)) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target, heading in _LINK.findall(text_of(name)):
        if "://" in target:
            continue
        file = (ROOT / name).parent / target if target else ROOT / name
        if not file.exists() or (heading and heading not in headings(file.read_text(encoding="utf-8"))):
            broken.append(f"{target}#{heading}")
    assert broken == []


@pytest.mark.parametrize("name", FLAG_NAMERS)
def test_flags_exist(name: str) -> None:
    named = {found for found in re.findall(r"(?<![\w-])--[a-z][\w-]*", text_of(name)) if "_" not in found}
    assert sorted(named - OTHER_FLAGS - set(flags_of(typer.main.get_command(app)))) == []


def test_names_in_the_map_are_in_their_files() -> None:
    """Each part of a dotted name, in any file of its line."""
    lost = []
    for line in text_of("docs/design.md").split("## Where to find it")[1].split("\n## ")[0].splitlines():
        files = [path for name in named_paths(line) for path in files_of(name)]
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        names = [name for name in re.findall(r"`(\w[\w.]*)`", line) if not PATH.fullmatch(name)]
        lost += [name for name in names if not all(re.search(rf"\b{part}\b", text) for part in name.split("."))]
    assert lost == []


@pytest.mark.parametrize("name", ["design", "decisions", "ranks", "glossary"])
def test_names_are_words_of_the_code(name: str) -> None:
    """Each part of an identifier in backticks, outside of blocks of code."""
    files = [path for folder in ("pypto_serving", "csrc", "tests") for path in sorted((ROOT / folder).rglob("*"))]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files if path.suffix in SOURCES)
    text = re.sub(r"```.*?```", "", text_of(f"docs/{name}.md"), flags=re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`\n]*\))?`", text)) - named_paths(text)
    words = {part for found in names if not PATH.fullmatch(found) for part in found.split(".")}
    assert sorted(words - set(re.findall(r"\w+", code)) - OTHER_WORDS) == []
    classes = set(re.findall(r"^\s*class (\w+)", code, re.MULTILINE))
    assert sorted(word for word in words if re.fullmatch(r"[A-Z][a-z]\w*", word) and word not in classes) == []


def test_every_folder_of_the_package_is_in_the_overview() -> None:
    folders = {path.parent.name for path in (ROOT / "pypto_serving").glob("*/__init__.py")}
    overview = text_of("docs/design.md").split("## Folders")[1].split("\n## ")[0]
    assert {f for f in folders if not re.search(rf"\b{f}/", overview)} == set()


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.parent.name)
def test_modules_in_the_list_of_a_package_exist(init: Path) -> None:
    names = listed_modules(ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "")
    folder = init.parent
    here = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    here -= {"__init__"}
    assert sorted(set(names) - here) == []
    assert not names or sorted(here - set(names)) == [], "a list that begins must be complete"


def test_the_rules_themselves() -> None:
    assert listed_modules("Text `a`.\n\n- `b`, `c_d`: the `e`\n- `f*`: g") == ["b", "c_d", "f*"]
    assert named_paths("`kv/pool.py`, `no file`, `csrc/`, `a.b.c`, `model/<x>/y.py`") == {"kv/pool.py", "csrc/"}
    assert exists("kv/pool.py") and exists("pool.py") and exists("csrc/") and not exists("kv/nothing.py")
    assert headings("# A, `b` c\n```\n# no heading\n```\n## D-e") == {"a-b-c", "d-e"}
    assert "--max-model-len" in set(flags_of(typer.main.get_command(app)))


def test_the_design_lists_every_file_that_configures_a_start() -> None:
    section = text_of("docs/design.md").split("## From options to a start\n")[1].split("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    folder = ROOT / "pypto_serving/setup"
    assert sorted(re.findall(r"`(\w+\.py)`", rows)) == sorted({p.name for p in folder.glob("*.py")} - {"__init__.py"})
