"""The null backend in the shape of every device, under random schedules: each answer is the oracle's, bit by bit.

A shape is a choice of traits, depth, drafts, memory, groups and tiers. The shapes cover all pairs of choices; counters
prove that what a shape is about has happened.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.backend.null.device import SAMPLER, logits_of, next_digest
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.config import NgramConfig
from pypto_serving.types.kv import max_live_blocks, publication_lag
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits
from pypto_serving.types.tier import TierConfig
from tests.kv.tiered import GROUP_SETS, hits, prompt
from tests.sched.scores import assert_prompt_logprobs, is_sound
from tests.simulation import VOCAB_SIZE, Simulation, in_pages, null_config
from tests.thinning import covering

FACTORS: dict[str, tuple[Any, ...]] = {
    "groups": ("plain", "all kinds", "deepseek_v4"),
    "samples_on_device": (False, True),
    "mixed_steps": (True, False),
    "padded_rows": ((), (2, 3, 6)),
    "chunk_tokens": (1, 8),
    "page_tokens": (0, 128),
    "num_drafts": (0, 1, 3),
    "spare_drafts": (0, 2),
    "depth": (1, 2, 3),
    "device_memory": (False, True),
    "disk": (False, True),
    "kv_store": ("through", "eviction"),
    "fails_on": (-1, 7),
    "budget": (64, 16),
    "stages": (1, 2, 3),
}
Shape = Mapping[str, Any]


def all_pairs(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Shape]:
    """Shapes that together hold every pair of choices of two factors, chosen greedily."""
    rng, names = random.Random(seed), list(factors)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    shapes: list[Shape] = []
    while left:
        candidates = [{name: rng.randrange(len(factors[name])) for name in names} for _ in range(200)]
        best = max(candidates, key=lambda each: len(left & set(itertools.combinations(each.items(), 2))))
        left -= set(itertools.combinations(best.items(), 2))
        shapes.append({name: factors[name][index] for name, index in best.items()})
    return shapes


SHAPES = all_pairs(FACTORS)
FEW_OF_HISTORY = (14, 4, 4, 60, 70, 70)
"""Pools of DeepSeek V4 whose history runs out before windows, for which admission keeps room: else nobody preempts."""
DRAFTS = {f"{fate} drafts, {kind}" for fate in ("committed", "rejected") for kind in ("greedy", "sampled")}
FEW_TOKENS = 3
"""A vocabulary in which texts repeat by chance."""
SPARE_BLOCKS = (2, 10)
"""Blocks of 128 tokens beside those of one sequence: few, so that requests preempt each other, or some to keep."""


def replica(shape: Shape, disk: Path, spare: int = SPARE_BLOCKS[0]) -> Simulation:
    """A replica of this shape with little memory, over a host tier and perhaps a disk."""
    groups, num_blocks, num_slots = GROUP_SETS[shape["groups"]]
    if shape["groups"] == "deepseek_v4":
        num_blocks = FEW_OF_HISTORY
    if size := shape["page_tokens"]:
        num_slots = tuple(max(4, n * g.block_size // size) for n, g in zip(num_slots, groups, strict=True))
        groups = in_pages(groups, size)
        step_tokens = shape["budget"] * shape["depth"] + publication_lag(groups)
        num_blocks = tuple(blocks + 1 + spare for blocks in max_live_blocks(groups, 256, step_tokens))
    tiers = [TierConfig(tier="host", size_bytes=0, num_slots=num_slots)]
    if shape["disk"]:
        slots = tuple(4 * count for count in num_slots)
        tiers.append(TierConfig(tier="disk", size_bytes=1 << 30, num_slots=slots, place=str(disk)))
    max_drafts = shape["num_drafts"] + shape["spare_drafts"]
    looked_up: dict[str, Any] = {"vocab_size": FEW_TOKENS} if shape.get("ngram") else {}
    if shape.get("ngram"):
        looked_up["ngram"] = NgramConfig(shortest=1)
    names = ("samples_on_device", "mixed_steps", "padded_rows", "chunk_tokens", "page_tokens", "stages")
    config = null_config(
        groups,
        num_blocks,
        tiers=tuple(tiers),
        max_num_seqs=6,
        max_num_batched_tokens=shape["budget"],
        traits=BackendTraits(**{name: shape[name] for name in names}, max_drafts=max_drafts),
        num_drafts=shape["num_drafts"],
        depth=shape["depth"],
        **looked_up,
        kv_store=shape["kv_store"],
        backend_options={
            "seconds_per_step": 0.01,
            "device_memory": shape["device_memory"],
            "draft_accuracy": 0.6,
            "fails_on": shape["fails_on"],
        },
    )
    return Simulation(config)


def random_params(rng: random.Random, scores: bool, vocab_size: int) -> SamplingParams:
    """Half of the requests are plain; the others ask for everything that a sampler may be asked for.

    Only if the replica `scores` prompts, their log-probabilities are asked for.
    """
    some, max_tokens = rng.choices(range(vocab_size), k=5), rng.randrange(1, 60) if rng.random() < 0.9 else 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 0.0, 0.7, 3.0)),
        top_k=rng.choice((0, 0, 4)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)),
        min_tokens=min(max_tokens, rng.choice((0, 0, 1))),
        stop_token_ids=tuple(some[:2]) if vocab_size == VOCAB_SIZE or rng.random() < 0.2 else (),
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((None, 0, 2)) if scores and rng.random() < 0.3 else None,
        logit_bias={some[2]: 100.0, some[3]: -100.0} if rng.random() < 0.3 else {},
        allowed_token_ids=tuple(rng.choices(range(vocab_size), k=40)) if rng.random() < 0.2 else None,
        **random_penalties(random.Random(some[0]), some),
    )


def random_penalties(rng: random.Random, some: Sequence[int]) -> dict[str, Any]:
    """What looks back at the tokens of the row, for a third of the requests."""
    if rng.random() < 0.67:
        return {}
    return {
        "repetition_penalty": rng.choice((0.01, 1.0, 1.3)),
        "frequency_penalty": rng.choice((-2.0, 0.0, 0.6)),
        "presence_penalty": rng.choice((-1.0, 0.0, 2.0)),
        "bad_word_ids": rng.choice(((), ((some[2],), (some[3], some[4])))),
    }


def churn(simulation: Simulation, rng: random.Random, num_requests: int) -> Counter[str]:
    """Random traffic, deaths and aborts; then every answer must be the oracle's. Returns what happened."""
    executor, vocab_size, found = simulation.executor, simulation.config.model.vocab_size, Counter[str]()
    executor.delay = lambda: rng.choice((0, 0, 1, 3, 9))
    executor.die_if = lambda plan: rng.random() < 0.02 and executor.num_deaths < 2  # at the third a request fails
    for _ in range(num_requests):
        params = random_params(rng, simulation.config.limits.max_prompt_logprobs > 0, vocab_size)
        tokens = [token % vocab_size for token in prompt(rng)]
        request_id = simulation.add(tokens, params=params, seed=rng.getrandbits(60))
        for _ in range(rng.randrange(0, 12)):
            simulation.turn()
            found[f"{simulation.core.scheduler.num_in_flight} in flight"] += 1
        simulation.core.check()
        if rng.random() < 0.1:
            simulation.abort(request_id)
    executor.die_if = lambda plan: False
    simulation.run()
    for request_id, output in simulation.last.items():
        found[output.finish_reason or ""] += 1
        found["unsampled"] += output.finish_reason == "length" and not output.token_ids
        found["scored"] += len(simulation.prompt_logprobs[request_id])
        kind = "sampled" if simulation.requests[request_id].params.temperature else "greedy"
        found[f"committed drafts, {kind}"] += simulation.accepted[request_id]
        found[f"rejected drafts, {kind}"] += simulation.rejected[request_id]
        assert_answer(simulation, request_id)
    for program in executor.programs:
        found.update(program.counts)
    counters = simulation.counters
    found["preemptions"] += counters.num_preemptions
    found["committed_drafts"] += counters.num_accepted
    found["rejected_drafts"] += counters.num_drafts - counters.num_accepted
    found["deaths"] += executor.num_deaths
    found.update({f"{tier}_hits": count for tier, count in hits(simulation).items()})
    stats = simulation.core.stats().tiers
    found["stores"] += sum(tier.stored_blocks for tier in stats)
    found["beyond_a_page"] += sum(len(simulation.prompts[r]) + len(t) > 128 for r, t in simulation.tokens.items())
    return found


