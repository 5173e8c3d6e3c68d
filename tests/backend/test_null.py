"""The null backend refuses dispatches that its traits rule out, and notices rows that are read and not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pypto_serving.backend.base import StepInputs
from pypto_serving.backend.null.device import next_digest
from pypto_serving.backend.null.program import NullProgram
from pypto_serving.backend.numpy_sampler import uniforms
from pypto_serving.model.null_models import deepseek_v4_groups, plain_groups
from pypto_serving.types.step import BackendTraits
from tests.simulation import null_config

DIGESTS, NUMBER = (375, 855), 0.618438


def int32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def program(**traits: Any) -> NullProgram:
    return NullProgram(null_config(plain_groups(16), traits=BackendTraits(**traits), max_num_seqs=4))


def dispatch(*counts: int, **changes: Any) -> StepInputs:
    """Prompts of `counts` tokens, row i in block i + 1; every row samples."""
    starts = np.cumsum([0, *counts], dtype=np.int32)
    positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    blocks = np.arange(1, len(counts) + 1, dtype=np.int32)
    inputs = StepInputs(
        token_ids=positions,
        positions=positions,
        query_start=starts,
        context_lens=int32(*counts),
        logits_rows=starts[1:] - 1,
        slot_mapping=(blocks.repeat(counts) * 16 + positions,),
        block_tables=(blocks[:, None],),
        fresh_blocks=(blocks,),
        num_rows=len(counts),
        rows=blocks - 1,
    )
    return replace(inputs, **changes)


@pytest.mark.parametrize(
    ("traits", "inputs", "words"),
    [
        ({"mixed_steps": False}, dispatch(3, 1), "not split"),
        ({}, dispatch(3, 1, kind="decode"), "more than one token"),
        ({}, dispatch(3, 1, kind="prefill"), "has a decode"),
        ({"padded_rows": (4,)}, dispatch(1, 1, kind="decode"), "2 rows are not padded"),
        ({"chunk_tokens": 4}, dispatch(6, 3, logits_rows=int32(8)), "not a multiple of 4"),
        ({"samples_on_device": True}, dispatch(3), "a device that samples"),
        ({}, dispatch(3, token_ids=int32(1, -1, 2)), "negative"),
        ({}, dispatch(3, token_ids=int32(1, 2)), "too small"),
    ],
)
def test_a_dispatch_that_the_traits_rule_out(traits: dict[str, Any], inputs: StepInputs, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        program(**traits).submit(inputs, None)


def test_more_dispatches_than_are_held() -> None:
    one = program()
    one.submit(dispatch(3), None)
    with pytest.raises(RuntimeError, match="at most 1"):
        one.submit(dispatch(3), None)


@pytest.mark.parametrize("change", [{"slot_mapping": (int32(16, 17, 35),)}, {"block_tables": (int32(0)[None],)}])
def test_a_row_that_is_not_there_is_noticed(change: dict[str, Any]) -> None:
    one = program()
    one.submit(dispatch(3, **change), None)
    with pytest.raises(RuntimeError, match="was not written"):
        one.collect()


def test_a_block_that_changed_hands_is_poisoned() -> None:
    one = program()
    one.submit(dispatch(3), None)
    one.collect()
    one.submit(dispatch(1, positions=int32(3), slot_mapping=(int32(19),), fresh_blocks=(int32(1),)), None)
    with pytest.raises(RuntimeError, match="was not written"):
        one.collect()


def test_the_oracle_itself() -> None:
    """Answers that were computed once: program and oracle share these functions."""
    assert next_digest(plain_groups(16), [1, 2, 3]) % 1000 == DIGESTS[0]
    assert next_digest(deepseek_v4_groups(), list(range(300))) % 1000 == DIGESTS[1]
    numbers = uniforms(*(np.array([value], np.uint64) for value in (7, 1, 42)))
    assert round(float(numbers[0]), 6) == NUMBER
