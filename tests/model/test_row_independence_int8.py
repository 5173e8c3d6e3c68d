"""The same request gets the same logits, bit by bit, with int8 weights too."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.kernels import runnable
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import w8a8
from tests.checkpoints import make_checkpoint
from tests.model.conftest import MakeCheckpoint
from tests.model.neighbours import BUNDLED, OUTPUT, PROMPT, TOKENS, assert_same, run_among_others
from tests.model.sequences import Array, Sequences, load_program
from tests.model.variants import WIDE
from tests.needs import needs_kernels

pytestmark = needs_kernels

Programs = Callable[..., Any]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """`programs(model, kernels, threads)` on converted weights, each made once."""
    folder = tmp_path_factory.mktemp("int8")

    @functools.cache
    def converted(model: str) -> Path:
        sources = {"bundled": lambda: BUNDLED, "wide": lambda: make_checkpoint(folder / "source", "qwen3", **WIDE)}
        source = sources.get(model, lambda: make_checkpoint(folder / f"{model} source", model))()
        convert(source, folder / model, w8a8(), lambda *_: None)
        return folder / model

    @functools.cache
    def make(model: str, kernels: str = runnable()[0], threads: int = 1) -> Any:
        return load_program(converted(model), "bfloat16", num_blocks=900, threads=threads, kernels=kernels)

    return make


def alone(program: Any, chunks: list[int]) -> dict[int, Array]:
    """Logits at the end of the prompt and after each output token, without neighbours."""
    sequence = (sequences := Sequences(program)).add(TOKENS)
    sequences.run(sequence, [*chunks, *[1] * OUTPUT])
    wanted = range(PROMPT - 1, PROMPT + OUTPUT)
    return {position: row for position, row in sequence.logits.items() if position in wanted}


MODELS = ["qwen3", "qwen3_moe", "wide", "bundled"]


@pytest.mark.parametrize("model", MODELS)
def test_chunks_and_neighbours(programs: Programs, model: str) -> None:
    program = programs(model)
    wanted = alone(program, [PROMPT])
    assert len(wanted) == 1 + OUTPUT
    for chunks in ([1] * PROMPT, [7] * 39 + [2], [64] * 4 + [19], [256, 19]):
        assert_same(alone(program, chunks), wanted)
    assert_same(run_among_others(program, 36, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2), wanted)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads(programs: Programs, model: str, threads: int) -> None:
    wanted, program = alone(programs(model), [PROMPT]), programs(model, threads=threads)
    assert_same(alone(program, [PROMPT]), wanted)
    assert_same(run_among_others(program, 8, [150, 125, *[1] * OUTPUT], seed=6), wanted)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kernels", runnable()[1:])
def test_other_instruction_sets(programs: Programs, model: str, kernels: str) -> None:
    program = programs(model, kernels)
    found = run_among_others(program, 20, [70, 80, 125, *[1] * OUTPUT], seed=5)
    assert_same(found, alone(program, [PROMPT]))


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_packed_weights_from_a_file(checkpoint: MakeCheckpoint, tmp_path: Path, model: str) -> None:
    """They hold scales and offsets as well."""
    convert(checkpoint(model), tmp_path / "model", w8a8(), lambda *_: None)
    cache = tmp_path / "cache"

    def load() -> Any:
        kept = str(cache)
        return load_program(tmp_path / "model", "bfloat16", kernels=runnable()[0], packed_cache=kept)

    wanted = alone(load(), [PROMPT])
    for thread in threading.enumerate():
        if thread.name == "packed-file":
            thread.join()
    (file,) = cache.glob("*.packed")
    written = file.stat().st_mtime_ns
    assert_same(alone(load(), [PROMPT]), wanted)
    assert file.stat().st_mtime_ns == written