def assert_answer(simulation: Simulation, request_id: str) -> None:
    """Tokens, log-probabilities and the reason of the end are those of the oracle."""
    answer, output = simulation.tokens[request_id], simulation.last[request_id]
    params = simulation.requests[request_id].params
    simulation.assert_correct(request_id)
    match output.finish_reason:
        case "error":
            assert output.fault is not None and output.fault.code == "not_finite", output.fault
            assert len(simulation.expected(request_id, len(answer) + 1)) == len(answer) or not is_sound(
                simulation, request_id
            ), "the row was sound"
        case "stop":
            assert answer[-1] in params.stop_token_ids and len(answer) >= params.min_tokens
        case "length":
            longest = simulation.config.limits.max_model_len - len(simulation.prompts[request_id])
            assert len(answer) == min(params.max_tokens or 0, longest)
        case reason:
            assert reason == "abort"
    assert_prompt_logprobs(simulation, request_id)
    values = simulation.logprobs[request_id]
    assert len(values) == (0 if params.logprobs is None else len(answer))
    history = list(simulation.prompts[request_id])
    for token, value in zip(answer, values, strict=False):
        config = simulation.config
        logits = logits_of(next_digest(config.cache.groups, history), config.model.vocab_size)[None]
        one = np.zeros(1, np.int32)
        right = SAMPLER.logprobs(logits, one, np.array([token], np.int32), params.logprobs or 0)
        assert (value.logprob, value.rank) == (float(right.values[0]), int(right.ranks[0]))
        assert unpack_ids(value.top_ids).tolist() == right.best_ids[0].tolist()
        history.append(token)


