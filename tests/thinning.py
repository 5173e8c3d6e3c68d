"""Fewer cases of `make test`, with all of them in `make soak`: combinations that cover, and examples by share."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 100


def examples(count: int, **others: Any) -> settings:
    """Let a test of Hypothesis have this many examples in the soak, and the profile's share of them otherwise."""
    share = count * settings.default.max_examples // ALL_EXAMPLES
    return settings(max_examples=max(min(count, 4), share), **others)


def some(cases: Iterable[str], *kept: str) -> list[Any]:
    """Leave all but a few cases to the soak."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.soak) for case in cases]


def thin(items: Sequence[pytest.Item]) -> None:
    """Leave to the soak what a test marked `thinned` repeats: each value, or each pair of values, is kept once."""
    groups = defaultdict[Any, list[Any]](list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "thinned" in marks and "soak" not in marks and hasattr(item, "callspec"):
            groups[item.parent, getattr(item, "originalname", "")].append(item)
    for cases in groups.values():
        (strength,) = cases[0].get_closest_marker("thinned").args
        kept = covering([tuple(enumerate(case.callspec._idlist)) for case in cases], strength)
        for i in set(range(len(cases))) - set(kept):
            cases[i].add_marker(pytest.mark.soak)


def covering(cases: Sequence[Sequence[Any]], strength: int) -> list[int]:
    """Return the indices of a few cases that hold each value, or each combination of `strength` values, of all."""
    held = [set(itertools.combinations(case, min(strength, len(case)))) for case in cases]
    missing = set[Any]().union(*held)
    kept = []
    while missing:
        kept.append(max(range(len(cases)), key=lambda i: (len(held[i] & missing), -i)))
        missing -= held[kept[-1]]
    return sorted(kept)
