"""A checkpoint's safetensors files: headers, the tensors that they must hold, and these mapped. Torch-free.

Format, https://github.com/huggingface/safetensors#format: the header length n in 8 little-endian bytes; n bytes of JSON
{name: {dtype, shape, data_offsets [begin, end)}}; the data, from whose start the offsets count.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ModelError
from pypto_serving.kernels.forms import BLOCK_FORMS
from pypto_serving.model.fields import read_json_file
from pypto_serving.model.folder import what_it_is
from pypto_serving.model.gguf.blocks import TYPES
from pypto_serving.model.stored_names import EXPERTS, OTHER_PARTS, own_names
from pypto_serving.util import brief, ceil_div, parse_json

FLOATS = ("F32", "BF16", "F16")
"""Stored dtypes of weights that are not quantized."""
BLOCKS = {type.name: type for type in TYPES.values() if type.name in BLOCK_FORMS}
"""GGUF's types that are kept as they are, by the names that safetensors files of ours give them."""
INT8, INT64 = "I8", "I64"
"""Stored dtypes of quantized weights, and of tables of ids."""
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
}
"""Bytes per item by stored dtype."""
CODES = ("qweight", "weight_packed")
"""Names of quantised weights that no other weights have."""

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
UNFINISHED_FILE = "unfinished-conversion.json"
"""File that describes an unfinished conversion; locked while a process converts."""
_MAX_HEADER_BYTES = 100_000_000
_LONGEST_NAME = 255
"""Limit of bytes of file names, and of characters of tensor names."""
_MAX_DIMS, _MAX_SIZE, _FUSED_DIMS = 8, 1 << 48, 3
_NOT_PARTS = ("adapter_", "consolidated")
"""Beginnings of names of files that hold something else, or the same in another form."""
_MAX_PARTS = 10_000
_LAYER = re.compile(r"(?:model\.)?layers\.([0-9]{1,9})\.")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: bytes [begin, end) of `file`.

    width: 0, or the tensor [n, k] lies there as n columns of a matrix with rows of `width` elements.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    width: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] if self.width else self.end - self.begin


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a model needs: its shape, and the dtypes that it may have.

    `usual`: its dtype if no file gives it; "" for the checkpoint's own, or for the only allowed one.
    `blocks`: rows of GGUF's blocks are allowed, too.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    usual: str = ""
    blocks: bool = False

    def allows(self, dtype: str) -> bool:
        """Return whether a tensor may have this dtype."""
        return dtype in self.dtypes or (self.blocks and dtype in BLOCKS)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint directory, by name. Only headers are read."""

    directory: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, model_dir: str | Path) -> Checkpoint:
        """Read the headers of all files. Raises ModelError naming a missing, damaged or truncated file."""
        directory = Path(model_dir)
        files = weight_files(directory)
        for file in files:
            if not file.is_file():
                hint = what_it_is(directory)
                raise ModelError(
                    f"{directory} is not a complete checkpoint: it has no {file.name}{hint and f'; {hint}'}"
                )
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in _read_header(file):
                if tensor.name in tensors:
                    other = tensors[tensor.name].file.name
                    raise ModelError(f"tensor {tensor.name} is in two files: {other} and {file.name}")
                tensors[tensor.name] = tensor
        named = {own: replace(tensors[name], name=own) for name, own in own_names(tensors).items()}
        return cls(directory, files, _with_experts(named))

    def require(self, expected: Mapping[str, Expected], ignores: Callable[[str], bool]) -> None:
        """Raise ModelError naming a tensor that is missing, surplus, or of another shape or dtype."""
        for name, wanted in expected.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise ModelError(f"{self.directory}: tensor {name} is missing{self._hint(name)}")
            if not same_shape(stored.shape, wanted.shape):
                shapes = f"has shape {list(stored.shape)}, but config.json makes it {list(wanted.shape)}"
                raise ModelError(f"{stored.file}: tensor {name} {shapes}")
            if not wanted.allows(stored.dtype):
                supported = ", ".join(wanted.dtypes)
                raise ModelError(f"{stored.file}: tensor {name} has dtype {stored.dtype}; supported: {supported}")
        extra = sorted(name for name in self.tensors if name not in expected)
        surplus = [name for name in extra if not ignores(name)]
        self._warn_of_rest(expected, extra)
        if surplus:
            more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
            raise ModelError(f"{self.directory}: tensor {surplus[0]}{more} is not part of this model")

    def _warn_of_rest(self, expected: Iterable[str], extra: Iterable[str]) -> None:
        """Log a warning if `extra` has tensors of layers after the last one, or of encoders of images and sounds."""
        deepest = max((int(match[1]) for name in expected if (match := _LAYER.match(name))), default=0)
        beyond = [name for name in extra if (match := _LAYER.match(name)) and int(match[1]) > deepest]
        if beyond:
            logger.warning(
                "%s has %d layers in config.json; %d tensors of later layers, such as %s, are left out",
                *(self.directory, deepest + 1, len(beyond), beyond[0]),
            )
        seeing = [name for name in extra if OTHER_PARTS.fullmatch(name) and "mtp." not in name]
        if seeing:
            logger.warning(
                "%s is served for text alone; %d tensors of other parts, such as %s, are left out",
                *(self.directory, len(seeing), seeing[0]),
            )

    def _hint(self, name: str) -> str:
        """Return what is there in place of the missing `name`: codes without their scheme."""
        module = name.removesuffix(".weight")
        codes = next((f"{module}.{end}" for end in CODES if f"{module}.{end}" in self.tensors), "")
        return codes and f"; {codes} is there, but config.json has no quantization_config that says how it is stored"


def _with_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors, with each expert's matrices in place of those that hold all experts of a layer.

    [experts, 2 x width, hidden] has gate and up of an expert one after the other, [experts, hidden, width] its down.
    Transformers 4 has some models' the other way round: [experts, hidden, 2 x width] and [experts, width, hidden].
    """
    whole: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        fused = EXPERTS.fullmatch(name)
        if fused is None or (across := _lie_across(tensors, fused[1], fused[3] or "")) is None:
            whole[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
        whole |= {part.name: part for part in _slices(fused[1], parts, tensor, across)}
    return whole


def _lie_across(tensors: Mapping[str, StoredTensor], prefix: str, ending: str) -> bool | None:
    """Return whether the outputs of experts are columns, not rows; None if they are in neither form."""
    both = [tensors.get(f"{prefix}{part}{ending}") for part in ("gate_up_proj", "down_proj")]
    shapes = [tensor.shape for tensor in both if tensor is not None and len(tensor.shape) == _FUSED_DIMS]
    if len(shapes) < len(both):
        return None
    (_, rows, columns), (_, down_rows, down_columns) = shapes
    if (rows, columns) == (2 * down_columns, down_rows):
        return False
    floats = all(tensor is not None and tensor.dtype in FLOATS for tensor in both)
    return True if floats and (rows, columns) == (down_columns, 2 * down_rows) else None


def _slices(prefix: str, parts: tuple[str, ...], tensor: StoredTensor, across: bool) -> Iterator[StoredTensor]:
    experts, rows, columns = tensor.shape
    n, k = (columns if across else rows) // len(parts), rows if across else columns
    size = tensor.num_bytes // (experts * len(parts))
    for index in range(experts * len(parts)):
        expert, part = divmod(index, len(parts))
        begin, end = tensor.begin + index * size, tensor.begin + (index + 1) * size
        if across:
            begin = tensor.begin + (expert * rows * columns + part * n) * ITEM_BYTES[tensor.dtype]
            end = begin + ((k - 1) * columns + n) * ITEM_BYTES[tensor.dtype]
        name = f"{prefix}{expert}.{parts[part]}.weight"
        yield replace(tensor, name=name, shape=(n, k), begin=begin, end=end, width=columns if across else 0)


def same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether shapes are equal; a single number may have one dimension or none."""
    return found == wanted or (found == () and wanted == (1,))


def read_index(directory: Path) -> tuple[dict[str, str], int | None] | None:
    """Return the file of every tensor in the index of a checkpoint, and its total_size; None without an index.

    Raises ModelError for a damaged index.
    """
    path = directory / INDEX_FILE
    if not path.exists():
        return None
    content = read_json_file(path)
    files, metadata = content.get("weight_map"), content.get("metadata")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{path}: weight_map is missing")
    _require_names(path, files)
    for name, file in files.items():
        if not _is_file_name(file):
            shown = f"{brief(file)} for {brief(name)}"
            raise ModelError(f"{path}: weight_map has {shown}, but must have the name of a file beside it")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return files, size if isinstance(size, int) else None


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or not value.isprintable():
        return False
    return len(value.encode(errors="replace")) <= _LONGEST_NAME


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint: those in its index, else the only file, else all. Some may be missing.

    Raises ModelError for a damaged index.
    """
    index, single = read_index(directory), directory / SINGLE_FILE
    listed = () if index is None else tuple(directory / name for name in sorted(set(index[0].values())))
    if listed and (all(file.is_file() for file in listed) or not single.is_file()):
        return listed
    if single.is_file():
        return (single,)
    found = [file for file in directory.glob("*.safetensors") if not file.name.startswith(_NOT_PARTS)]
    return tuple(sorted({part for file in found for part in _all_parts(file)})) or (single,)


def _all_parts(file: Path) -> list[Path]:
    """Return all files of a checkpoint in parts, such as model-00001-of-00003.safetensors; others are alone."""
    part = re.fullmatch(r"(.*)-[0-9]{1,6}-of-([0-9]{1,6})", file.stem)
    count = int(part[2]) if part else 0
    if part is None or not 0 < count <= _MAX_PARTS:
        return [file]
    width = len(part[2])
    return [file.with_stem(f"{part[1]}-{index:0{width}}-of-{part[2]}") for index in range(1, count + 1)]


def _require_names(source: Path, names: Iterable[str]) -> None:
    """Raise ModelError for names of tensors that cannot be shown in messages."""
    for name in names:
        if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
            raise ModelError(
                f"{source} has the name {brief(name)}; names have 1 to {_LONGEST_NAME} printable characters"
            )


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{file} is truncated or no safetensors file: {size} bytes, header of {length}")
            header = parse_json(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ModelError(f"{file}: the safetensors header does not list tensors")
    header.pop("__metadata__", None)
    _require_names(file, header)
    tensors = [_stored(file, name, entry, 8 + length, size) for name, entry in header.items()]
    _require_contiguous(file, tensors, 8 + length, size)
    return tensors


def _require_contiguous(file: Path, tensors: Sequence[StoredTensor], begin: int, end: int) -> None:
    """Raise ModelError unless tensors fill bytes [begin, end), as the format requires."""
    at, before = begin, ""
    for tensor in sorted((tensor for tensor in tensors if tensor.num_bytes), key=lambda tensor: tensor.begin):
        if tensor.begin < at:
            raise ModelError(f"{file} is damaged: the tensors {before} and {tensor.name} share bytes")
        _require_filled(file, at, tensor.begin)
        at, before = tensor.end, tensor.name
    _require_filled(file, at, end)


def _require_filled(file: Path, at: int, begin: int) -> None:
    if begin > at:
        raise ModelError(f"{file} is damaged: bytes {at} to {begin - 1} belong to no tensor")


def _is_shape(sizes: list[object]) -> bool:
    return len(sizes) <= _MAX_DIMS and all(isinstance(size, int) and 0 <= size <= _MAX_SIZE for size in sizes)


def _bytes_of(dtype: str, shape: list[int]) -> int | None:
    """Count the bytes of a tensor, None for a dtype that is not known; -1 for blocks that do not fill its rows."""
    if block := BLOCKS.get(dtype):
        return -1 if not shape or shape[-1] % block.weights else math.prod(shape) // block.weights * block.bytes
    return math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


def _stored(file: Path, name: str, entry: dict[str, object], data_start: int, size: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            0 <= begin <= end and dtype.isidentifier() and _is_shape(shape)
        ):
            if data_start + end > size:
                ends = brief(data_start + end)
                raise ModelError(f"{file} is truncated: tensor {name} ends at {ends}, the file at {size}")
            wanted = _bytes_of(dtype, shape)
            if wanted is not None and end - begin != wanted:
                raise ModelError(f"{file}: tensor {name} of shape {shape} in {dtype} has {end - begin} bytes")
            return StoredTensor(name, file, dtype, tuple(shape), data_start + begin, data_start + end)
    raise ModelError(f"{file}: the header entry of tensor {name} is damaged")


_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}

Progress = Callable[[str, int, int], None]


class StoredTensors:
    """Owns the maps of a checkpoint's files, and counts the bytes read.

    Reports `progress("weights", bytes done, bytes in total)`.
    """

    def __init__(self, model_dir: str | Path, progress: Progress) -> None:
        self._checkpoint = Checkpoint.open(model_dir)
        self._progress = progress
        self._maps: dict[Path, mmap.mmap] = {}
        self._done = self._total = 0
        self._counted: set[str] = set()
        self._expected: Mapping[str, Expected] = {}

    @property
    def headers(self) -> Mapping[str, StoredTensor]:
        """Return the locations of all tensors, by name."""
        return self._checkpoint.tensors

    def require(self, expected: Mapping[str, Expected], ignores: Callable[[str], bool]) -> None:
        """Check all tensors before any is read; raises ModelError (see Checkpoint.require)."""
        self._checkpoint.require(expected, ignores)
        self._expected = expected
        self._total = sum(self._checkpoint.tensors[name].num_bytes for name in expected)
        self._progress("weights", 0, self._total)

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has a tensor called `name`."""
        return name in self._checkpoint.tensors

    def is_surplus(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor called `name` that was not among those of `require`."""
        return self.has(name) and name not in self._expected

    def __getitem__(self, name: str) -> StoredTensor:
        return self._checkpoint.tensors[name]

    def map(self, tensor: StoredTensor) -> mmap.mmap:
        """Map the file of `tensor` privately, since torch requires a writable buffer; pages are never written."""
        if tensor.file not in self._maps:
            try:
                with tensor.file.open("rb") as stream:
                    self._maps[tensor.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise ModelError(f"{tensor.file} cannot be read: {error.strerror}") from None
        return self._maps[tensor.file]

    def view(self, tensor: StoredTensor) -> NDArray[Any]:
        """View a tensor in its file's map; bfloat16 and 8-bit floats as unsigned integers, blocks as bytes of rows."""
        if tensor.dtype in BLOCKS:
            stored = np.frombuffer(self.map(tensor), np.uint8, tensor.num_bytes, tensor.begin)
            return stored.reshape(*tensor.shape[:-1], -1)
        dtype = _NUMPY[tensor.dtype]
        stored = np.frombuffer(self.map(tensor), dtype, (tensor.end - tensor.begin) // dtype.itemsize, tensor.begin)
        if tensor.width:
            strides = dtype.itemsize, tensor.width * dtype.itemsize
            return np.lib.stride_tricks.as_strided(stored, tensor.shape, strides)
        return stored.reshape(tensor.shape)

    def read(self, tensor: StoredTensor, begin: int, end: int) -> NDArray[np.float32]:
        """Copy elements [begin, end) of a flat `tensor` in float32; of blocks and columns, whole ones."""
        if block := BLOCKS.get(tensor.dtype):
            first, last = (at // block.weights * block.bytes for at in (begin, end))
            return block.dequantize(self.view(tensor).reshape(1, -1)[:, first:last]).reshape(-1)
        if tensor.width:
            k = tensor.shape[1]
            stored = self.view(tensor)[begin // k : ceil_div(end, k)].reshape(-1)
        else:
            dtype = _NUMPY[tensor.dtype]
            stored = np.frombuffer(self.map(tensor), dtype, end - begin, tensor.begin + begin * dtype.itemsize)
        return (stored.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else stored.astype("<f4")

    def read_bfloat16(self, tensor: StoredTensor, begin: int, end: int) -> NDArray[np.uint16]:
        """Read elements [begin, end) of a flat `tensor` as bits of bfloat16, without a copy if stored so, in rows."""
        if tensor.dtype == "BF16":
            return self.view(tensor).reshape(-1)[begin:end]
        return bfloat16(self.read(tensor, begin, end))

    def forget(self, tensor: StoredTensor) -> None:
        """Count `tensor` as read, and let the kernel reclaim its whole pages."""
        begin, end = ceil_div(tensor.begin, mmap.PAGESIZE), tensor.end // mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            start, length = begin * mmap.PAGESIZE, (end - begin) * mmap.PAGESIZE
            self.map(tensor).madvise(mmap.MADV_DONTNEED, start, length)
        self.count(tensor)

    def finish(self) -> None:
        """Count all tensors as read, since other ranks read the remaining ones."""
        if self._done < self._total:
            self._done = self._total
            self._progress("weights", self._done, self._total)

    def count(self, tensor: StoredTensor) -> None:
        """Count `tensor` as read, once."""
        if tensor.name in self._counted:
            return
        self._counted.add(tensor.name)
        self._done += tensor.num_bytes
        self._progress("weights", self._done, self._total)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the bits of bfloat16, to nearest, ties to even."""
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def require_ids(name: str, lowest: int, highest: int, count: int) -> None:
    """Raise ModelError unless a tensor's values, from `lowest` to `highest`, are ids below `count`."""
    for value in (lowest, highest):
        if not 0 <= value < count:
            raise ModelError(
                f"{name} holds {value}, but must hold ids from 0 to {count - 1}: the checkpoint is damaged"
            )
