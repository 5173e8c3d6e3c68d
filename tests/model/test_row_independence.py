"""The same request gets the same logits, bit by bit, whatever is computed beside it and however it is cut."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from pypto_serving.kernels import runnable
from tests.checkpoints import DECODERS
from tests.model.conftest import MakeCheckpoint
from tests.model.neighbours import BUNDLED, OUTPUT, PROMPT, TOKENS, Subject, Subjects, assert_same, run_among_others
from tests.model.sequences import Sequences, load_program
from tests.model.variants import WIDE

NATIVE = [f"bfloat16 {name}" for name in runnable()]
"""What the kernels compute in, best first; empty without a C++ compiler."""


@pytest.fixture(scope="module")
def subjects(checkpoint: MakeCheckpoint) -> Iterator[Subjects]:
    """`subjects(model, arithmetic, threads, block_size)`, each made once."""
    before = torch.get_num_threads()

    @functools.cache
    def make(model: str, arithmetic: str, threads: int = 1, block_size: int = 32) -> Subject:
        dtype, kernels = arithmetic.split()
        known = {"bundled": BUNDLED, "wide": checkpoint("qwen3", **WIDE) if model == "wide" else BUNDLED}
        path = known.get(model) or checkpoint(model)
        blocks = 900 * 16 // block_size
        program = load_program(path, dtype, num_blocks=blocks, threads=threads, block_size=block_size, kernels=kernels)
        sequence = (sequences := Sequences(program)).add(TOKENS)
        sequences.run(sequence, [PROMPT, *[1] * OUTPUT])
        return Subject(program, dict(sequence.logits))

    yield make
    torch.set_num_threads(before)


OTHERS = [kind for kind in DECODERS if kind not in ("qwen3", "qwen3_moe")]


@pytest.fixture(params=["qwen3", "qwen3_moe", "wide", "bundled"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32 torch", "bfloat16 torch", *NATIVE[:1]])
def arithmetic(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def subject(subjects: Subjects, model: str, arithmetic: str) -> Subject:
    torch.set_num_threads(1)
    return subjects(model, arithmetic)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("chunk", [1, 7, pytest.param(64, marks=pytest.mark.soak)])
def test_chunk_sizes(subject: Subject, chunk: int) -> None:
    sequence = (sequences := Sequences(subject.program, seed=1)).add(TOKENS)
    sequences.run(sequence, [chunk] * (PROMPT // chunk))
    sequences.run(sequence, [PROMPT - sequence.computed] if sequence.computed < PROMPT else [])
    sequences.run(sequence, [1] * OUTPUT)
    assert_same(sequence.logits, subject.alone)


@pytest.mark.thinned(1)
def test_a_mixed_batch_of_37(subject: Subject) -> None:
    chunks = [100, 1, 30, 128, 16, *[1] * OUTPUT]
    assert_same(run_among_others(subject.program, 36, chunks, seed=2), subject.alone)


@pytest.mark.parametrize("model", ["qwen3_moe"])
def test_two_threads(subjects: Subjects, model: str, arithmetic: str) -> None:
    """Equal among themselves; a busy machine is slow to run two threads, so this is short."""
    torch.set_num_threads(2)
    subject = subjects(model, arithmetic, 2)
    found = run_among_others(subject.program, 8, [150, 125, 1, 1], seed=3)
    assert_same(found, {position: subject.alone[position] for position in (PROMPT - 1, PROMPT, PROMPT + 1)})


@pytest.mark.thinned(1)
def test_preemption_and_other_blocks(subject: Subject) -> None:
    target = (sequences := Sequences(subject.program, seed=3)).add(TOKENS)
    sequences.run(target, [PROMPT, 1, 1])
    sequences.free(target)
    sequences.run(target, [PROMPT + 2, *[1] * (OUTPUT - 2)])
    assert_same(target.logits, subject.alone)


@pytest.mark.thinned(1)
def test_a_shared_prefix_is_as_good_as_computing_it(subject: Subject) -> None:
    sequences = Sequences(subject.program, seed=4)
    first, second = sequences.add(TOKENS), sequences.add(TOKENS)
    sequences.run(first, [PROMPT])
    block_size = sequences.groups[0].block_size
    cached = (PROMPT - 1) // block_size
    second.tables, second.computed = [first.tables[0][:cached]], cached * block_size
    sequences.run(second, [PROMPT - second.computed, *[1] * OUTPUT])
    assert_same(second.logits, subject.alone)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("model", OTHERS)
@pytest.mark.parametrize("arithmetic", ["float32 torch", *NATIVE[:1]])
def test_every_family(subjects: Subjects, model: str, arithmetic: str) -> None:
    """In a batch, in chunks, after a preemption and behind a shared prefix."""
    torch.set_num_threads(1)
    subject = subjects(model, arithmetic)
    found = run_among_others(subject.program, 12, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2)
    assert_same(found, subject.alone)
    test_preemption_and_other_blocks(subject)
    test_a_shared_prefix_is_as_good_as_computing_it(subject)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("arithmetic", NATIVE[1:])
def test_other_instruction_sets(subject: Subject) -> None:
    assert_same(run_among_others(subject.program, 20, [70, 80, 125, *[1] * OUTPUT], seed=5), subject.alone)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize("arithmetic", NATIVE[:1])
def test_kernels_on_any_number_of_threads(subjects: Subjects, subject: Subject, model: str, threads: int) -> None:
    other = subjects(model, NATIVE[0], threads)
    assert_same(other.alone, subject.alone)
    assert_same(run_among_others(other.program, 8, [150, 125, *[1] * OUTPUT], seed=6), subject.alone)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("block_size", [64, 96, 128])
@pytest.mark.parametrize("arithmetic", NATIVE[:1])
def test_kernels_in_blocks_of_any_size(subjects: Subjects, subject: Subject, model: str, block_size: int) -> None:
    assert_same(subjects(model, NATIVE[0], 1, block_size).alone, subject.alone)
