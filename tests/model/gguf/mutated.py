"""Serves damaged copies of a GGUF file, each the whole way: `python -m tests.model.gguf.mutated FILE FIRST LAST`."""

from __future__ import annotations

import gc
import json
import logging
import resource
import shutil
import sys
from pathlib import Path

import numpy as np

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.gguf.container import Gguf
from pypto_serving.model.gguf.unpack import unpack
from pypto_serving.model.registry import Serving, load_spec
from tests.model.sequences import Sequences, load_program

ROOM = 96 << 20
"""What a file may take beside its size, with the program and its buffers."""
TEXT = "a b"
_MOST = (
    "00" * 8,
    "ff" * 8,
    "ff" * 7 + "7f",
    "ffffffff",
    "ffffff7f",
    "00000080",
    "0000c07f",
    "0000807f",
    "007c",
    "00fe",
)
INTERESTING = [bytes.fromhex(text) for text in _MOST]
"""Numbers of some widths: zero, the largest, negative ones, infinity and none."""


def mutated(whole: bytes, end: int, seed: int) -> bytes:
    """`whole` with some bytes changed, most of them in its head of `end` bytes; or the head of a file of that size."""
    rng, content = np.random.default_rng(seed), bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(content) if rng.random() < 0.2 else end))
        kind = rng.integers(0, 4)
        if kind == 0:
            values = rng.choice(INTERESTING)
        elif kind == 1:
            values = bytes(rng.integers(0, 256, int(rng.integers(1, 9)), dtype=np.uint8))
        elif kind == 2:  # another field of the head
            start = int(rng.integers(0, end))
            values = whole[start : start + int(rng.integers(1, 60))]
        else:
            values = bytes([content[at] ^ (1 << int(rng.integers(0, 8)))])
        content[at : at + len(values)] = values
    return bytes(content[: int(rng.integers(0, len(content)))] if rng.random() < 0.1 else content)


def serve(path: Path) -> None:
    """Go the whole way. Raises ModelError."""
    folder = unpack(path, path.parent / "cache", lambda *_: None)
    spec = load_spec(folder, Serving("bfloat16", 32))
    ids = Tokenizer.load(folder).encode(TEXT)
    if ids and max(ids) < spec.vocab_size and not spec.needs_torch:
        sequences = Sequences(load_program(folder, "bfloat16", 4, 64, threads=1, kernels=runnable()[0]))
        sequences.run(sequence := sequences.add(np.array(ids)), [len(ids)])
        assert sequence.logits[len(ids) - 1].shape == (spec.vocab_size,)


def main(source: str, first: str, last: str) -> None:
    """Print how many copies were refused, and how many served. An exception names the number of its copy."""
    logging.disable()
    whole, folder = Path(source).read_bytes(), Path(source).parent / first
    end = min(tensor.begin for tensor in Gguf.open(Path(source)).tensors.values())
    folder.mkdir()
    serve(Path(shutil.copy(source, folder)))
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + len(whole) + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    refused = 0
    for seed in range(int(first), int(last)):
        path = folder / f"{seed}.gguf"
        path.write_bytes(mutated(whole, end, seed))
        try:
            serve(path)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error) and str(seed) in str(error) and len(str(error)) < 1000, error
        except BaseException as error:
            error.add_note(f"copy {seed}")
            raise
        else:
            gc.collect()  # a program refers to itself, and each file counts alone
        shutil.rmtree(folder / "cache")
        path.unlink()
    print(json.dumps({"refused": refused, "served": int(last) - int(first) - refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
