"""A replica without processes: engine core, null worker and client in one thread, in virtual time."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from pypto_serving.backend.null.device import SAMPLER, logits_of, next_digest
from pypto_serving.backend.null.program import NullBackend
from pypto_serving.backend.numpy_sampler import uniforms
from pypto_serving.engine.core import EngineCore
from pypto_serving.engine.kv_events import KVEventPublisher
from pypto_serving.engine.worker_process import WorkerDown, WorkerEvent, open_host_memory
from pypto_serving.model.null_models import plain_groups
from pypto_serving.store.base import Store
from pypto_serving.store.disk import open_disk
from pypto_serving.store.host import HostStore
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.request import (
    AbortRequests,
    AddRequests,
    EngineRequest,
    FromCore,
    RequestOutput,
    ToCore,
)
from pypto_serving.types.sampler import DRAW
from pypto_serving.types.sampling import SamplingParams, adjusting
from pypto_serving.types.step import BackendTraits, PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from pypto_serving.types.tier import Tier, TransferDone, TransferJob, TransferReport, Transfers
from pypto_serving.worker.__main__ import inventories
from pypto_serving.worker.drafts import ModelDrafter
from pypto_serving.worker.runner import Runner, hello
from pypto_serving.worker.transfer import Mover
from tests.clock import VirtualClock
from tests.configs import make_config
from tests.inline_guides import InlineGuideProcess
from tests.memory_channel import MemoryChannel

VOCAB_SIZE = 1000


def null_config(
    groups: tuple[KVCacheGroupSpec, ...] = plain_groups(16), num_blocks: int | tuple[int, ...] = 64, **changes: Any
) -> EngineConfig:
    """A configuration of the null backend; `num_blocks` counts the null block."""
    if isinstance(num_blocks, int):
        num_blocks = (num_blocks,) * len(groups)
    values: dict[str, Any] = {
        "model": "",
        "backend": "null",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "groups": groups,
        "num_blocks": num_blocks,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "traits": BackendTraits(samples_on_device=True),
        "backend_options": {"seconds_per_step": 0.01, "seconds_per_token": 0.001},
    }
    return make_config(**(values | changes))


def in_pages(groups: tuple[KVCacheGroupSpec, ...], block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """The same groups as on a device whose pages all hold `block_size` tokens."""
    return tuple(msgspec.structs.replace(group, block_size=block_size) for group in groups)


MakeProgram = Callable[[EngineConfig], Any]


def null_program(config: EngineConfig) -> Any:
    """The program of the null backend."""
    return NullBackend(config).prepare(lambda phase, done, total: None)


def expected_tokens(config: EngineConfig, request: EngineRequest, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a correct engine answers on the null backend: history, changes of the logits and the seed decide."""
    history, params = list(prompt), request.params
    fails_on = config.worker.backend_options.get("fails_on", -1)
    plain = not params.temperature and changed(logits_of(0, config.model.vocab_size), request, prompt, []) is None
    while len(history) < len(prompt) + num_tokens:
        digest = next_digest(config.cache.groups, history)
        if plain and digest % config.model.vocab_size != fails_on:
            history.append(digest % config.model.vocab_size)
            continue
        logits = logits_of(digest, config.model.vocab_size, fails_on)
        if not np.isfinite(logits.max()):
            break
        draw = np.array([(0.0, params.top_p, params.min_p, params.temperature, max(0, params.top_k))], DRAW)
        seed, choice, position = (np.array([v], np.uint64) for v in (request.seed, request.choice, len(history)))
        draw["random"] = uniforms(seed, choice, position)
        scores = changed(logits, request, prompt, history[len(prompt) :])
        history.append(int(SAMPLER.choose((logits if scores is None else scores)[None], draw)[0]))
    return history[len(prompt) :]


