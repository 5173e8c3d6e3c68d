"""Whole replicas of DeepSeek V4 under random schedules: every answer must be the one that its prompt has.

Requests share prefixes, continue earlier turns, are preempted and aborted, and resumed from the device, from host
memory and from a disk; tokens are drafted; workers die, and replicas are started again over the disk. Each life of a
worker begins with pages full of NaN, and blocks that are given back without content become NaN again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pypto_serving.backend.base import SamplingInputs, StepInputs, StepOutput
from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.backend.numpy_sampler import PlainSampler, uniforms
from pypto_serving.kernels import runnable
from pypto_serving.kv.group import ResumePoints
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.types.arrays import Float32Array, unpack_ids
from pypto_serving.types.config import EngineConfig, NgramConfig
from pypto_serving.types.kv import RecentSpec, max_live_blocks, resume_step
from pypto_serving.types.request import ClearCache
from pypto_serving.types.sampler import DRAW
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits, NewRow, StepPlan
from pypto_serving.types.tier import Tier, TierConfig, Transfers
from pypto_serving.worker.batch import RowBatch
from tests.checkpoints import make_checkpoint, random_model
from tests.configs import change_config, make_config
from tests.deepseek_v4 import FAST as FAST_MODEL
from tests.deepseek_v4 import check_greedy
from tests.model.sequences import Sequences, poison
from tests.quantised import quantise_deepseek
from tests.simulation import Simulation


@dataclass(frozen=True)
class Subject:
    """A kind of checkpoint in one arithmetic, and traffic of up to `longest` prompt and `output` tokens.

    `steps` are token budgets to choose from; `interval` is the distance of common checkpoints in tokens; `changes` are
    those to the kind's config; `form` is how weights are quantised, if they are.
    """

    kind: str
    dtype: str
    longest: int
    output: int
    steps: tuple[int, ...]
    interval: int
    requests: int
    changes: dict[str, Any]
    form: str = ""

    @property
    def native(self) -> bool:
        return self.dtype == "bfloat16"


FAST: dict[str, Any] = {"kind": "deepseek_v4_fast", "longest": 70, "interval": 32}
RELEASED: dict[str, Any] = {"kind": "deepseek_v4", "longest": 600, "interval": 256}
SMALL: dict[str, Any] = {"n_routed_experts": 4, "hc_sinkhorn_iters": 2, "num_hidden_layers": 3}
TORCH_FAST: dict[str, Any] = {"dtype": "float32", "changes": SMALL | {"layer_types": FAST_MODEL["layer_types"][:3]}}
TORCH: dict[str, Any] = {"dtype": "float32", "changes": SMALL | {"compress_ratios": [0, 4, 128, 0]}}
NATIVE: dict[str, Any] = {"dtype": "bfloat16", "changes": {"o_lora_rank": 32}}
SUBJECTS = {
    "torch": Subject(**FAST, **TORCH_FAST, output=14, steps=(7, 16, 64, 120), requests=10),
    "native": Subject(**FAST, **NATIVE, output=24, steps=(7, 16, 64, 120), requests=18),
    "torch, ratios 4 and 128": Subject(**RELEASED, **TORCH, output=10, steps=(60, 128, 300, 700), requests=8),
    "native, ratios 4 and 128": Subject(**RELEASED, **NATIVE, output=16, steps=(60, 128, 300, 700), requests=14),
}
"""In torch, steps are slow: one layer of each kind, and less traffic than in the kernels."""

MAX_NUM_SEQS = 6
DEPTH = 2
MAX_DRAFTS = 4
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
"""Those of requests, by kind."""
SEED, TOP_P = 11, 0.9

Prompt = tuple[int, ...]


class Answer(NamedTuple):
    """Tokens, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class KnowingProgram:
    """A program that was loaded for more blocks and longer steps than `config` has, in virtual time.

    Its draft layer computes, but most of the time what is said in `answers` becomes the draft.
    """

    ODDS = 0.7
    SURE = 50.0
    """So much higher than all others is the logit of a token that is drawn for certain."""

    def __init__(self, program: Any, config: EngineConfig, answers: Mapping[tuple[Prompt, str], Answer]) -> None:
        self._program = program
        self.groups, self.num_blocks, self.limits = config.cache.groups, config.cache.num_blocks, config.limits
        self.fingerprint, self.memory, self.sampler = program.fingerprint, program.memory, program.sampler
        self.draft = self._draft if config.drafts_in_model else None
        self._texts = [[*prompt, *answer.tokens] for (prompt, _), answer in answers.items()]
        self._rng = random.Random(3)

    def attach(self, batch: RowBatch) -> None:
        """Learn what tokens rows have from the `batch` of the worker."""
        self._tokens = batch.tokens

    def _draft(self, inputs: StepInputs) -> Float32Array:
        found = self._program.draft(inputs).copy()
        for i, (row, end) in enumerate(zip(inputs.rows.tolist(), inputs.context_lens.tolist(), strict=True)):
            history = self._tokens[row, :end].tolist()
            text = next((text for text in self._texts if len(text) > end and text[:end] == history), None)
            if text is not None and self._rng.random() < self.ODDS:
                found[i, text[end]] = found[i].max() + self.SURE
        return np.asarray(found)

    def submit(self, inputs: StepInputs, sampling: SamplingInputs | None) -> None:
        self._program.submit(inputs, sampling)
        self._elapsed_s = 1e-3 + 1e-4 * len(inputs.token_ids)

    def collect(self) -> StepOutput:
        return StepOutput(logits=self._program.collect().logits, virtual_s=self._elapsed_s)


