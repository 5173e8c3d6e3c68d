"""The double of the runtime and the runtime itself, by the same cases; the latter where it is installed."""

from __future__ import annotations

import functools
import os

import pytest

from tests.npu.case_names import CASES, HANGS
from tests.npu.forking import CALLING, Outcome, outcomes
from tests.npu.installed import EACH_REVISION, INSTALLED, ROOT, with_double

MODULE = "tests.npu.conformance"
WHICH = [
    *(
        pytest.param(with_double(revision), id=f"double-{revision}", marks=each.marks)
        for each in EACH_REVISION
        for revision in each.values
    ),
    pytest.param(
        {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        id="runtime",
        marks=[
            pytest.mark.npu,
            pytest.mark.timeout(900),
            pytest.mark.skipif(
                not INSTALLED, reason="PyPTO's runtime is not installed; docs/npu.md says where to get it"
            ),
        ],
    ),
]

Environment = dict[str, str]


@pytest.fixture(params=WHICH)
def variables(request: pytest.FixtureRequest) -> Environment:
    return {**os.environ, **request.param}


@functools.cache
def double_outcomes(revision: str) -> dict[str, Outcome]:
    """All cases in one process; those of the runtime run in a process each."""
    return outcomes(MODULE, (*CASES, *HANGS), {**os.environ, **with_double(revision)})


def outcome_of(case: str, variables: Environment) -> Outcome:
    if revision := variables.get("PYPTO_DOUBLE_REVISION"):
        return double_outcomes(revision)[case]
    return outcomes(MODULE, [case], variables)[case]


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, variables: Environment) -> None:
    outcome = outcome_of(case, variables)
    assert (outcome.status, outcome.out) == (0, "ok\n"), outcome.err


@pytest.mark.parametrize("case", HANGS)
def test_a_call_never_returns(case: str, variables: Environment) -> None:
    outcome = outcome_of(case, variables)
    assert (outcome.status, outcome.out) == (None, CALLING.decode()), outcome.err
