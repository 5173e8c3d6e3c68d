"""The container of GGUF files: metadata, and where tensors lie. Torch-free.

Format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian: `GGUF`, u32 version, u64 count of
tensors, u64 count of keys; the keys; the tensors' names, dimensions, types and offsets; then, aligned, the data.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.model.gguf.blocks import TYPES, BlockType
from pypto_serving.util import brief, open_regular

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's codes of the types of metadata values."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS, _MAX_NAME = 4, 64
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: its shape, the outermost dimension first, and its bytes, uint8 [rows, bytes of a row]."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    data: NDArray[np.uint8]

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Dequantize rows [first, last), float32 [last - first, k]."""
        return self.type.dequantize(self.data[first:last])


@dataclass(frozen=True, slots=True)
class Gguf:
    """The metadata of a GGUF model, which is that of its first file, and the tensors of all its files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> Gguf:
        """Map a file, or all parts of a split one. Raises ModelError naming what is wrong."""
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for index, part in enumerate(parts_of(path)):
            keys, found = _Reader(part).read()
            metadata = metadata or keys
            if keys.get("split.no", index) != index:
                raise ModelError(f"{part}: split.no is {brief(keys['split.no'])}, but its name says part {index + 1}")
            for tensor in found:
                if tensor.name in tensors:
                    raise ModelError(f"{part}: tensor {tensor.name} is in it twice, or in two parts")
                tensors[tensor.name] = tensor
        wanted = metadata.get("split.tensors.count", len(tensors))
        if wanted != len(tensors):
            raise ModelError(f"{path}: its parts have {len(tensors)} tensors, but must have {brief(wanted)}")
        return cls(path, metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return all parts of the file at `path`, of which it may be any. Raises ModelError for a missing one."""
    if not (named := _PART.fullmatch(path.name)) or not 1 <= int(named[2]) <= int(named[3]):
        return [path]
    count = int(named[3])
    parts = [path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{path.parent} is incomplete: it has no {part.name}")
    return parts


class _Reader:
    """Reads one file from its start to its data."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ModelError(f"{path} is empty") from None

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Return the metadata and the tensors."""
        if self._map[:4] != b"GGUF":
            raise self._refuse("is no GGUF file: it does not begin with GGUF (a part cut by `split` is none)")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._refuse(f"has GGUF version {version}; versions 2 and 3, little-endian, can be read")
        num_tensors, num_keys = self._count(24), self._count(12)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._refuse(f"has the key {brief(key)} twice")
            metadata[key] = self._value(self._number("I"))
        return metadata, list(self._tensors(num_tensors, metadata))

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> Iterator[GgufTensor]:
        infos = [self._info() for _ in range(count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in (1 << bit for bit in range(17)):
            raise self._refuse(f"has general.alignment {brief(alignment)}, which is no power of two up to 65536")
        data, end = -(-self._at // alignment) * alignment, 0
        for name, shape, type, offset in sorted(infos, key=lambda info: info[3]):
            rows, k = math.prod(shape[:-1]), shape[-1]
            if k % type.weights:
                raise self._refuse(
                    f"has tensor {name} with rows of {k}, but {type.name} needs multiples of {type.weights}"
                )
            size = rows * (k // type.weights) * type.bytes
            if offset % alignment or offset < end or data + offset + size > len(self._map):
                raise self._refuse(
                    f"has tensor {name} at {offset} with {size} bytes, which is unaligned, overlaps another, or passes "
                    f"the end of the file; download it again"
                )
            end = offset + size
            stored = np.frombuffer(self._map, np.uint8, size, data + offset).reshape(rows, -1)
            yield GgufTensor(name, shape, type, stored)

    def _info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, dims = self._string(), self._number("I")
        if not (name.isprintable() and 0 < len(name.encode()) <= _MAX_NAME and 0 < dims <= _MAX_DIMS):
            raise self._refuse(f"has a tensor {brief(name)} with {dims} dimensions; there are 1 to {_MAX_DIMS}")
        sizes = [self._number("Q") for _ in range(dims)]
        if not 0 < math.prod(sizes) < 1 << 48:
            raise self._refuse(f"has a tensor {name} of the size {sizes}")
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            known = ", ".join(type.name for type in TYPES.values())
            raise self._refuse(f"has tensor {name} of ggml type {number}; known are {known}")
        return name, tuple(reversed(sizes)), TYPES[number], offset

    def _value(self, type: int, nested: bool = False) -> Any:
        if type == _STRING:
            return self._string()
        if type in _SCALARS:
            return self._number(_SCALARS[type])
        if type != _ARRAY or nested:
            raise self._refuse(f"has a value of type {type}{' in an array' if nested else ''}, which is not known")
        item = self._number("I")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
            count = self._count(dtype.itemsize)
            values = np.frombuffer(self._map, dtype, count, self._at).tolist()
            self._at += count * dtype.itemsize
            return values
        return [self._value(item, nested=True) for _ in range(self._count(8))]

    def _string(self) -> str:
        length = self._count(1)
        self._at += length
        try:
            return self._map[self._at - length : self._at].decode()
        except UnicodeDecodeError:
            raise self._refuse(f"has a string at byte {self._at - length} that is not UTF-8") from None

    def _count(self, least: int) -> int:
        """Read a count of things that take at least `least` bytes each."""
        count: int = self._number("Q")
        if count * least > len(self._map) - self._at:
            raise self._refuse(f"is cut off, or damaged: {count} items at byte {self._at} pass its end")
        return count

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        if self._at + size > len(self._map):
            raise self._refuse("is cut off in its metadata; download it again")
        (value,) = struct.unpack_from(f"<{code}", self._map, self._at)
        self._at += size
        return value

    def _refuse(self, why: str) -> ModelError:
        return ModelError(f"{self._path} {why}")
