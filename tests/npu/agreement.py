"""What two engines on one model may differ by, and the processes of a worker's chips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil

from pypto_serving.engine.async_engine import AsyncEngine
from tests.e2e.engines import Reply

ERROR = 0.06
"""Most by which log-probabilities differ from the CPU's, whose sums round elsewhere; twice that is a tie."""


def agreeing(found: Sequence[Reply], expected: Sequence[Reply]) -> tuple[int, int]:
    """Count answers that are equal, and tokens before the first that differs, which must be a tie.

    Replies need two log-probabilities for each token.
    """
    worst, num_answers, num_tokens = 0.0, 0, 0
    for (ours, own), (theirs, values) in zip(found, expected, strict=True):
        same = next((i for i in range(len(ours)) if ours[i] != theirs[i]), len(ours))
        worst = max([worst, *(abs(own[i].logprob - values[i].logprob) for i in range(same))])
        if same < len(ours):
            best, second = np.frombuffer(values[same].top_logprobs, "<f4")[:2]
            assert best - second < 2 * ERROR, f"token {same} differs, and is no tie"
        num_answers += same == len(ours)
        num_tokens += same
    assert 0 < worst < ERROR
    return num_answers, num_tokens


def chips_of(engine: AsyncEngine) -> list[psutil.Process]:
    """The processes that the worker forked, in the order of devices."""
    assert engine.ready is not None
    worker = psutil.Process(engine.ready.worker_pid)
    chips = [each for each in worker.children(recursive=True) if each.cmdline() == worker.cmdline()]
    return sorted(chips, key=lambda each: each.pid)
