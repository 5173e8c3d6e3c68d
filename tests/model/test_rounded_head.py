"""An output layer that is rounded to int8 when it is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pypto_serving.kernels import runnable
from pypto_serving.model.registry import Serving, load_spec
from tests.checkpoints import make_checkpoint
from tests.model.neighbours import OUTPUT, PROMPT, TOKENS, assert_same, run_among_others
from tests.model.sequences import Sequences, load_program
from tests.needs import needs_kernels

pytestmark = needs_kernels

ERROR = {True: 0.04, False: 0.03}
"""Of logits, rms, relative, by whether embeddings are tied: they are looked up in int8 then."""


@pytest.mark.parametrize("tied", [True, False])
def test_logits_memory_and_identity(tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied, vocab_size=640)
    exact, rounded, again = (
        load_program(path, *dtype_and_blocks, kernels=kernels, head=head, packed_cache=str(tmp_path / "packed"))
        for kernels, head, *dtype_and_blocks in (
            ("torch", "auto", "float32"),
            (runnable()[0], "int8", "bfloat16", 900),
            (runnable()[0], "int8", "bfloat16"),
        )
    )
    plain = load_program(path, "bfloat16", kernels=runnable()[0])
    assert (plain.fingerprint == rounded.fingerprint) is not tied
    logits = []
    for program in (exact, rounded, again):
        sequence = (sequences := Sequences(program)).add(TOKENS)
        sequences.run(sequence, [PROMPT, *[1] * OUTPUT])
        logits.append({at: row for at, row in sequence.logits.items() if at >= PROMPT - 1})
    wanted, found, same = logits
    assert_same(same, found)
    assert_same(run_among_others(rounded, 36, [100, 1, 30, 128, 16, *[1] * OUTPUT], seed=2), found)
    errors = [np.sqrt(((found[at] - row) ** 2).mean() / (row**2).mean()) for at, row in wanted.items()]
    assert np.median(errors) < ERROR[tied], errors
    stored, int8 = (load_spec(path, Serving("bfloat16", head=head)) for head in ("auto", "int8"))
    saved = 640 * 64 - 8 * 640
    assert stored.packed_bytes - int8.packed_bytes == stored.token_bytes - int8.token_bytes == saved


def test_what_cannot_be_rounded(tmp_path: Path) -> None:
    """Deciding is setup's; a model says what it leaves open."""
    odd = make_checkpoint(tmp_path / "odd", hidden_size=66)
    assert "head" not in load_spec(odd, Serving("bfloat16")).choices
    assert "head" in load_spec(make_checkpoint(tmp_path / "even"), Serving("bfloat16")).choices
