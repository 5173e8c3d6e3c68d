"""The recipes of CONTRIBUTING.md: each function, class and table is in one of the files that its recipe names."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import files_of, named_paths, text_of

_WITHOUT_FILE = {"name"}
"""Stands for what the reader chooses."""

RECIPES = [part.split("\n## ")[0] for part in text_of("CONTRIBUTING.md").split("\n### Add ")[1:]]


def names_in(text: str) -> set[str]:
    """Identifiers in backticks, before an opening bracket too; of dotted ones the last, and no options or commands."""
    quoted = set(re.findall(r"`([^`\n]+)`", text)) - named_paths(text)
    found = {
        match[1].rpartition(".")[2] for one in quoted if (match := re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", one))
    }
    return found - _WITHOUT_FILE


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.splitlines()[0].replace(" ", "-"))
def test_names_are_in_the_files_of_their_recipe(recipe: str) -> None:
    paths = sorted(named_paths(recipe))
    text = "\n".join(
        file.read_text(encoding="utf-8") for path in paths for file in files_of(path) if file.suffix != ".md"
    )
    assert [name for name in sorted(names_in(recipe)) if not re.search(rf"\b{name}\b", text)] == []


def test_there_are_recipes() -> None:
    assert len(RECIPES) == 5 and all(named_paths(recipe) and names_in(recipe) for recipe in RECIPES)


def test_what_a_name_is() -> None:
    text = '`ROUTES` `self._add("x")` `read(scanner, tools)` `make check` `--flag` `rules.py` `a.b.State` `name`'
    assert names_in(text) == {"ROUTES", "_add", "read", "State"}
