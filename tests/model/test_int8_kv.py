"""Programs with keys and values in int8: their logits, their memory, and that company changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pypto_serving.kernels import runnable
from pypto_serving.model.registry import Serving, load_spec
from tests.checkpoints import make_checkpoint
from tests.model.neighbours import OUTPUT, PROMPT, TOKENS, assert_same, run_among_others
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels

pytestmark = needs_kernels

ERROR = {"qwen3": 0.03, "qwen3_moe": 0.05}
"""Of logits against float32, rms, relative, the median over positions."""


def alone(program: Any, chunks: list[int]) -> dict[int, Array]:
    sequence = (sequences := Sequences(program)).add(TOKENS)
    sequences.run(sequence, [*chunks, *[1] * OUTPUT])
    return {position: row for position, row in sequence.logits.items() if position >= PROMPT - 1}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_logits_and_identity(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path / kind, kind)
    best = runnable()[0]
    exact = load_program(path, "float32")
    plain, program, other = (
        load_program(path, "bfloat16", 900, threads=threads, kernels=best, kv_dtype=kv_dtype)
        for threads, kv_dtype in ((1, "auto"), (1, "int8"), (3, "int8"))
    )
    wanted, found = alone(exact, [PROMPT]), alone(program, [PROMPT])
    errors = [np.sqrt(((found[at] - row) ** 2).mean() / (row**2).mean()) for at, row in wanted.items()]
    assert np.median(errors) < ERROR[kind], errors
    assert not np.array_equal(found[PROMPT], alone(plain, [PROMPT])[PROMPT])

    for chunks in ([1] * PROMPT, [7] * 39 + [2], [64] * 4 + [19]):
        assert_same(alone(program, chunks), found)
    assert_same(alone(other, [PROMPT]), found)
    assert_same(run_among_others(program, 36, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2), found)
    assert_same(run_among_others(other, 8, [150, 125, *[1] * OUTPUT], seed=6), found)

    assert program.fingerprint == other.fingerprint != plain.fingerprint
    (arena,), (group,) = program.memory.arenas, program.groups
    assert arena.shape == (900, group.block_bytes)


def test_a_block_takes_a_byte_for_a_number_and_four_for_a_scale(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    (plain,), (int8,) = (load_spec(path, Serving("bfloat16", kv_dtype=name)).kv_groups for name in ("auto", "int8"))
    layers, kv_heads, dim = 3, 2, 32
    assert plain.block_bytes == 32 * layers * 2 * kv_heads * dim * 2
    assert int8.block_bytes == 32 * layers * 2 * kv_heads * (dim + 4)


@pytest.mark.parametrize("kernels", runnable()[1:])
def test_other_instruction_sets(tmp_path: Path, kernels: str) -> None:
    path = make_checkpoint(tmp_path / "model")
    program = load_program(path, "bfloat16", 900, kernels=kernels, kv_dtype="int8")
    found = run_among_others(program, 20, [70, 80, 125, *[1] * OUTPUT], seed=5)
    assert_same(found, alone(program, [PROMPT]))
