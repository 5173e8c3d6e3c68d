"""Unpack a GGUF file into a checkpoint folder, which stays in the user's cache. Torch-free.

Matrices keep their blocks: their dtype in the safetensors file is the name of GGUF's type.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import BLOCKS, ITEM_BYTES, SINGLE_FILE, Progress, bfloat16
from pypto_serving.model.convert.conversion import Place, header_of
from pypto_serving.model.convert.files import as_json, new_file, write
from pypto_serving.model.formats.quantization import SECTION
from pypto_serving.model.gguf.architectures import GgufModel, Rows
from pypto_serving.model.gguf.blocks import BlockType, are_finite
from pypto_serving.model.gguf.container import Gguf, parts_of
from pypto_serving.model.gguf.tokenizer import write_tokenizer
from pypto_serving.model.inventory import Shape
from pypto_serving.model.registry import model_family
from pypto_serving.util import brief, hash128, write_at

logger = logging.getLogger(__name__)
_FORM = "4"
"""Changes when folders unpacked before must be unpacked again."""
_PIECE = 1 << 22
"""Weights that are dequantized at once."""
_LARGEST = 3.3895e38
"""The largest number of bfloat16, rounded down."""


def unpack(path: Path, cache: Path, progress: Progress, sampling: Mapping[str, float] | None = None) -> Path:
    """Return the folder in `cache` that holds the model of the GGUF file `path`; make it if it is not there.

    `sampling`: defaults for generation_config.json, which no file holds. Of several processes, one writes the folder
    and the others wait. Reports `progress("weights", bytes written, bytes in total)`. Raises ModelError in one line.
    """
    target = path
    try:
        identity = _identity(path, sampling)
        name = os.fsencode(path.stem).decode(errors="replace").strip(".") or "model"
        target = cache / "gguf" / f"{name}-{identity[:12]}" / name
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("ab", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write(os.fsencode(path))  # for whoever lists the folders
            if not target.exists():
                unfinished = target.with_name(f"{target.name}.part")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    _write(Gguf.open(path), unfinished, progress, sampling or {})
                    if _identity(path, sampling) != identity:
                        raise ModelError(f"{path} changed while it was unpacked; start again")
                    unfinished.rename(target)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror}"
        raise ModelError(f"{path} cannot be unpacked: {reason}") from None
    return target


def _identity(path: Path, sampling: Mapping[str, float] | None) -> str:
    """Return a name of the form of folders, of the state of all parts of the file, and of `sampling`."""
    states = [(part.name, (stat := part.stat()).st_size, stat.st_mtime_ns, stat.st_ino) for part in parts_of(path)]
    return hash128(repr((_FORM, states, sampling)).encode()).hex()


def _write(gguf: Gguf, folder: Path, progress: Progress, sampling: Mapping[str, float]) -> None:
    model = GgufModel(gguf)
    config = model.config()
    tensors = {name: (shape, type, rows) for name, shape, type, rows in model.tensors()}
    _require_shapes(config, {name: shape for name, (shape, *_) in tensors.items()}, gguf.path)
    config[SECTION] = {"quant_method": "gguf"}
    config |= write_tokenizer(gguf.metadata, gguf.path, folder)
    types = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) > 1} - BLOCKS.keys() - {"BF16"}
    if types:
        logger.warning("%s: weights in %s become bfloat16", brief(gguf.path.name), ", ".join(sorted(types)))
    _write_weights(tensors, gguf.path, folder / SINGLE_FILE, progress)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write(folder / "generation_config.json", as_json(ids | dict(sampling)))
    write(folder / "config.json", as_json(config))


def _require_shapes(config: dict[str, Any], found: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Raise ModelError unless the tensors are those of a model with this config.json."""
    family = model_family(config["architectures"][0])
    wanted = family.inventory(family.parse(config, str(source))).tensors()
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        name, shapes = wrong[0], [brief(shapes.get(wrong[0], "none")) for shapes in (found, wanted)]
        raise ModelError(f"{source}: its tensor for {name} has the shape {shapes[0]}, but the model needs {shapes[1]}")


def _write_weights(tensors: Mapping[str, Any], source: Path, path: Path, progress: Progress) -> None:
    """Write vectors in float32, matrices as stored where kernels have a form for that, and others in bfloat16."""
    places: dict[str, Place] = {}
    end = 0
    for name, (shape, type, _) in sorted(tensors.items(), key=lambda item: _order(*item[1][:2])):
        dtype, begin = "F32" if len(shape) == 1 else type.name if type.name in BLOCKS else "BF16", end
        count = math.prod(shape)
        end += count // type.weights * type.bytes if dtype in BLOCKS else count * ITEM_BYTES[dtype]
        places[name] = Place(dtype, shape, begin, end)
    header = header_of(places)
    with new_file(path, len(header) + end) as file:
        write_at(file.fileno(), header, 0)
        for name, place in places.items():
            try:
                _write_tensor(file.fileno(), len(header) + place.begin, place, *tensors[name][1:])
            except FloatingPointError:
                raise ModelError(f"{source}: its tensor for {name} has values that are no finite numbers") from None
            progress("weights", place.end, end)


def _order(shape: Shape, type: BlockType) -> tuple[int, bool]:
    """Return the place of a tensor in the file: numbers of more than a byte begin at multiples of their size."""
    return len(shape), type.name in BLOCKS


def _write_tensor(file: int, at: int, place: Place, type: BlockType, rows: Rows) -> None:
    """Write one tensor. Raises FloatingPointError for values that bfloat16 does not hold, and scales of blocks."""
    count, width = (1, place.shape[0]) if len(place.shape) == 1 else place.shape
    step = max(1, _PIECE // width)
    for first in range(0, count, step):
        stored: NDArray[Any] = rows(first, min(count, first + step))
        if place.dtype in BLOCKS:
            finite = are_finite(type, stored)
        else:
            with np.errstate(all="ignore"):
                values = type.dequantize(stored)
                finite = max(values.max(), -values.min()) <= _LARGEST
            stored = values.astype("<f4") if place.dtype == "F32" else bfloat16(values)
        if not finite:
            raise FloatingPointError
        write_at(file, np.ascontiguousarray(stored).data.cast("B"), at)
        at += stored.nbytes
