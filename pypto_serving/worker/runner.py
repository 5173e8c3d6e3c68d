"""Runner: executes plans on a program and samples."""

from __future__ import annotations

import os
import time
from typing import Protocol

import numpy as np

from pypto_serving.backend.base import Program, StepBuffers, StepOutput
from pypto_serving.types.arrays import Int32Array
from pypto_serving.types.step import RowLogprobs, StepPlan, StepResult, WorkerHello
from pypto_serving.types.tier import TierInventory
from pypto_serving.types.tokens import pack_ids
from pypto_serving.worker.batch import PackedStep, RowBatch
from pypto_serving.worker.plain import PlainSampler
from pypto_serving.worker.sampler import SampledLogprobs


class PlanExecutor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


def hello(program: Program, epoch: int, load_s: float, tiers: tuple[TierInventory, ...] = ()) -> WorkerHello:
    """What this worker tells the core about its program and its stores."""
    return WorkerHello(
        epoch=epoch,
        pid=os.getpid(),
        groups=program.groups,
        num_blocks=program.num_blocks,
        limits=program.limits,
        fingerprint=program.fingerprint,
        load_s=load_s,
        tiers=tiers,
    )


class Runner:
    """Owns the persistent rows and drives the program one plan at a time."""

    def __init__(self, program: Program, buffers: StepBuffers) -> None:
        self.program = program
        self._sampler = program.sampler or PlainSampler()
        self.batch = RowBatch(program.groups, program.limits, buffers)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Any error it raises is the device's: the caller ends the worker."""
        started_s = time.perf_counter()
        step = self.batch.pack(plan)
        output = self.program.run(step.inputs)
        token_ids, logprobs = self._choose(step, output)
        self.batch.advance(step, token_ids)
        elapsed_s = output.virtual_s if output.virtual_s is not None else time.perf_counter() - started_s
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            rows=pack_ids(step.sampling_rows),
            token_ids=pack_ids(token_ids),
            logprobs=logprobs,
            elapsed_s=elapsed_s,
        )

    def _choose(self, step: PackedStep, output: StepOutput) -> tuple[Int32Array, list[RowLogprobs]]:
        rows, batch = step.sampling_rows, self.batch
        if output.token_ids is not None:
            return output.token_ids, []
        if len(rows) == 0:
            return np.empty(0, dtype=np.int32), []
        assert output.logits is not None
        positions = batch.num_tokens[rows]
        num_output = positions - batch.prompt_len[rows]
        token_ids, values = batch.samplers.sample(output.logits, rows, positions, num_output, self._sampler)
        return token_ids, [_logprobs(row, value) for row, value in values.items()]


def _logprobs(row: int, values: SampledLogprobs) -> RowLogprobs:
    top = values.top_logprobs.astype("<f4").tobytes()
    return RowLogprobs(row, values.logprob, values.rank, pack_ids(values.top_ids), top)
