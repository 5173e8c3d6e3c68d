"""Measure what the dashboard costs the API process: while nobody looks, and for each look.

python benchmarks/dashboard.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec

from pypto_serving.engine.client import Health
from pypto_serving.engine.history import INTERVAL_S, MAX_FINISHED, MAX_SAMPLES, Finished, History
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import FullSpec
from pypto_serving.types.request import Timeline
from pypto_serving.types.stats import StepStats

REPEATS, CALLS = 15, 20_000


class Engine:
    """What a history reads of one replica that works."""

    def __init__(self) -> None:
        group = FullSpec(name="kv", tensors=(), block_size=16)
        self.config = EngineConfig(
            model="",
            backend="null",
            dtype="float32",
            vocab_size=1,
            groups=(group,),
            num_blocks=(9,),
            max_model_len=4096,
        )
        self.stats = StepStats(num_running=8, num_steps=10**6, prompt_tokens=10**8, kv_usage=(0.5,))
        self.engines = (self,)

    def health(self) -> Health:
        return Health(True, "ready")


def microseconds(call: Callable[[int], object], count: int) -> float:
    """The median over REPEATS of the mean time of `count` calls."""
    found = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        for i in range(count):
            call(i)
        found.append((time.perf_counter() - started_s) / count * 1e6)
    return median(found)


def main() -> None:
    engine = Engine()
    metrics = ServerMetrics(engine, "model")  # type: ignore[arg-type]
    history = History(engine, metrics)  # type: ignore[arg-type]
    ended = Finished(
        id="chatcmpl-0",
        reason="stop",
        prompt_tokens=99,
        output_tokens=99,
        cached_tokens=0,
        timeline=Timeline(0, 1, 2, 3),
    )
    at_s = 0.0

    def sample(_: int) -> None:
        nonlocal at_s
        at_s += INTERVAL_S
        history.observe(at_s)

    rows = [
        ("a sample, once a second", microseconds(sample, MAX_SAMPLES)),
        ("a step between samples", microseconds(lambda _: history.observe(time.monotonic() - 1e9), CALLS)),
        ("a request that ends", microseconds(lambda _: history.finish(ended), MAX_FINISHED)),
        ("a reading of the clock in the worker", microseconds(lambda _: time.perf_counter(), CALLS)),
    ]
    for name, taken in rows:
        print(f"{name:40} {taken:8.2f} µs")
    everything = [history.samples_since(0), history.finished_since(0)]
    print(f"{'samples and requests, as JSON':40} {len(msgspec.json.encode(everything)) / 1024:8.0f} KiB")


if __name__ == "__main__":
    main()
