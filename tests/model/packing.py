"""Programs that keep packed weights in a folder, for tests and for the processes that they start. Torch-free."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.kernels import runnable
from tests.model.sequences import Array, Sequences, load_program

TOKENS = np.arange(40) % 300


def load(path: Path, folder: Path | str = "", kernels: str = "") -> Any:
    """A program; what it keeps is written when this returns."""
    program = load_program(path, "bfloat16", 8, 128, kernels=kernels or runnable()[0], packed_cache=str(folder))
    for thread in threading.enumerate():
        if thread.name == "packed-file":
            thread.join()
    return program


def logits(program: Any) -> Array:
    """[positions that a few chunks end at, vocab]."""
    sequences = Sequences(program)
    sequence = sequences.add(TOKENS)
    sequences.run(sequence, (17, 1, 16, 1, 5))
    return np.stack(list(sequence.logits.values()))
