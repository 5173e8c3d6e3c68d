"""Totals over steps."""

from __future__ import annotations

from pypto_serving.sched.step import Counters
from pypto_serving.types.step import StepResult


def result(elapsed_s: float, packing_s: float, sampling_s: float) -> StepResult:
    times = {"elapsed_s": elapsed_s, "packing_s": packing_s, "sampling_s": sampling_s}
    return StepResult(step_id=1, epoch=1, rows=b"", token_ids=b"", logprobs=[], **times)


def test_what_is_neither_packing_nor_sampling_is_computing() -> None:
    counters = Counters()
    counters.record_times(result(1.0, 0.25, 0.125))
    counters.record_times(result(2.0, 0.25, 0.5))
    assert (counters.packing_s, counters.sampling_s, counters.computing_s) == (0.5, 0.625, 1.875)


def test_a_step_that_was_packed_while_another_was_computed_takes_nothing_back() -> None:
    counters = Counters()
    counters.record_times(result(0.25, 0.25, 0.125))
    assert counters.computing_s == 0.0
