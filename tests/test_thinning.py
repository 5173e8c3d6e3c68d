"""Thinned tests keep each value, or each pair of values."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings

from tests.thinning import ALL_EXAMPLES, covering, examples

AXES = (range(4), range(2), range(12))
CASES = [tuple(enumerate(case)) for case in itertools.product(*AXES)]


@pytest.mark.parametrize(("strength", "fewest"), [(1, 12), (2, 48), (3, 96)])
def test_each_combination_is_kept_in_few_cases(strength: int, fewest: int) -> None:
    def held(cases: list[tuple[tuple[int, int], ...]]) -> set[object]:
        return {each for case in cases for each in itertools.combinations(case, strength)}

    kept = [CASES[i] for i in covering(CASES, strength)]
    assert held(kept) == held(CASES)
    assert fewest <= len(kept) <= fewest * 1.2


def test_one_case_alone_is_kept() -> None:
    assert covering([()], 2) == covering(CASES[5:6], 2) == [0]


def test_examples_are_a_share_of_all() -> None:
    share = settings.default.max_examples / ALL_EXAMPLES
    assert examples(200).max_examples == 200 * share
    assert examples(3).max_examples == 3
