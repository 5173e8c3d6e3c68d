"""The container of GGUF files: metadata, and where tensors lie. Torch-free.

Format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian: `GGUF`, u32 version, u64 count of
tensors, u64 count of keys; the keys; the tensors' names, dimensions, types and offsets; then, aligned, the data.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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
    """A tensor: its shape, the outermost dimension first, and its place, from byte `begin` of `file` on."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    file: Path
    begin: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of weights."""
        return self.shape[-1] // self.type.weights * self.type.bytes

    @property
    def end(self) -> int:
        """The byte of the file after the tensor."""
        return self.begin + math.prod(self.shape[:-1]) * self.row_bytes

    def blocks(self, first: int, last: int) -> NDArray[np.uint8]:
        """Read rows [first, last) as stored, uint8 [last - first, row_bytes].

        A mapped file that is cut off meanwhile would end the process; here it raises ModelError.
        """
        found = np.empty((last - first, self.row_bytes), np.uint8)
        left, at = found.data.cast("B"), self.begin + first * self.row_bytes
        try:
            with os.fdopen(open_regular(self.file), "rb", buffering=0) as file:
                while left:
                    if not (count := os.preadv(file.fileno(), [left], at)):
                        raise ModelError(f"{self.file} was cut off while it was read; start again")
                    left, at = left[count:], at + count
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        return found

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """Dequantize rows [first, last), float32 [last - first, k]."""
        return self.type.dequantize(self.blocks(first, last))


@dataclass(frozen=True, slots=True)
class Gguf:
    """The metadata of a GGUF model, which is that of its first file, and the tensors of all its files."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> Gguf:
        """Read the head of a file, or of all parts of a split one. Raises ModelError naming what is wrong."""
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for index, part in enumerate(parts_of(path)):
            keys, found = _read(part)
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


def _read(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    """Return the metadata and the tensors of one file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    """Reads one file from its start to its data."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self._at = path, file, 0
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Return the metadata and the tensors."""
        if not self._size:
            raise self._refuse("is empty")
        if self._size < 4 or self._bytes(4) != b"GGUF":
            raise self._refuse("is no GGUF file: it does not begin with GGUF (a part cut by `split` is none)")
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
            if shape[-1] % type.weights:
                needs = f"{type.name} needs multiples of {type.weights}"
                raise self._refuse(f"has tensor {name} with rows of {shape[-1]}, but {needs}")
            tensor = GgufTensor(name, shape, type, self._path, data + offset)
            if offset % alignment or tensor.begin < end or tensor.end > self._size:
                raise self._refuse(
                    f"has tensor {name} at {offset} with {tensor.end - tensor.begin} bytes, which is unaligned, "
                    f"overlaps another, or passes the end of the file; download it again"
                )
            end = tensor.end
            yield tensor

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
            values: list[Any] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
            return values
        return [self._value(item, nested=True) for _ in range(self._count(8))]

    def _string(self) -> str:
        length, at = self._count(1), self._at
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise self._refuse(f"has a string at byte {at} that is not UTF-8") from None

    def _count(self, least: int) -> int:
        """Read a count of things that take at least `least` bytes each."""
        count: int = self._number("Q")
        if count * least > self._size - self._at:
            raise self._refuse(f"is cut off, or damaged: {count} items at byte {self._at} pass its end")
        return count

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        return value

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        self._at += count
        if len(data) != count:
            raise self._refuse("is cut off in its metadata; download it again")
        return data

    def _refuse(self, why: str) -> ModelError:
        return ModelError(f"{self._path} {why}")
