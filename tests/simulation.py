"""A replica without processes: engine core, null worker and client in one thread, in virtual time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pypto_serving.backend.base import StepBuffers
from pypto_serving.backend.null import NullBackend, next_token
from pypto_serving.engine.core import EngineCore
from pypto_serving.engine.events import EventPublisher
from pypto_serving.engine.executor import Event, HostMemory, WorkerDown
from pypto_serving.ipc import MemoryChannel
from pypto_serving.model.null.spec import plain_groups
from pypto_serving.store.base import Store
from pypto_serving.store.disk import open_disk
from pypto_serving.store.host import HostStore
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.request import AbortRequests, AddRequests, EngineRequest, FromCore, RequestOutput, ToCore
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import StepPlan, StepResult
from pypto_serving.types.tier import Tier, TransferDone, TransferJob, TransferReport, Transfers
from pypto_serving.types.tokens import pack_ids, unpack_ids
from pypto_serving.util import VirtualClock
from pypto_serving.worker.runner import Runner, hello
from pypto_serving.worker.transfer import Mover

VOCAB_SIZE = 1000


def null_config(
    groups: tuple[KVCacheGroupSpec, ...] = plain_groups(), num_blocks: int | tuple[int, ...] = 64, **changes: Any
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
        "backend_options": {"seconds_per_step": 0.01, "seconds_per_token": 0.001},
    }
    return EngineConfig(**(values | changes))


def in_pages(groups: tuple[KVCacheGroupSpec, ...], block_size: int) -> tuple[KVCacheGroupSpec, ...]:
    """The same groups as on a device whose pages all hold `block_size` tokens."""
    return tuple(msgspec.structs.replace(group, block_size=block_size) for group in groups)


MakeProgram = Callable[[EngineConfig], Any]


def null_program(config: EngineConfig) -> Any:
    """The program of the null backend."""
    return NullBackend(config).prepare(lambda phase, done, total: None)


class InlineExecutor:
    """Runs plans in the core's own thread, one per poll, on a runner that dies when told to.

    Transfers are done after as many polls as `delay` says, in any order, and say that they took `transfer_s`; host
    memory and `stores` outlive the runner.
    """

    def __init__(self, config: EngineConfig, clock: VirtualClock, make_program: MakeProgram) -> None:
        self.config = config
        self.clock = clock
        self._make_program = make_program
        self.epoch = 0
        self.plans: list[StepPlan] = []
        self.num_deaths = 0
        self.num_forgiven = 0
        self.die_if: Callable[[StepPlan], bool] = lambda plan: False
        self.delay: Callable[[], int] = lambda: 0
        self.transfer_s = 0.001
        self.is_stuck: Callable[[TransferJob], bool] = lambda job: False
        self.stores: dict[Tier, Store] = {}
        self._host_memory = HostMemory(config)
        self._sent: list[StepPlan] = []
        self._moving: list[tuple[int, int, TransferJob]] = []
        self._completed_step = 0
        self._runner: Runner | None = None

    def poll(self, now_s: float) -> list[Event]:
        if self._runner is None:
            return [self._start()]
        events: list[Event] = [self._move()] if self._moving else []
        if not self._sent:
            return events
        plan = self._sent.pop(0)
        return [*events, self.kill() if self.die_if(plan) else self._run(plan)]

    def _move(self) -> TransferReport:
        """Do the transfers whose time has come."""
        done, left = [], []
        for delay, after_step, job in self._moving:
            if self.is_stuck(job) or delay > 0 or (job.kind == "load" and after_step > self._completed_step):
                left.append((delay - 1, after_step, job))
                continue
            worked = self._mover.move(job, self._mover.pieces(job))
            done.append(TransferDone(job.job_id, bytes(worked), self.transfer_s))
        self._moving = left
        return TransferReport(self.epoch, done)

    def transfer(self, transfers: Transfers) -> None:
        self._moving += [(self.delay(), transfers.after_step, job) for job in transfers.jobs]

    def _start(self) -> Event:
        self.epoch += 1
        program = self._make_program(self.config)
        self._runner = Runner(program, StepBuffers.in_host_memory(self.config.groups, self.config.limits))
        self._completed_step = 0
        sizes = tuple(arena.shape[1] for arena in program.arenas)
        for tier in self.config.tiers:
            if tier.tier == "host":
                self.stores["host"] = HostStore(self._host_memory.fd, sizes, tier.num_slots)
            elif tier.tier == "disk":
                place = tier.place, program.fingerprint, sizes, tier.num_slots, tier.size_bytes
                self.stores["disk"] = self.stores.get("disk") or open_disk(*place, known=False)
        self._mover = Mover(program.arenas, self.stores)
        inventories = tuple(store.inventory() for tier, store in self.stores.items() if tier != "host")
        return hello(program, self.epoch, 0.0, inventories)

    def _run(self, plan: StepPlan) -> StepResult:
        assert self._runner is not None
        result = self._runner.execute(plan)
        self.clock.advance(result.elapsed_s)
        self._completed_step = plan.step_id
        return result

    def kill(self) -> WorkerDown:
        """End the worker's life; what it was sent is lost."""
        self.num_deaths += 1
        self._runner = None
        self._sent.clear()
        self._moving.clear()
        if "disk" in self.stores:
            self.stores.pop("disk").close()
        return WorkerDown("killed by the test")

    def send(self, plan: StepPlan) -> None:
        assert plan.step_id == (self.plans[-1].step_id + 1 if self.plans else 1)
        self.plans.append(plan)
        self._sent.append(plan)

    def forgive(self) -> None:
        self.num_forgiven += 1

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
        publisher: EventPublisher | None = None,
        make_program: MakeProgram = null_program,
    ) -> None:
        self.config = config
        self.clock = VirtualClock(1.0)
        self.executor = InlineExecutor(config, self.clock, make_program)
        self.client, core_end = MemoryChannel.pair(FromCore, ToCore)
        self.core = EngineCore(config, core_end, self.executor, self.clock, publisher)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, RequestOutput] = {}
        self.prompts: dict[str, list[int]] = {}
        self._ids = itertools.count()

    @property
    def counters(self) -> Any:
        return self.core.scheduler.counters

    def add(self, prompt: Sequence[int], max_tokens: int | None = 8, **changes: Any) -> str:
        """Send a request; returns its id."""
        params = changes.pop("params", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = changes.pop("request_id", None) or f"r{next(self._ids)}"
        self.prompts[request_id] = list(prompt)
        request = EngineRequest(
            request_id=request_id, token_ids=pack_ids(prompt), params=params, arrival_s=self.clock.now(), **changes
        )
        self.client.send(AddRequests([request]))
        return request_id

    def abort(self, *request_ids: str) -> None:
        self.client.send(AbortRequests(list(request_ids)))

    def turn(self) -> None:
        """One turn of the core, then take in what it says."""
        self.core.turn()
        while (message := self.client.receive()) is not None:
            for output in getattr(message, "outputs", []):
                self.tokens[output.request_id] += unpack_ids(output.token_ids).tolist()
                if output.finish_reason is not None:
                    assert output.request_id not in self.last, "a request ended twice"
                    self.last[output.request_id] = output

    def run(self, max_turns: int = 20_000) -> None:
        """Turn until every request ended; then every owner must be clean."""
        for _ in range(max_turns):
            self.turn()
            idle = self.core.scheduler.kv.is_idle(self.clock.now())
            if idle and not self.core.scheduler.has_work and self.prompts.keys() <= self.last.keys():
                break
        else:
            raise AssertionError(f"not finished after {max_turns} turns: {self.prompts.keys() - self.last.keys()}")
        self.core.check()
        assert self.core.scheduler.kv.usage() == (0.0,) * len(self.config.groups)

    def expected(self, request_id: str, num_tokens: int) -> list[int]:
        """What a correct engine answers."""
        history = list(self.prompts[request_id])
        for _ in range(num_tokens):
            history.append(next_token(self.config.groups, history, self.config.vocab_size))
        return history[len(self.prompts[request_id]) :]

    def assert_correct(self, request_id: str) -> None:
        """The answer equals the oracle's, token by token."""
        answer = self.tokens[request_id]
        assert answer == self.expected(request_id, len(answer)), request_id