def must_happen(shape: Shape) -> set[str]:
    """What a shape is about."""
    wanted = {"length", "stop", "deaths", "preemptions", "stores", f"{shape['depth']} in flight"}
    through = shape["kv_store"] == "through"  # else small pools evict blocks before any is stored
    wanted |= {"host_hits"} if through else set()
    wanted |= {"disk_hits"} if shape["disk"] and through else set()
    wanted |= {"beyond_a_page"} if shape["page_tokens"] else set()
    wanted |= {"decode", "prefill"} if not shape["mixed_steps"] else {"decode", "mixed"}
    wanted |= {"padded_rows"} if shape["padded_rows"] else set()
    wanted |= {"cut_chunks"} if shape["chunk_tokens"] > 1 else set()
    wanted |= {"committed_drafts", "rejected_drafts"} if shape["num_drafts"] else set()
    wanted |= {"error"} if shape["fails_on"] >= 0 else set()
    wanted |= ({"read_blocks"} | ({"write_blocks"} if through else set())) if shape["device_memory"] else set()
    wanted |= {"unsampled"} | (set() if shape["samples_on_device"] else {"scored"})
    if shape["samples_on_device"]:
        wanted |= {"random", "biased", "masked", "banned", "penalized", "bad_words", "logprobs"}
        wanted |= {"pending"} if shape["depth"] > 1 and shape["stages"] == 1 else set()
        wanted |= {"moved"} if shape["depth"] > 1 and shape["num_drafts"] and shape["stages"] == 1 else set()
    elif shape["depth"] > 1 and shape["stages"] > 1:
        wanted |= {"overlapping"}
        wanted |= {"overlapping_passes"} if shape["num_drafts"] and not shape.get("ngram") else set()
    return wanted


def name_of(shape: Shape) -> str:
    """The choices of a shape that are not the first of their factor."""
    return (
        " ".join(f"{name}={value}" for name, value in shape.items() if value != FACTORS.get(name, [None])[0]) or "plain"
    )