@dataclass
class Oracle:
    """Prompts of which many share a beginning, and the answer to each, by its kind.

    Greedy answers of the torch program are those of transformers; all others, those that a program gives to each prompt
    without an engine.
    """

    subject: Subject
    model: Path
    answers: dict[tuple[Prompt, str], Answer] = field(default_factory=dict)

    @classmethod
    def make(cls, subject: Subject, folder: Path) -> Oracle:
        oracle = cls(subject, make_checkpoint(folder / "v4", subject.kind, subject.dtype, **subject.changes))
        if subject.form:
            quantise_deepseek(oracle.model, subject.form)
        rng, longest, size = random.Random(5), subject.longest, load_spec(oracle.model).kv_groups[0].block_size
        families = [rng.choices(range(256), k=longest) for _ in range(2)]
        prompts = []
        for family in families * 4:
            shared = family[: rng.randrange(longest // 4, longest * 3 // 4)]
            own = -(len(shared) + rng.randrange(1, 6)) % size  # the answer goes on in the next block
            prompts.append([*shared, *rng.choices(range(256), k=own)])
        oracle.answer([*prompts, *families])
        said = ([*prompt, *oracle.answers[tuple(prompt), "greedy"].tokens] for prompt in prompts)
        turns = [[*each, *rng.choices(range(256), k=3)] for each in said]
        oracle.answer([turn for turn in turns if len(turn) <= longest])
        assert len({tuple(answer.tokens) for answer in oracle.answers.values()}) > len(oracle.answers) // 2
        return oracle

    def answer(self, prompts: Sequence[Sequence[int]]) -> None:
        """Note what the answers to `prompts` are."""
        for kind in TEMPERATURES:
            if self.subject.native:
                answers = [self._alone([prompt], kind)[0] for prompt in prompts]
            else:
                answers = self._alone(prompts, kind)
            self.answers |= {(tuple(prompt), kind): answer for prompt, answer in zip(prompts, answers, strict=True)}
        if not self.subject.native:
            model = random_model(self.subject.kind, **self.subject.changes)
            greedy = [self.answers[tuple(prompt), "greedy"].tokens for prompt in prompts]
            check_greedy(model, [list(prompt) for prompt in prompts], greedy)

    def _alone(self, prompts: Sequence[Sequence[int]], kind: str) -> list[Answer]:
        """What the program makes of all prompts at once; each token is drawn with the number of its position."""
        sampler, values = self.program.sampler or PlainSampler(), list[float]()
        draw = np.array([(0.0, TOP_P, 0.0, TEMPERATURES[kind], 0)], DRAW)

        def choose(logits: Float32Array, position: int) -> int:
            draw["random"] = uniforms(*(np.array([value], np.uint64) for value in (SEED, 0, position)))
            tokens = sampler.choose(logits[None], draw)
            values.append(float(sampler.logprobs(logits[None], np.zeros(1, np.int32), tokens, 0).values[0]))
            return int(tokens[0])

        found = Sequences(self.program).continued(prompts, self.subject.output, choose)
        return [Answer(tokens, values[i :: len(prompts)]) for i, tokens in enumerate(found)]

    @property
    def tolerance(self) -> float:
        """Of log-probabilities."""
        return 0.0 if self.subject.native else 1e-4

    @property
    def prompts(self) -> list[Prompt]:
        return list(dict.fromkeys(prompt for prompt, _ in self.answers))

    @cached_property
    def program(self) -> Any:
        """Loaded once, with pages for the largest configuration."""
        return CpuBackend(self.largest).prepare(lambda *_: None)

    @cached_property
    def largest(self) -> EngineConfig:
        spec = load_spec(self.model, Serving(self.subject.dtype, drafts=True))
        budget = max(self.subject.steps)
        groups, total = spec.kv_groups, self.subject.longest + self.subject.output
        return make_config(
            model=str(self.model),
            backend="cpu",
            dtype=self.subject.dtype,
            vocab_size=spec.vocab_size,
            groups=groups,
            num_blocks=tuple(1 + 2 * MAX_NUM_SEQS * live for live in max_live_blocks(groups, total, DEPTH * budget)),
            max_model_len=total,
            num_threads=1,
            kernels=runnable()[0] if self.subject.native else "torch",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            traits=BackendTraits(max_drafts=MAX_DRAFTS),
            num_drafts=MAX_DRAFTS,
        )

    def config(self, rng: random.Random, tiers: tuple[TierConfig, ...], most: float) -> EngineConfig:
        """Steps of any size; room for the history of one to `most` long sequences, and the rest of more."""
        budget, depth = rng.choice(self.subject.steps), rng.randint(1, DEPTH)
        groups = self.largest.cache.groups
        live = zip(groups, max_live_blocks(groups, self.largest.limits.max_model_len, depth * budget), strict=True)
        room = {True: rng.uniform(1.0, most), False: 2.5}
        return change_config(
            self.largest,
            num_blocks=tuple(2 + int(blocks * room[group.keeps_history]) for group, blocks in live),
            max_num_batched_tokens=budget,
            depth=depth,
            kv_store=rng.choice(("through", "eviction")),
            tiers=tiers,
            num_drafts=rng.choice((0, 1, MAX_DRAFTS)),
            ngram=rng.choice((None, NgramConfig(shortest=1))),
        )

    def make_program(self, config: EngineConfig) -> Any:
        """The one program with pages of NaN, as a worker of `config` would have it."""
        poison(self.program, [range(count) for count in self.largest.cache.num_blocks])
        return KnowingProgram(self.program, config, self.answers)

    def tiers(self, names: Sequence[Tier], disk: Path) -> tuple[TierConfig, ...]:
        """Host memory for some five sequences and twenty checkpoints, a disk for three times as much."""
        whole, groups = self.largest.limits.max_model_len, self.largest.cache.groups
        step = resume_step(groups)
        slots = [
            max(1, 20 * group.resume_blocks(step)) if isinstance(group, RecentSpec) else 5 * whole // group.block_size
            for group in groups
        ]
        known = {
            "host": TierConfig(tier="host", size_bytes=0, num_slots=tuple(slots)),
            "disk": TierConfig(
                tier="disk", size_bytes=1 << 30, num_slots=tuple(3 * count for count in slots), place=str(disk)
            ),
        }
        return tuple(known[name] for name in names)


class Resumptions:
    """Where requests were resumed, by the tier that the tails of windows and states came from: `counts`.

    Of positions, common checkpoints and ends of prompts are told apart. Watches what a simulation's executor is sent.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.counts: Counter[str] = Counter()
        self._points = ResumePoints(simulation.config.cache.groups)
        self._tails = [group for group in simulation.core.scheduler.kv.groups if not group.keeps_history]
        self._simulation = simulation
        self._loaded: dict[tuple[int, int], Tier] = {}
        self._epoch = 0
        executor = simulation.executor
        executor.send_plan = self._before(executor.send_plan, self._see_plan)
        executor.send_transfers = self._before(executor.send_transfers, self._see_transfers)

    def _before(self, function: Callable[[Any], None], see: Callable[[Any], None]) -> Callable[[Any], None]:
        def both(message: Any) -> None:
            if self._epoch != self._simulation.executor.epoch:
                self._epoch = self._simulation.executor.epoch
                self._loaded.clear()
            see(message)
            function(message)

        return both

    def _see_transfers(self, transfers: Transfers) -> None:
        for job in transfers.jobs:
            if job.kind == "load":
                places = zip(unpack_ids(job.groups).tolist(), unpack_ids(job.blocks).tolist(), strict=True)
                self._loaded |= dict.fromkeys(places, job.tier)

    def _see_plan(self, plan: StepPlan) -> None:
        for row in plan.new_rows:
            if row.num_computed:
                self._see_resumed(row)
        for g, added in enumerate(plan.new_blocks):
            for block in unpack_ids(added).tolist()[1::2]:
                self._loaded.pop((g, block), None)

    def _see_resumed(self, row: NewRow) -> None:
        """A request goes on at a boundary, with the tails that this needs and null blocks before them."""
        position = row.num_computed
        assert self._points.last(position) == position
        came: set[Tier] = set()
        for group in self._tails:
            table, needed = unpack_ids(row.blocks[group.index]).tolist(), group.needed(position)
            assert not any(table[: needed.start]) and all(table[needed.start : needed.stop])
            came |= {self._loaded.pop((group.index, table[i]), "device") for i in needed}
        assert came
        ends = {self._points.last(len(prompt)) for prompt in self._simulation.prompts.values()}
        for tier in came:
            self.counts[tier] += 1
            self.counts[f"{tier}, common checkpoint"] += position % self._points.interval == 0
            self.counts[f"{tier}, end of a prompt"] += position in ends
            self.counts[f"{tier}, within an answer"] += len(row.token_ids) // 4 > row.prompt_len


class Poisoner:
    """Makes free blocks that hold nothing NaN, once no step that was planned before they came free can read them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._empty: list[set[int]] | None = None
        self._last_step = 0

    def turn(self) -> None:
        """To be called after each turn of the simulation."""
        executor = self._simulation.executor
        pools = [group.pool for group in self._simulation.core.scheduler.kv.groups]
        empty = [set(pool._empty) for pool in pools]
        if self._empty is not None:
            self._empty = [before & now for before, now in zip(self._empty, empty, strict=True)]
        if executor._completed_step >= self._last_step and executor._runner is not None:
            if self._empty is not None:
                poison(executor._runner.program, [sorted(blocks) for blocks in self._empty])
            self._empty = empty
            self._last_step = executor.plans[-1].step_id if executor.plans else 0


Unanswered = tuple[list[int], int, str]
"""A request without a whole answer: its prompt, how many tokens it asks for, and its kind."""


class Client:
    """Sends random requests to a replica and knows what the answers are: every other one is greedy.

    If it `hurries`, requests come together, and their answers need a block more than their prompts. `wanted`: by the
    name of a request, its kind and how many tokens it asks for.
    """

    def __init__(self, oracle: Oracle, simulation: Simulation, rng: random.Random, hurries: bool) -> None:
        self.oracle, self.simulation, self.rng, self.hurries = oracle, simulation, rng, hurries
        self.wanted: dict[str, tuple[str, int]] = {}
        self.aborted: set[str] = set()
        self._poisoner = Poisoner(simulation)

    def send(self, prompt: Sequence[int], length: int, kind: str = "") -> None:
        """One in three asks for log-probabilities."""
        kind = kind or list(TEMPERATURES)[len(self.wanted) % 2]
        logprobs = None if len(self.wanted) % 3 else 0
        params = SamplingParams(
            temperature=TEMPERATURES[kind], top_p=TOP_P, max_tokens=length, ignore_eos=True, logprobs=logprobs
        )
        self.wanted[self.simulation.add(prompt, params=params, seed=SEED)] = kind, length

    def send_some(self, count: int) -> None:
        """One after the other, with turns between them; some are aborted."""
        rng, longest, size = self.rng, self.oracle.subject.output, self.simulation.config.cache.groups[0].block_size
        prompts = [p for p in self.oracle.prompts if not self.hurries or -len(p) % size < longest]
        for _ in range(count):
            self.send(rng.choice(prompts), longest if self.hurries else rng.randint(1, longest))
            for _ in range(rng.randrange(2 if self.hurries else 8)):
                self.turn()
            if self.simulation.config.cache.tiers and rng.random() < 0.3:
                self.simulation.client.send(ClearCache(("device",)))
            if rng.random() < 0.1:
                self.aborted.add(last := list(self.wanted)[-1])
                self.simulation.abort(last)

    def turn(self) -> None:
        self.simulation.turn()
        self._poisoner.turn()

    def unanswered(self) -> list[Unanswered]:
        """Requests that have no whole answer."""
        left = ((name, *wanted) for name, wanted in self.wanted.items() if name not in self.simulation.last)
        return [(self.simulation.prompts[name], length, kind) for name, kind, length in left]

    def check(self, ended: bool) -> None:
        """Whatever was said is right; if all `ended`, all was said."""
        simulation = self.simulation
        for output in simulation.last.values():
            assert output.fault is None, output.fault
        for request_id, (kind, length) in self.wanted.items():
            found = simulation.tokens[request_id]
            answer = self.oracle.answers[tuple(simulation.prompts[request_id]), kind]
            assert found == answer.tokens[: len(found)], request_id
            assert not ended or request_id in self.aborted or len(found) == length
            values = [each.logprob for each in simulation.logprobs[request_id]]
            asked = simulation.requests[request_id].params.logprobs is not None
            assert len(values) == asked * len(found)
            assert values == pytest.approx(answer.logprobs[: len(values)], rel=0, abs=self.oracle.tolerance)

    def drafts(self) -> Counter[str]:
        """How many drafts were accepted and rejected, by the kind of the request."""
        counts: Counter[str] = Counter()
        for request_id, (kind, _) in self.wanted.items():
            counts[f"accepted drafts, {kind}"] += self.simulation.accepted[request_id]
            counts[f"rejected drafts, {kind}"] += self.simulation.rejected[request_id]
        return counts


@dataclass(frozen=True)
class Schedule:
    """A seed, what happens under it, and the tiers of the replica."""

    seed: int
    tiers: tuple[Tier, ...] = ()
    crowded: bool = False
    dies: bool = False
    restarts: bool = False


def run_schedule(oracle: Oracle, schedule: Schedule, disk: Path) -> Counter[str]:
    """Random traffic in random steps, in one life of the replica or two. Returns how often what happened."""
    rng = random.Random(repr(schedule))
    tiers = oracle.tiers(schedule.tiers, disk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pypto_serving.kv.group.CHECKPOINT_TOKENS", oracle.subject.interval)
        counts, unanswered = _live(oracle, schedule, rng, tiers, [], ends=not schedule.restarts)
        if schedule.restarts:
            counts = Counter({f"before a restart: {name}": count for name, count in counts.items()})
            counts += _live(oracle, schedule, rng, tiers, unanswered, ends=True)[0]
    return counts


def _live(
    oracle: Oracle,
    schedule: Schedule,
    rng: random.Random,
    tiers: tuple[TierConfig, ...],
    unanswered: list[Unanswered],
    ends: bool,
) -> tuple[Counter[str], list[Unanswered]]:
    """One life of a replica. If it `ends`, all requests do, else it is over at some point. Returns what is left.

    With draft layers, one that ends goes on until drafts were accepted and rejected.
    """
    config = oracle.config(rng, tiers, most=1.2 if schedule.crowded else 1.6)
    simulation = Simulation(config, make_program=oracle.make_program)
    executor, resumptions = simulation.executor, Resumptions(simulation)
    executor.delay = lambda: rng.choice((0, 0, 1, 3))
    executor.transfer_s = rng.choice((1e-2, 1e-5, 1e-5))  # computing may be faster, and mostly is not
    deaths = [rng.randrange(1, 12), rng.randrange(12, 40)] if schedule.dies else []  # at the third a request fails
    executor.die_if = lambda plan: executor.num_deaths < len(deaths) and plan.step_id >= deaths[executor.num_deaths]
    client = Client(oracle, simulation, rng, hurries=schedule.crowded)
    for each in unanswered:
        client.send(*each)
    client.send_some(oracle.subject.requests)
    if ends:
        simulation.run()
        while config.drafts_in_model and not (simulation.accepted.total() and simulation.rejected.total()):
            client.send(rng.choice(oracle.prompts), oracle.subject.output)
            simulation.run()
    client.check(ended=ends)
    executor.stop()
    resumptions.counts["preemptions"] += simulation.counters.num_preemptions
    resumptions.counts["deaths"] += executor.num_deaths
    resumptions.counts["draft layers"] += config.drafts_in_model
    resumptions.counts.update(client.drafts())
    return resumptions.counts, client.unanswered()