def changed(
    logits: np.ndarray, request: EngineRequest, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray | None:
    """The logits that a request changes, token by token and as vLLM defines it; None if it changes none."""
    params, one = request.params, np.float32
    if not adjusting(params):
        return None
    scores = logits.copy()
    for token, value in params.logit_bias.items():
        scores[token] += one(value)
    for token in {*prompt, *output} if params.repetition_penalty != 1 else ():
        factor = one(params.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(output).items():
        scores[token] -= one(params.frequency_penalty) * one(count)
        scores[token] -= one(params.presence_penalty)
    if params.allowed_token_ids:
        scores[~np.isin(np.arange(len(scores)), params.allowed_token_ids)] = -np.inf
    banned = [last for *before, last in params.bad_word_ids if list(output)[len(output) - len(before) :] == before]
    if len(output) < params.min_tokens:
        banned += [*params.stop_token_ids, *request.eos_token_ids]
    left = scores.copy()
    left[banned] = -np.inf
    return left if np.isfinite(left.max()) else scores


class InlineExecutor:
    """Runs plans in the core's own thread, one per poll, on a runner that dies in the steps that it is told to.

    Transfers are done after as many polls as `delay` says, in any order, and say that they took `transfer_s`; host
    memory and `stores` outlive the runner.
    """

    def __init__(self, config: EngineConfig, clock: VirtualClock, make_program: MakeProgram) -> None:
        self.config = config
        self.clock = clock
        self._make_program = make_program
        self.epoch = 0
        self.plans: list[StepPlan] = []
        self.programs: list[Any] = []
        self.num_deaths = 0
        self.num_forgiven = 0
        self.die_if: Callable[[StepPlan], bool] = lambda plan: False
        self.delay: Callable[[], int] = lambda: 0
        self.transfer_s = 0.001
        self.is_stuck: Callable[[TransferJob], bool] = lambda job: False
        self.stores: dict[Tier, Store] = {}
        self._host_memory = open_host_memory(config)
        self._sent: list[StepPlan] = []
        self._submitted: list[StepPlan] = []
        self._moving: list[tuple[int, int, TransferJob]] = []
        self._completed_step = 0
        self._runner: Runner | None = None
        self._replaced = False
        self.left_out: tuple[Tier, ...] = ()

    def poll(self, now_s: float) -> list[WorkerEvent]:
        if self._runner is None:
            return [self._start()]
        if self._replaced:
            return [self.kill()]
        events: list[WorkerEvent] = [self._move()] if self._moving else []
        if self._sent and not self._runner.is_full:
            self._submitted.append(self._sent.pop(0))
            self._runner.submit_plan(self._submitted[-1])
        if self._runner.is_full or (self._runner.num_in_flight and not self._sent):
            events.append(self.kill() if self.die_if(self._submitted.pop(0)) else self._collect())
        return events

    def _move(self) -> TransferReport:
        """Do the transfers whose time has come."""
        done, left = [], []
        for delay, after_step, job in self._moving:
            if self.is_stuck(job) or delay > 0 or (job.kind == "load" and after_step > self._completed_step):
                left.append((delay - 1, after_step, job))
                continue
            worked = self._mover.move(job, self._mover.moves(job))
            done.append(TransferDone(job.job_id, bytes(worked), self.transfer_s))
        self._moving = left
        return TransferReport(self.epoch, done)

    def send_transfers(self, transfers: Transfers) -> None:
        self._moving += [(self.delay(), transfers.after_step, job) for job in transfers.jobs]

    def _start(self) -> WorkerEvent:
        self.epoch += 1
        program = self._make_program(self.config)
        self.programs.append(program)
        config, buffers = self.config, NullBackend(self.config).allocate()
        self._runner = Runner(
            program,
            buffers,
            config.model.vocab_size,
            config.num_drafts,
            config.model.path,
            InlineGuideProcess,
            config.worker.ngram,
        )
        if (drafts := self._runner.batch.drafts) is not None and isinstance(drafts._drafter, ModelDrafter):
            drafts._drafter._clock = self.clock.now
        if (attach := getattr(program, "attach", None)) is not None:
            attach(self._runner.batch)
        self._completed_step = 0
        sizes = program.memory.block_bytes
        for tier in self.config.cache.tiers:
            if tier.tier in self.left_out:
                continue
            if tier.tier == "host":
                self.stores["host"] = HostStore(self._host_memory, sizes, tier.num_slots)
            elif tier.tier == "disk":
                place = tier.place, program.fingerprint, sizes, tier.num_slots, tier.size_bytes
                self.stores["disk"] = self.stores.get("disk") or open_disk(*place, known=False)
        self._mover = Mover(program.memory, self.stores)
        held, self.left_out = inventories(self.stores, self.left_out), ()
        return hello(program, self.epoch, 0.0, held)

    def _collect(self) -> StepResult:
        assert self._runner is not None
        result = self._runner.collect_result()
        self.clock.advance(result.elapsed_s)
        self._completed_step = result.step_id
        return result

    def kill(self) -> WorkerDown:
        """End the worker's life; what it was sent is lost."""
        self.num_deaths += 1
        if self._make_program is not null_program and self._runner is not None:  # the next life may have the same one
            for _ in range(self._runner.num_in_flight):
                self.programs[-1].collect()
        self._runner, self._replaced = None, False
        self._sent.clear()
        self._submitted.clear()
        self._moving.clear()
        if "disk" in self.stores:
            self.stores.pop("disk").close()
        return WorkerDown("killed by the test")

    def send_plan(self, plan: StepPlan) -> None:
        assert plan.step_id == (self.plans[-1].step_id + 1 if self.plans else 1)
        self.plans.append(plan)
        self._sent.append(plan)

    def forgive_deaths(self) -> None:
        self.num_forgiven += 1

    def replace_worker(self, hanging: tuple[Tier, ...]) -> None:
        self.left_out, self._replaced = hanging, True

    def stop(self) -> None:
        self._runner = None
        for store in self.stores.values():
            store.close()


class Simulation:
    """A core, its executor and a client that remembers all outputs.

    `make_program` gives each life of the worker its program, by default the null backend's.
    """

    def __init__(
        self,
        config: EngineConfig,
        publisher: KVEventPublisher | None = None,
        make_program: MakeProgram = null_program,
    ) -> None:
        self.config = config
        self.clock = VirtualClock(1.0)
        self.executor = InlineExecutor(config, self.clock, make_program)
        self.client, core_end = MemoryChannel.pair(FromCore, ToCore)
        self.core = EngineCore(config, core_end, self.executor, self.clock, publisher)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[str, list[PromptLogprobs]] = defaultdict(list)
        self.accepted: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.last: dict[str, RequestOutput] = {}
        self.prompts: dict[str, list[int]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self._ids = itertools.count()

    @property
    def counters(self) -> Any:
        return self.core.scheduler.counters

    def add(self, prompt: Sequence[int], max_tokens: int | None = 8, **changes: Any) -> str:
        """Send a request; returns its id."""
        params = changes.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request_id = changes.pop("request_id", None) or f"r{next(self._ids)}"
        self.prompts[request_id] = list(prompt)
        request = EngineRequest(
            request_id=request_id, token_ids=pack_ids(prompt), params=params, arrival_s=self.clock.now(), **changes
        )
        self.requests[request_id] = request
        for message in AddRequests.pack([request]):
            self.client.send(message)
        return request_id

    def abort(self, *request_ids: str) -> None:
        self.client.send(AbortRequests(list(request_ids)))

    def turn(self) -> None:
        """One turn of the core, then take in what it says."""
        self.core.turn()
        while (message := self.client.receive()) is not None:
            for output in getattr(message, "outputs", []):
                self.tokens[output.request_id] += unpack_ids(output.token_ids).tolist()
                self.logprobs[output.request_id] += output.logprobs or []
                self.accepted[output.request_id] += output.num_accepted
                self.rejected[output.request_id] += output.num_drafts - output.num_accepted
                if output.prompt_logprobs is not None:
                    assert not output.token_ids and not self.tokens[output.request_id]
                    self.prompt_logprobs[output.request_id].append(output.prompt_logprobs)
                if output.finish_reason is not None:
                    assert output.request_id not in self.last, "a request ended twice"
                    self.last[output.request_id] = output

    def run(self, max_turns: int = 20_000) -> None:
        """Turn until every request ended; then every owner must be clean."""
        for _ in range(max_turns):
            self.turn()
            idle = self.core.scheduler.kv.tiers.is_idle(self.clock.now())
            if idle and not self.core.scheduler.has_work and self.prompts.keys() <= self.last.keys():
                break
        else:
            raise AssertionError(f"not finished after {max_turns} turns: {self.prompts.keys() - self.last.keys()}")
        self.core.check()
        assert self.core.scheduler.kv.usage() == (0.0,) * len(self.config.cache.groups)

    def expected(self, request_id: str, num_tokens: int) -> list[int]:
        """What a correct engine answers; ends early where the row fails."""
        prompt = self.prompts[request_id]
        return expected_tokens(self.config, self.requests[request_id], prompt, num_tokens)

    def assert_correct(self, request_id: str) -> None:
        """The answer equals the oracle's, token by token."""
        answer = self.tokens[request_id]
        assert answer == self.expected(request_id, len(answer)), request_id