def assert_shape(shape: Shape, disk: Path) -> None:
    """Every answer is the oracle's, and what the shape is about has happened."""
    rng, found = random.Random(name_of(shape)), Counter[str]()
    for attempt in range(60):
        simulation = replica(shape, disk, SPARE_BLOCKS[attempt % 2])
        found.update(churn(simulation, rng, num_requests=10))
        simulation.executor.stop()
        if all(found[name] for name in must_happen(shape)):
            break
    missing = {name for name in must_happen(shape) if not found[name]}
    assert not missing, f"never happened: {missing}; {found}"


FEW = covering([list(shape.items()) for shape in SHAPES], 1)
"""Shapes that hold each choice; in all of them is each pair."""


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=[] if i in FEW else [pytest.mark.soak]) for i, shape in enumerate(SHAPES)],
    ids=name_of,
)
def test_answers_are_the_oracles_in_every_shape(shape: Shape, memory_disk: Path) -> None:
    assert_shape(shape, memory_disk)


DEVICES: dict[str, Shape] = {
    "a CPU program": {},
    "a pair of compiled programs": {
        "mixed_steps": False,
        "padded_rows": (6,),
        "chunk_tokens": 8,
        "page_tokens": 128,
        "samples_on_device": True,
        "device_memory": True,
        "depth": 2,
    },
    "a captured graph": {"padded_rows": (1, 2, 4, 6), "samples_on_device": True, "device_memory": True, "depth": 3},
    "a model that drafts": {"num_drafts": 3, "samples_on_device": True, "depth": 2},
    "a host that drafts": {"num_drafts": 2, "depth": 2},
    "a pipeline": {"stages": 3, "depth": 3},
    "a pipeline that drafts": {"num_drafts": 2, "stages": 3, "depth": 3},
    "a host that looks drafts up": {"num_drafts": 4, "ngram": True, "depth": 2},
    "a pipeline that looks drafts up": {"num_drafts": 3, "ngram": True, "stages": 3, "depth": 3},
}


def on_every_device() -> list[Any]:
    """Each device with each set of groups; every other device with one set, others in the soak only."""
    return [
        pytest.param(device, groups, marks=[pytest.mark.soak] if i % 2 or (i + j) % 3 else [])
        for i, device in enumerate(DEVICES)
        for j, groups in enumerate(FACTORS["groups"])
    ]


@pytest.mark.parametrize(("device", "groups"), on_every_device())
def test_answers_are_the_oracles_on_every_device(device: str, groups: str, memory_disk: Path) -> None:
    plain = {name: values[0] for name, values in FACTORS.items()}
    assert_shape(plain | DEVICES[device] | {"groups": groups}, memory_disk)


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_many_schedules_in_every_shape(shape: Shape, memory_disk: Path) -> None:
    for seed in range(50):
        simulation = replica(shape, memory_disk / str(seed), SPARE_BLOCKS[seed % 2])
        churn(simulation, random.Random(f"{name_of(shape)} {seed}"), num_requests=25)
        simulation.executor.stop()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("groups", FACTORS["groups"])
def test_many_schedules_with_drafts_that_are_looked_up(groups: str, memory_disk: Path) -> None:
    """More than 500 schedules in all; each has accepted and rejected drafts of greedy and of sampled answers."""
    for seed in range(170):
        rng = random.Random(f"{groups} {seed}")
        names = ("mixed_steps", "padded_rows", "chunk_tokens", "num_drafts", "depth", "disk", "kv_store", "budget")
        shape = {name: rng.choice(values) for name, values in FACTORS.items() if name in (*names, "stages")}
        shape = {name: values[0] for name, values in FACTORS.items()} | shape
        shape |= {"groups": groups, "ngram": True, "num_drafts": rng.randint(1, 5)}
        simulation = replica(shape, memory_disk / str(seed), SPARE_BLOCKS[seed % 2])
        found = churn(simulation, rng, num_requests=25)
        simulation.executor.stop()
        assert all(found[name] for name in DRAFTS), name_of(shape)


def test_the_shapes_cover_all_pairs() -> None:
    assert all({SHAPES[i][name] for i in FEW} == set(values) for name, values in FACTORS.items())
    for a, b in itertools.combinations(FACTORS, 2):
        held = {(shape[a], shape[b]) for shape in SHAPES}
        assert held == set(itertools.product(FACTORS[a], FACTORS[b]))
