"""Runner: execute plans on a program, and sample."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

import msgspec

from pypto_serving.backend.base import Program, StepBuffers, StepOutput
from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.errors import ConfigError
from pypto_serving.kernels import NgramDrafter
from pypto_serving.logs import of_request
from pypto_serving.types.arrays import Float32Array, pack_ids
from pypto_serving.types.config import NgramConfig
from pypto_serving.types.sampler import Sampler
from pypto_serving.types.step import RowFault, StepPlan, StepResult, WorkerHello
from pypto_serving.types.tier import TierInventory
from pypto_serving.worker.batch import Dispatch, RowBatch
from pypto_serving.worker.drafts import MakeDrafter, ModelDrafter
from pypto_serving.worker.guide_client import GuideProcess, MakeGuideProcess
from pypto_serving.worker.guides import StepConstraints
from pypto_serving.worker.prompt_logprobs import compute_prompt_logprobs, num_logits
from pypto_serving.worker.verify import DispatchResult, apply_guides, read_device_tokens, sample_and_verify

logger = logging.getLogger(__name__)


class PlanExecutor(Protocol):
    """The interface of a plan executor for the worker's loop. Executes plans in order."""

    @property
    def is_full(self) -> bool:
        """Whether a step must be collected before the next is submitted."""

    @property
    def num_in_flight(self) -> int:
        """Number of steps submitted and not collected."""

    def submit_plan(self, plan: StepPlan) -> None:
        """Begin a step. Any exception is a device error; the caller must end the worker."""

    def collect_result(self) -> StepResult:
        """Wait for the oldest step. Any exception is a device error; the caller must end the worker."""


def hello(program: Program, epoch: int, load_s: float, tiers: tuple[TierInventory, ...] = ()) -> WorkerHello:
    """Return the worker's first message: facts about its program and stores."""
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


class _PendingStep(msgspec.Struct, frozen=True):
    plan: StepPlan
    dispatches: list[Dispatch]
    started_s: float
    packed_s: float
    constraints: list[StepConstraints | None]


