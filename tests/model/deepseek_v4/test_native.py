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
from pypto_serving.model.registry import load_config
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequence_, Sequences, load_program

pytestmark = pytest.mark.skipif(not runnable(), reason="built without a C++ compiler")

SIZES: dict[str, dict[str, Any]] = {
    "fast": {"o_lora_rank": 32},
    "heads": {"o_lora_rank": 32, "num_attention_heads": 40, "head_dim": 64, "o_groups": 4, "index_n_heads": 40},
}
BLOCKS = 600
PROMPT, OUTPUT = 150, 5
ROOM = 1.1


def random_tokens(seed: int, length: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, length)


TOKENS = random_tokens(0, PROMPT + OUTPUT)


def load(make: MakeCheckpoint, kernels: str, sizes: str = "fast", threads: int = 1, dtype: str = "bfloat16") -> Any:
    path = make("deepseek_v4_fast", dtype="bfloat16", **SIZES[sizes])
    return load_program(path, dtype, num_blocks=BLOCKS, threads=threads, kernels=kernels)


def logits_of(program: Any, tokens: Array, chunks: list[int]) -> Array:
    """Logits [chunks, vocab] at the end of each chunk."""
    sequence = (sequences := Sequences(program)).add(tokens)
    sequences.run(sequence, chunks)
    return np.stack([sequence.logits[end - 1] for end in np.cumsum(chunks)])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kernels", runnable())
def test_errors_are_those_of_bfloat16(checkpoint: MakeCheckpoint, kernels: str, sizes: str) -> None:
    """At the median position: where rounding changes a choice of experts, by chance, errors are large for either."""
    errors: dict[str, list[float]] = {"kernels": [], "torch": []}
    chunks = [1] * 60
    programs = {
        "exact": load(checkpoint, "torch", sizes, dtype="float32"),
        "torch": load(checkpoint, "torch", sizes),
        "kernels": load(checkpoint, kernels, sizes),
    }
    for seed in range(3):
        found = {name: logits_of(program, random_tokens(seed, 60), chunks) for name, program in programs.items()}
        for name, mine in errors.items():
            mine.append(float(np.median(np.abs(found[name] - found["exact"]).mean(axis=1))))
    assert np.mean(errors["kernels"]) < ROOM * np.mean(errors["torch"]), errors


@pytest.mark.parametrize("expert", [-1, 8, 1 << 32])
@pytest.mark.parametrize("kernels", [*runnable()[:1], "torch"])
def test_a_table_that_names_no_expert_is_refused(
    checkpoint: MakeCheckpoint, tmp_path: Path, kernels: str, expert: int
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(checkpoint("deepseek_v4_fast", dtype="bfloat16", **SIZES["fast"]), path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("gate.tid2eid"))
    tensors[name][3, 1] = expert
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"{name} holds {expert}, but must hold ids from 0 to 7"):
        load_program(path, "bfloat16", num_blocks=BLOCKS, kernels=kernels)


@dataclass(frozen=True)
class Subject:
    """A program, and what it says at the end of the prompt and after each output token without neighbours."""

    program: Any
    alone: dict[int, Array]


Subjects = Callable[..., Subject]


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


def assert_same(found: dict[int, Array], wanted: dict[int, Array]) -> None:
    for position, row in wanted.items():
        assert np.isfinite(row).all()
        assert np.array_equal(found[position], row), f"position {position} differs"


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunk_sizes(subject: Subject, chunk: int) -> None:
    sequence = (sequences := Sequences(subject.program, seed=1)).add(TOKENS)
    sequences.run(sequence, [chunk] * (PROMPT // chunk))
    sequences.run(sequence, [PROMPT - sequence.computed] if sequence.computed < PROMPT else [])
    sequences.run(sequence, [1] * OUTPUT)
    assert_same(sequence.logits, subject.alone)


def run_among_others(program: Any, others: int, chunks: list[int], seed: int) -> dict[int, Array]:
    """The target in chunks, among decoding rows of all lengths and prefills of all sizes that come and go."""
    rng = np.random.default_rng(seed)
    sequences = Sequences(program, seed)
    rows: list[Sequence_] = [sequences.add(random_tokens(i, 400)) for i in range(1, 1 + others)]
    sequences.step([(s, int(rng.integers(1, 40))) for s in rows])
    target = sequences.add(TOKENS)
    for chunk in chunks:
        work = [(s, int(rng.choice([1, 1, 1, 2, 9, 33]))) for s in rows]
        work.insert(int(rng.integers(len(work))), (target, chunk))
        sequences.step(work)
        sequences.free(rows[int(rng.integers(len(rows)))])
    return target.logits


def test_a_mixed_batch(subject: Subject) -> None:
    chunks = [60, 1, 30, 43, 16, *[1] * OUTPUT]
    assert_same(run_among_others(subject.program, 12, chunks, seed=2), subject.alone)


@pytest.mark.parametrize("kernels", runnable()[1:])
def test_other_instruction_sets(subjects: Subjects, kernels: str) -> None:
    subject = subjects("fast", kernels)
    assert_same(run_among_others(subject.program, 8, [70, 80, *[1] * OUTPUT], seed=5), subject.alone)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads(subjects: Subjects, threads: int) -> None:
    alone, other = subjects("heads", runnable()[0]).alone, subjects("heads", runnable()[0], threads)
    assert_same(other.alone, alone)
    assert_same(run_among_others(other.program, 8, [100, 50, *[1] * OUTPUT], seed=6), alone)


def test_preemption_and_other_blocks(subject: Subject) -> None:
    target = (sequences := Sequences(subject.program, seed=3)).add(TOKENS)
    sequences.run(target, [PROMPT, 1, 1])
    sequences.free(target)
    sequences.run(target, [PROMPT + 2, *[1] * (OUTPUT - 2)])
    assert_same(target.logits, subject.alone)


def test_going_on_from_what_a_resumed_request_needs(subject: Subject) -> None:
    sequences = Sequences(subject.program, seed=4)
    first = sequences.add(TOKENS)
    sequences.run(first, [128])
    second = sequences.fork(first, TOKENS)
    sequences.free(first)
    sequences.run(second, [PROMPT - 128, *[1] * OUTPUT])
    assert_same(second.logits, subject.alone)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"o_lora_rank": 32}, "bfloat16", ""),
        ({"o_lora_rank": 32}, "float32", "--dtype bfloat16 only"),
        ({}, "bfloat16", "o_lora_rank that is a multiple of 32, not 16"),
        ({"o_lora_rank": 32, "head_dim": 544}, "bfloat16", "head_dim that is a multiple of 32 up to 512, not 544"),
        ({"o_lora_rank": 32, "hc_mult": 2}, "bfloat16", "4 streams, not 2"),
    ],
)
def test_why_a_model_needs_torch(checkpoint: MakeCheckpoint, changes: dict[str, Any], dtype: str, reason: str) -> None:
    architecture, model = load_config(checkpoint("deepseek_v4_fast", **changes))
    needs = model.spec("m", architecture, dtype, 32, ()).needs_torch
    assert (reason in needs) if reason else not needs
