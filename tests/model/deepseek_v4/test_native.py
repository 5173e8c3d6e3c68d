"""DeepSeek V4 on the kernels: no further from float32 than torch in bfloat16 is, and the same in every company."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.registry import Serving, read_config
from tests.model.conftest import MakeCheckpoint
from tests.model.neighbours import Subject, Subjects, assert_same, random_tokens, run_among_others
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels

pytestmark = needs_kernels

SIZES: dict[str, dict[str, Any]] = {
    "fast": {"kind": "deepseek_v4_fast"},
    "heads": {
        "kind": "deepseek_v4_fast",
        "num_attention_heads": 40,
        "head_dim": 64,
        "o_groups": 4,
        "index_n_heads": 40,
    },
    "released": {"kind": "deepseek_v4"},
}
"""The last has a window of 128 and ratios 4 and 128. All choose 8 or 16 entries of the many that a prompt has."""

BLOCKS = 600
PROMPT, OUTPUT = 330, 5
ROOM = 1.1
TOKENS = random_tokens(0, PROMPT + OUTPUT)


def load(make: MakeCheckpoint, kernels: str, sizes: str = "fast", threads: int = 1, dtype: str = "bfloat16") -> Any:
    path = make(dtype="bfloat16", o_lora_rank=32, **SIZES[sizes])
    return load_program(path, dtype, num_blocks=BLOCKS, max_model_len=2304, threads=threads, kernels=kernels)


def logits_of(program: Any, tokens: Array, chunks: list[int], everywhere: bool = False) -> Array:
    """Logits [n, vocab] at the end of each chunk, or at all positions."""
    sequence = (sequences := Sequences(program)).add(tokens)
    sequences.run(sequence, chunks, everywhere)
    return np.stack([sequence.logits[position] for position in sorted(sequence.logits)])


LENGTHS = {"fast": 150, "heads": 150, "released": 330, "long": 2100}
"""Tokens of the sequences whose errors are measured; `long` is one of the `released` sizes."""


@dataclass(frozen=True)
class Exact:
    """Sequences, their logits in float32, and the mean errors of torch in bfloat16, at all positions."""

    tokens: list[Array]
    logits: list[Array]
    errors: list[Array]


@pytest.fixture(scope="module")
def exact(checkpoint: MakeCheckpoint) -> Callable[[str], Exact]:
    @functools.cache
    def make(case: str) -> Exact:
        sizes, length = case if case in SIZES else "released", LENGTHS[case]
        tokens = [random_tokens(seed, length) for seed in range(1 if case == "long" else 3)]
        programs = [load(checkpoint, "torch", sizes, dtype=dtype) for dtype in ("float32", "bfloat16")]
        wanted, rounded = ([logits_of(p, each, [length], everywhere=True) for each in tokens] for p in programs)
        return Exact(tokens, wanted, [np.abs(x - y).mean(axis=1) for x, y in zip(rounded, wanted, strict=True)])

    return make


@pytest.mark.thinned(1)
@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("kernels", runnable())
def test_errors_are_those_of_bfloat16(
    checkpoint: MakeCheckpoint, exact: Callable[[str], Exact], kernels: str, case: str
) -> None:
    """At the median position: where rounding changes a choice of experts, by chance, errors are large for either."""
    found, chunk = exact(case), 1 if kernels == runnable()[0] and case != "long" else 7
    program = load(checkpoint, kernels, case if case in SIZES else "released")
    ours, theirs = [], []
    for tokens, wanted, errors in zip(found.tokens, found.logits, found.errors, strict=True):
        ends = [*range(chunk - 1, len(tokens), chunk)]
        logits = logits_of(program, tokens, [chunk] * len(ends))
        ours.append(float(np.median(np.abs(logits - wanted[ends]).mean(axis=1))))
        theirs.append(float(np.median(errors[ends])))
    assert np.mean(ours) < ROOM * np.mean(theirs), (ours, theirs)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("expert", [-1, 8, 1 << 32])
@pytest.mark.parametrize("kernels", [*runnable()[:1], "torch"])
def test_a_table_that_names_no_expert_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, kernels: str, expert: int
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(checkpoint(dtype="bfloat16", o_lora_rank=32, **SIZES["fast"]), path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("gate.tid2eid"))
    tensors[name][3, 1] = expert
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"{name} holds {expert}, but must hold ids from 0 to 7"):
        load_program(path, "bfloat16", num_blocks=BLOCKS, kernels=kernels)


@pytest.fixture(scope="module")
def subjects(checkpoint: MakeCheckpoint) -> Subjects:
    @functools.cache
    def make(sizes: str, kernels: str, threads: int = 1) -> Subject:
        program = load(checkpoint, kernels, sizes, threads)
        sequence = (sequences := Sequences(program)).add(TOKENS)
        sequences.run(sequence, [PROMPT, *[1] * OUTPUT])
        return Subject(program, dict(sequence.logits))

    return make


@pytest.fixture(params=SIZES)
def subject(request: pytest.FixtureRequest, subjects: Subjects) -> Subject:
    return subjects(request.param, runnable()[0])


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunk_sizes(subject: Subject, chunk: int) -> None:
    sequence = (sequences := Sequences(subject.program, seed=1)).add(TOKENS)
    sequences.run(sequence, [chunk] * (PROMPT // chunk))
    sequences.run(sequence, [PROMPT - sequence.computed] if sequence.computed < PROMPT else [])
    sequences.run(sequence, [1] * OUTPUT)
    assert_same(sequence.logits, subject.alone)


def among_others(program: Any, others: int, chunks: list[int], seed: int) -> dict[int, Array]:
    return run_among_others(program, others, chunks, seed, TOKENS, longest=400)


def test_a_mixed_batch(subject: Subject) -> None:
    chunks = [60, 1, 30, 43, 196, *[1] * OUTPUT]
    assert_same(among_others(subject.program, 12, chunks, seed=2), subject.alone)


def test_two_thousand_tokens(subjects: Subjects) -> None:
    """Of 525 entries 16 are chosen."""
    tokens, found = random_tokens(7, 2100), []
    for chunks in ([2000, 100], [333] * 7, [1000, *[5] * 20, 500, 500]):
        found.append(logits_of(subjects("released", runnable()[0]).program, tokens, chunks)[-1])
    assert np.isfinite(found[0]).all()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@pytest.mark.parametrize("sizes", ["fast", "released"])
@pytest.mark.parametrize("kernels", runnable()[1:])
def test_other_instruction_sets(subjects: Subjects, kernels: str, sizes: str) -> None:
    subject = subjects(sizes, kernels)
    assert_same(among_others(subject.program, 8, [170, 160, *[1] * OUTPUT], seed=5), subject.alone)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads(subjects: Subjects, threads: int) -> None:
    alone, other = subjects("heads", runnable()[0]).alone, subjects("heads", runnable()[0], threads)
    assert_same(other.alone, alone)
    assert_same(among_others(other.program, 8, [200, 130, *[1] * OUTPUT], seed=6), alone)


def test_preemption_and_other_blocks(subject: Subject) -> None:
    target = (sequences := Sequences(subject.program, seed=3)).add(TOKENS)
    sequences.run(target, [PROMPT, 1, 1])
    sequences.free(target)
    sequences.run(target, [PROMPT + 2, *[1] * (OUTPUT - 2)])
    assert_same(target.logits, subject.alone)


def test_going_on_from_what_a_resumed_request_needs(subject: Subject) -> None:
    """At the end of every block, all blocks but those copied being NaN."""
    sequences = Sequences(subject.program, seed=4)
    size, first, forks = sequences.groups[0].block_size, sequences.add(TOKENS), []
    for _ in range(size, PROMPT, size):
        sequences.run(first, [size])
        forks.append(sequences.fork(first, TOKENS))
    sequences.free(first)
    for end, second in zip(range(size, PROMPT, size), forks, strict=True):
        sequences.run(second, [PROMPT - end, *[1] * OUTPUT])
        assert_same(second.logits, subject.alone)
        sequences.free(second)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"o_lora_rank": 32}, "bfloat16", ""),
        ({"o_lora_rank": 32}, "float32", "bfloat16 only, not float32"),
        ({}, "bfloat16", "o_lora_rank that is a multiple of 32, not 16"),
        ({"o_lora_rank": 32, "head_dim": 544}, "bfloat16", "head_dim that is a multiple of 32 up to 512, not 544"),
        ({"o_lora_rank": 32, "hc_mult": 2}, "bfloat16", "4 streams, not 2"),
    ],
)
def test_why_a_model_needs_torch(checkpoint: MakeCheckpoint, changes: dict[str, Any], dtype: str, reason: str) -> None:
    found = read_config(checkpoint("deepseek_v4_fast", **changes))
    needs = found.family.spec(found.model, Serving(dtype), {}).needs_torch
    assert (reason in needs) if reason else not needs
