"""The parts of the npu backend on the double: checks of arguments, pages, programs on disk, ends of processes."""

from __future__ import annotations

import os

import pytest

from tests.checkpoints import make_checkpoint
from tests.npu.forking import Outcome, outcomes
from tests.npu.installed import with_double

CASES = (
    *("checks_every_argument", "copies_pages", "keeps_programs", "names_a_mismatch", "spreads_over_devices"),
    "is_killed",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), dtype="bfloat16")
    return outcomes("tests.npu.device_cases", CASES, {**os.environ, **with_double()}, str(model))


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, found: dict[str, Outcome]) -> None:
    assert (found[case].status, found[case].out) == (0, "ok\n"), found[case].err
