"""Measure the microseconds per step outside kernels, in the worker and in the core.

    python benchmarks/step_cost.py

Scheduler, KV manager, core, rows, loop, messages and the calls into the kernels' library are the real ones, in one
thread. The recorded step has no operations and the vocabulary 32 tokens: what remains is the cost outside kernels.

- worker: the time from one step's logits to the next step's kernels: sample, send the result, receive the next plan,
  lay it out and call. It delays every step.
- core: commit the result, plan the step after the next, and send it. With steps in flight it delays nothing, as long as
  the worker has another plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from pypto_serving.backend.base import StepBuffers
from pypto_serving.backend.native import NativeProgram
from pypto_serving.engine.core import EngineCore
from pypto_serving.engine.worker_process import WorkerEvent
from pypto_serving.kernels import Engine, Recording
from pypto_serving.kernels.collectives import NativeCollectives
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.request import AddRequests, EngineRequest, FromCore, ToCore
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendLimits, FromWorker, StepPlan, ToWorker
from pypto_serving.worker.runner import Runner, hello

sys.path.append(str(Path(__file__).parent.parent))
from tests.memory_channel import MemoryChannel

VOCAB = 32
BLOCK = 32
BUDGET = 8192
TURN = 20
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """`running` requests of `context` tokens decode; `waiting` ones of `waiting_context` tokens do not start.

    They wait for a row or, with `short_of_blocks`, for KV blocks.
    """

    running: int
    context: int = 100
    waiting: int = 0
    waiting_context: int = 100
    short_of_blocks: bool = False
    params: SamplingParams = GREEDY

    def config(self, steps: int) -> EngineConfig:
        tensor = KVTensorSpec(name="k", layers=(0,), dtype="bfloat16", row_shape=(1,))
        group = FullSpec(name="full", tensors=(tensor,), block_size=BLOCK)
        prefill = self.running * self.context // (BUDGET // 2)
        longest = max(self.context, self.waiting_context) + prefill + 2 * steps
        blocks = max(self.running * -(-(self.context + prefill + 2 * steps) // BLOCK), -(-longest // BLOCK) + 1)
        return EngineConfig(
            model=ModelConfig(path="", dtype="bfloat16", vocab_size=VOCAB),
            worker=WorkerConfig(backend="cpu"),
            cache=CacheConfig(groups=(group,), num_blocks=(blocks + 1 + blocks // 50,)),
            limits=BackendLimits(
                max_model_len=longest,
                max_num_seqs=self.running * (2 if self.short_of_blocks else 1),
                max_num_batched_tokens=BUDGET,
                depth=2,
            ),
        )


class InlineWorker:
    """An Executor: the worker's side of the channel, run by whoever calls `step`."""

    def __init__(self, config: EngineConfig) -> None:
        engine = Engine(threads=1)
        logits = np.random.default_rng(0).standard_normal((config.limits.max_num_seqs, VOCAB)).astype(np.float32)
        model = SimpleNamespace(step=Recording(engine), logits=logits, arenas=())
        program = NativeProgram(model, config, b"step cost", engine, NativeCollectives())
        self.runner = Runner(program, [StepBuffers.in_host_memory(config.cache.groups, config.limits)], VOCAB)
        self.ours, self.core_end = MemoryChannel.pair(ToWorker, FromWorker)
        self.ours.send(hello(program, 1, 0.0))

    def step(self) -> float:
        """Execute one plan, if there is one, and return the seconds that it took."""
        start_s = time.perf_counter()
        plan = self.ours.receive()
        if isinstance(plan, StepPlan):
            self.runner.submit_plan(plan)
            self.ours.send(self.runner.collect_result())
        return time.perf_counter() - start_s

    def poll(self, now_s: float) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        while (message := self.core_end.receive()) is not None:
            events.append(message)
        return events

    def send_plan(self, plan: StepPlan) -> None:
        self.core_end.send(plan)

    def forgive_deaths(self) -> None: ...

    def stop(self) -> None: ...


class Replica:
    """A core, its worker and a client that drops all messages, in one thread."""

    def __init__(self, case: Case, steps: int) -> None:
        config = case.config(steps)
        self.client, core_end = MemoryChannel.pair(FromCore, ToCore)
        self.worker = InlineWorker(config)
        self.core = EngineCore(config, core_end, self.worker, time.monotonic)
        self.core.turn()
        self._add("run", case.running, case.context, case.params)
        while self.core.scheduler.num_running < case.running or self._is_prefilling(case):
            self.step()
        self._add("wait", case.waiting, case.waiting_context, case.params)

    def _add(self, name: str, count: int, context: int, params: SamplingParams) -> None:
        rng = np.random.default_rng(1)
        for i in range(count):
            ids = pack_ids(rng.integers(0, VOCAB, context, dtype=np.int32))
            for message in AddRequests.pack(
                [EngineRequest(request_id=f"{name}{i}", token_ids=ids, params=params, seed=i)]
            ):
                self.client.send(message)

    def _is_prefilling(self, case: Case) -> bool:
        return self.core.scheduler.counters.step_tokens != case.running

    def step(self) -> tuple[float, float]:
        """Run one step and return the seconds of core and worker."""
        start_s = time.perf_counter()
        self.core.turn()
        core_s = time.perf_counter() - start_s
        while self.client.receive() is not None:
            pass
        return core_s, self.worker.step()


def measure(cases: Sequence[Case], steps: int) -> list[tuple[float, float]]:
    """Return median seconds per step of core and worker by case. Cases take turns, since machine speed varies."""
    replicas = [Replica(case, steps) for case in cases]
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(steps // TURN):
        for replica, mine in zip(replicas, times, strict=True):
            mine += [replica.step() for _ in range(TURN)]
    for case, replica in zip(cases, replicas, strict=True):
        scheduler = replica.core.scheduler
        assert (scheduler.num_running, scheduler.num_waiting) == (case.running, case.waiting)
    medians = [np.median(mine, axis=0).tolist() for mine in times]
    return [(core_s, worker_s) for core_s, worker_s in medians]


def tables() -> Iterator[tuple[str, Sequence[tuple[str, Case]]]]:
    yield (
        "requests running, 100 tokens each",
        [
            (f"{running}, {name}", Case(running, params=params))
            for running in (1, 8, 64)
            for name, params in (("greedy", GREEDY), ("temperature 1", SAMPLED))
        ],
    )
    yield (
        "context of 64 running requests, tokens",
        [(f"{context:,}", Case(64, context)) for context in (100, 1000, 10_000, 100_000)],
    )
    waits = [(f"{waiting:,} for a row", Case(64, waiting=waiting)) for waiting in (0, 100, 10_000)]
    waits.append(("100 of 60,000 tokens for blocks", Case(64, 1000, 100, 60_000, short_of_blocks=True)))
    yield "requests waiting beside 64 running ones", waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    for title, cases in tables():
        print(f"\n| {title} | worker us | core us |\n|---|---|---|")
        measured = measure([case for _, case in cases], arguments.steps)
        for (name, _), (core_s, worker_s) in zip(cases, measured, strict=True):
            print(f"| {name} | {worker_s * 1e6:.0f} | {core_s * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
