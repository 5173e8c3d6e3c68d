"""Write random weights as safetensors, in any stored form, file by file; no tensor is in memory as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from pypto_serving.model.checkpoint import INDEX_FILE, ITEM_BYTES, SINGLE_FILE, Expected, bfloat16
from pypto_serving.model.formats.values import E2M1, E4M3
from pypto_serving.types.arrays import Array, Float32Array

FILE_BYTES = 4 << 30
PIECE = 1 << 22
"""Elements drawn at once."""
HIDDEN_ROW_SCALE = 0.02
_E4M3_CODES = np.flatnonzero(np.abs(E4M3) <= 16).astype(np.uint8)

Draw = Callable[[np.random.Generator, int, int], Array]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `draw(rng, first, last)` returns rows as stored, in order."""

    dtype: str
    shape: tuple[int, ...]
    draw: Draw

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Codes:
    """Random codes of weights, all equally likely.

    values: what they stand for. draw: `count` stored items of `dtype`.
    dtypes: of other tensors of a matrix, by last component, where a scheme allows several.
    """

    values: Float32Array
    draw: Callable[[np.random.Generator, int, str], Array]
    dtypes: Mapping[str, str]


def _bytes(rng: np.random.Generator, count: int, dtype: str) -> Array:
    return np.frombuffer(rng.bytes(count * ITEM_BYTES[dtype]), np.uint8)


CODES = {
    "w8a8": Codes(
        np.arange(-127, 128, dtype=np.float32),
        lambda rng, count, _: rng.integers(-127, 128, count, np.int8),
        {"weight_scale": "F32"},
    ),
    "w4a16": Codes(np.arange(-8, 8, dtype=np.float32), _bytes, {"weight_scale": "BF16", "weight_shape": "I64"}),
    "mxfp4": Codes(E2M1, _bytes, {"weight_scale": "U8"}),
    "fp8": Codes(
        E4M3[_E4M3_CODES],
        lambda rng, count, _: _E4M3_CODES[rng.integers(0, len(_E4M3_CODES), count, np.uint8)],
        {"weight_scale_inv": "BF16"},
    ),
}


def normal(dtype: str, shape: tuple[int, ...], spread: float, visible: NDArray[np.bool_] | None = None) -> Tensor:
    """Return a tensor of normal numbers; rows that are not `visible` are scaled down."""

    def draw(rng: np.random.Generator, first: int, last: int) -> Array:
        numbers = rng.standard_normal((last - first, *shape[1:]), np.float32) * np.float32(spread)
        if visible is not None:
            numbers[~visible[first:last]] *= HIDDEN_ROW_SCALE
        return _stored(numbers, dtype)

    return Tensor(dtype, shape, draw)


def keyed(dtype: str, spread: float, width: int, keys: NDArray[np.int64], visible: NDArray[np.bool_]) -> Tensor:
    """Return normal numbers: rows of one of the `keys` are alike in all tensors; not `visible` ones are scaled down."""

    def draw(_: np.random.Generator, first: int, last: int) -> Array:
        rows = [np.random.default_rng(key).standard_normal(width, np.float32) for key in keys[first:last].tolist()]
        numbers = np.stack(rows) * np.float32(spread)
        numbers[~visible[first:last]] *= HIDDEN_ROW_SCALE
        return _stored(numbers, dtype)

    return Tensor(dtype, (len(keys), width), draw)


def ones(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(
        dtype, shape, lambda rng, first, last: _stored(np.ones((last - first, *shape[1:]), np.float32), dtype)
    )


def identity(dtype: str, size: int) -> Tensor:
    return Tensor(
        dtype, (size, size), lambda rng, first, last: _stored(np.eye(last - first, size, first, np.float32), dtype)
    )


def chosen(shape: tuple[int, int], count: int) -> Tensor:
    """Return rows of different ids below `count`."""

    def draw(rng: np.random.Generator, first: int, last: int) -> Array:
        return np.argsort(rng.random((last - first, count)), axis=1)[:, : shape[1]].astype(np.int64)

    return Tensor("I64", shape, draw)


def quantised(
    expected: Mapping[str, Expected], k: int, codes: Codes, visible: NDArray[np.bool_] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a matrix of `k` inputs: random codes, and scales that make its variance about 1 / k."""
    spread = (k * float((codes.values.astype(np.float64) ** 2).mean())) ** -0.5
    tensors = {}
    for name, wanted in expected.items():
        last = name.rpartition(".")[2]
        dtype, shape = codes.dtypes.get(last, wanted.dtypes[0]), wanted.shape
        if "scale" in last:
            tensors[name] = _scales(dtype, shape, spread, visible)
        elif last == "weight_shape":
            n = next(iter(expected.values())).shape[0]
            tensors[name] = Tensor(dtype, shape, lambda rng, first, last, n=n: np.array([n, k])[first:last])
        else:
            tensors[name] = _codes(dtype, shape, codes)
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write all tensors into one file, or several with an index."""
    files: list[dict[str, Tensor]] = [{}]
    room = FILE_BYTES
    for name, tensor in tensors.items():
        if files[-1] and tensor.num_bytes > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = tensor
        room -= tensor.num_bytes
    total, places = sum(tensor.num_bytes for tensor in tensors.values()), {}
    with tqdm(total=total, unit="B", unit_scale=True) as bar:
        for number, content in enumerate(files, 1):
            file = SINGLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            places |= dict.fromkeys(content, file)
            with (folder / file).open("wb") as out:
                content = dict(sorted(content.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
                out.write(_header(content))
                for name, tensor in content.items():
                    rng, rows = np.random.default_rng(list(name.encode())), tensor.shape[0]
                    step = max(1, PIECE // math.prod(tensor.shape[1:]))
                    for first in range(0, rows, step):
                        piece = np.ascontiguousarray(tensor.draw(rng, first, min(rows, first + step)))
                        bar.update(out.write(piece.data.cast("B")))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _codes(dtype: str, shape: tuple[int, ...], codes: Codes) -> Tensor:
    width = math.prod(shape[1:])
    return Tensor(dtype, shape, lambda rng, first, last: codes.draw(rng, (last - first) * width, dtype))


def _scales(dtype: str, shape: tuple[int, ...], spread: float, visible: NDArray[np.bool_] | None) -> Tensor:
    """Return scales up to a third above and below `spread`; powers of two are the next ones."""

    def draw(rng: np.random.Generator, first: int, last: int) -> Array:
        scales = (rng.random((last - first, *shape[1:]), np.float32) * np.float32(2 / 3) + np.float32(2 / 3)) * spread
        if visible is not None:
            scales[~visible[first:last]] *= HIDDEN_ROW_SCALE
        return _stored(scales, dtype)

    return Tensor(dtype, shape, draw)


def _stored(numbers: NDArray[Any], dtype: str) -> Array:
    match dtype:
        case "BF16":
            return bfloat16(numbers.astype(np.float32, copy=False))
        case "U8":
            return (np.rint(np.log2(numbers)) + 127).astype(np.uint8)
        case "F32":
            return numbers.astype(np.float32, copy=False)
    raise ValueError(f"numbers are not written in {dtype}")


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return what comes before the tensors. The widest numbers come first, so that all are aligned."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
