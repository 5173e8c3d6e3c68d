"""Unpack a GGUF file into a checkpoint folder in bfloat16, which stays in the user's cache. Torch-free."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import ITEM_BYTES, SINGLE_FILE, Progress, bfloat16
from pypto_serving.model.convert.conversion import Place, header_of
from pypto_serving.model.convert.files import as_json, new_file, write
from pypto_serving.model.gguf.architectures import GgufModel, Rows
from pypto_serving.model.gguf.container import Gguf, parts_of
from pypto_serving.model.gguf.tokenizer import write_tokenizer
from pypto_serving.util import hash128, write_at

_FORM = "1"
"""Changes when folders unpacked before must be unpacked again."""
_PIECE = 1 << 22
"""Weights that are dequantized at once."""


def unpack(path: Path, cache: Path, progress: Progress) -> Path:
    """Return the folder in `cache` that holds the model of the GGUF file `path`; make it if it is not there.

    Of several processes, one writes it and the others wait. Reports `progress("weights", bytes written, bytes in
    total)`. Raises ModelError in one line.
    """
    states = [(part.name, (stat := part.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for part in parts_of(path)]
    identity = hash128(repr((_FORM, states)).encode()).hex()
    target = cache / "gguf" / f"{path.stem}-{identity[:12]}" / path.stem
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                unfinished = target.with_name(f"{target.name}.part")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                _write(Gguf.open(path), unfinished, progress)
                unfinished.rename(target)
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror}"
        raise ModelError(f"{path} cannot be unpacked: {reason}") from None
    return target


def _write(gguf: Gguf, folder: Path, progress: Progress) -> None:
    model = GgufModel(gguf)
    config = model.config() | write_tokenizer(gguf.metadata, gguf.path, folder)
    _write_weights(model, folder / SINGLE_FILE, progress)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write(folder / "generation_config.json", as_json(ids))
    write(folder / "config.json", as_json(config))


def _write_weights(model: GgufModel, path: Path, progress: Progress) -> None:
    """Write vectors in float32, and matrices in bfloat16."""
    tensors = {name: (shape, rows) for name, shape, rows in model.tensors()}
    places: dict[str, Place] = {}
    end = 0
    for name, (shape, _) in sorted(tensors.items(), key=lambda item: len(item[1][0])):
        dtype, begin = "F32" if len(shape) == 1 else "BF16", end
        end += int(np.prod(shape)) * ITEM_BYTES[dtype]
        places[name] = Place(dtype, shape, begin, end)
    header = header_of(places)
    with new_file(path, len(header) + end) as file:
        write_at(file.fileno(), header, 0)
        for name, place in places.items():
            _write_tensor(file.fileno(), len(header) + place.begin, place, tensors[name][1])
            progress("weights", place.end, end)


def _write_tensor(file: int, at: int, place: Place, rows: Rows) -> None:
    count, width = (1, place.shape[0]) if len(place.shape) == 1 else place.shape
    step = max(1, _PIECE // width)
    for first in range(0, count, step):
        values = rows(first, min(count, first + step))
        stored = values.astype("<f4") if place.dtype == "F32" else bfloat16(values)
        write_at(file, np.ascontiguousarray(stored).data.cast("B"), at)
        at += stored.nbytes