class Runner:
    """Owns the persistent rows and drives the program. Implements PlanExecutor.

    `model_dir`: folder with the tokenizer for grammars, or "". With `ngram`, the host makes n-gram drafts; otherwise
    the program's draft layers or the device make drafts.

    - If the device samples, all dispatches of a step are submitted at once. The program holds up to `depth` steps.
    - A pipeline also submits all dispatches at once. It holds one step per stage.
    - Otherwise each dispatch is collected and sampled before the next one is submitted.
    """

    def __init__(
        self,
        program: Program,
        buffers: Sequence[StepBuffers],
        vocab_size: int,
        num_drafts: int = 0,
        model_dir: str = "",
        guide_process: MakeGuideProcess = GuideProcess,
        ngram: NgramConfig | None = None,
    ) -> None:
        self.program = program
        self._sampler = program.sampler or PlainSampler()
        self._on_device = program.limits.traits.samples_on_device
        self._submits_all = self._on_device or program.limits.traits.stages > 1
        self._held_steps = program.limits.held_steps
        self._steps: deque[_PendingStep] = deque()
        self._collected_s = 0.0
        make_drafter = None
        if num_drafts and not self._on_device:
            make_drafter = _drafter_maker(program, self._sampler, ngram)
        self.batch = RowBatch(
            program.groups, program.limits, buffers, vocab_size, make_drafter, model_dir, guide_process
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= self._held_steps

    def submit_plan(self, plan: StepPlan) -> None:
        """Pack a plan and submit it to the program."""
        started_s = time.perf_counter()
        dispatches = self.batch.pack_plan(plan)
        step = _PendingStep(plan, dispatches, started_s, time.perf_counter(), [])
        for dispatch in dispatches if self._submits_all else dispatches[:1]:
            self._submit(step, dispatch)
        self._steps.append(step)

    def _submit(self, step: _PendingStep, dispatch: Dispatch) -> None:
        sampling = None
        if self._on_device:
            step.constraints.append(self.batch.guides.constrain(dispatch.rows))
            rows, owners, positions = dispatch.rows, dispatch.owners, dispatch.positions
            sampling = self.batch.samplers.inputs(rows, owners, positions, self.batch.num_tokens[rows])
        self.program.submit(dispatch.inputs, sampling)

    def collect_result(self) -> StepResult:
        """Wait for the oldest step, sample if the host does, and return the result."""
        step = self._steps.popleft()
        found, sampling_s, virtual_s = [], 0.0, None
        for i, dispatch in enumerate(step.dispatches):
            if i and not self._submits_all:
                self._submit(step, dispatch)
            output = self.program.collect()
            computed_s = time.perf_counter()
            if not self._on_device:
                step.constraints.append(self.batch.guides.constrain(self.batch.still(dispatch), dispatch.num_drafts))
            chosen = self._choose(dispatch, output, step.constraints[i])
            self.batch.advance(dispatch, chosen.counts, chosen.token_ids, chosen.accepted)
            found.append((dispatch, chosen))
            if chosen.faults:
                self._log(dispatch, chosen.faults)
            sampling_s += time.perf_counter() - computed_s
            if output.virtual_s is not None:
                virtual_s = (virtual_s or 0.0) + output.virtual_s
        now_s, free_s = time.perf_counter(), self._collected_s  # a held step also waits for earlier ones
        self._collected_s = now_s
        elapsed_s, packing_s = now_s - max(step.started_s, free_s), step.packed_s - step.started_s
        computing_s = now_s - max(step.packed_s, free_s)
        if virtual_s is not None:
            elapsed_s, packing_s, computing_s, sampling_s = virtual_s, 0.0, virtual_s, 0.0
        if self.batch.drafts is not None:
            self._measure(step, computing_s)
        return _result(step, found, elapsed_s, packing_s, sampling_s)

    def _log(self, dispatch: Dispatch, faults: Iterable[RowFault]) -> None:
        """Log faults of the server, with the request's id unless its row may belong to another request meanwhile."""
        rows = set(self.batch.still(dispatch).tolist())
        for fault in faults:
            if fault.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                known = dispatch.lives is None or fault.row in rows
                logger.error("%s", fault.message, extra=of_request(self.batch.log_ids[fault.row] if known else ""))

    def _measure(self, step: _PendingStep, elapsed_s: float) -> None:
        """Report the time of a step that has only decodes to the drafts, counted from the end of the step before."""
        assert self.batch.drafts is not None
        if len(step.dispatches) == 1:
            (dispatch,) = step.dispatches
            num_tokens = len(dispatch.rows) + int(dispatch.each_drafts().sum())
            if 0 < num_tokens == dispatch.inputs.query_start[dispatch.inputs.num_rows]:
                self.batch.drafts.step_cost.measure(num_tokens, elapsed_s)

    def _choose(self, dispatch: Dispatch, output: StepOutput, constraints: StepConstraints | None) -> DispatchResult:
        if output.sampled is not None:
            chosen = read_device_tokens(dispatch, output.sampled)
        else:
            assert output.logits is not None
            chosen = self._choose_here(dispatch, output.logits, constraints)
        if constraints is not None:
            chosen = apply_guides(dispatch, chosen, constraints)
            self.batch.guides.append(dispatch.rows, constraints, chosen.each(len(dispatch.rows)), chosen.token_ids)
        return chosen

    def _choose_here(
        self, dispatch: Dispatch, logits: Float32Array, constraints: StepConstraints | None
    ) -> DispatchResult:
        """Sample on the host. Compute prompt log-probabilities from the logits after the sampling rows."""
        samplers, known_drafts = self.batch.samplers, {} if constraints is None else constraints.known_drafts
        if not dispatch.prompt_spans:
            return sample_and_verify(dispatch, logits, samplers, self._sampler, known_drafts)
        sampling = len(logits) - num_logits(dispatch.prompt_spans)
        chosen = sample_and_verify(dispatch, logits[:sampling], samplers, self._sampler, known_drafts)
        found, faults = compute_prompt_logprobs(dispatch.prompt_spans, logits[sampling:], self._sampler)
        return chosen._replace(prompt_logprobs=found, faults=chosen.faults + faults)


def _drafter_maker(program: Program, sampler: Sampler, ngram: NgramConfig | None) -> MakeDrafter:
    """Return the function that makes the drafter of a sampling host. Raises ConfigError if there is no drafter."""
    max_rows = program.limits.max_num_seqs
    if ngram is not None:
        return lambda *_: NgramDrafter(max_rows, ngram.shortest, ngram.longest)
    if program.draft is None:
        raise ConfigError("the program has no draft layers; look drafts up (method ngram), or set num_drafts to 0")
    return partial(ModelDrafter, program.draft, sampler, max_rows)


def _result(
    step: _PendingStep,
    found: list[tuple[Dispatch, DispatchResult]],
    elapsed_s: float,
    packing_s: float,
    sampling_s: float,
) -> StepResult:
    """Join the results of a step's dispatches."""
    counts = num_drafts = num_accepted = b""
    results = [result for _, result in found]
    if any(result.counts is not None for result in results):
        counts = b"".join([pack_ids(result.each(len(dispatch.rows))) for dispatch, result in found])
    if any(dispatch.num_drafts is not None for dispatch, _ in found):
        num_drafts = b"".join([pack_ids(dispatch.each_drafts()) for dispatch, _ in found])
        num_accepted = b"".join([pack_ids(result.each_accepted(len(dispatch.rows))) for dispatch, result in found])
    return StepResult(
        step_id=step.plan.step_id,
        epoch=step.plan.epoch,
        rows=b"".join([pack_ids(dispatch.rows) for dispatch, _ in found]),
        token_ids=b"".join([pack_ids(result.token_ids) for result in results]),
        logprobs=[each for result in results for each in result.logprobs],
        elapsed_s=elapsed_s,
        packing_s=packing_s,
        sampling_s=sampling_s,
        counts=counts,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        faults=[each for result in results for each in result.faults],
        prompt_logprobs=[each for result in results for each in result.prompt_logprobs],
    )
