"""Convert a checkpoint file by file; a killed conversion resumes. Torch-free.

A file gets its name when it is complete and on disk, and config.json comes last, so an unfinished conversion never
looks like a checkpoint. The output depends on the source, the format and the version of this program alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import (
    INDEX_FILE,
    ITEM_BYTES,
    SINGLE_FILE,
    UNFINISHED_FILE,
    Checkpoint,
    Expected,
    Progress,
    StoredTensors,
    bfloat16,
)
from pypto_serving.model.convert.files import as_json, claim, copy, new_file, write
from pypto_serving.model.convert.rounding import Encoding
from pypto_serving.model.fields import read_json_file
from pypto_serving.model.formats.schemes import PLAIN, Fp8, RowCodes, Scheme
from pypto_serving.model.formats.section import SECTION_FILES
from pypto_serving.model.formats.values import MatrixTensors, dequantised
from pypto_serving.model.raw_config import CONFIG_FILE
from pypto_serving.model.registry import CheckpointConfig, read_config
from pypto_serving.types.arrays import Array
from pypto_serving.types.weights import Table
from pypto_serving.util import write_at


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the target, made from the tensor `source`: a matrix in `encoding`, or in `dtype`; "" keeps its form.

    shape, scheme: of the source, whose matrices are called `module.weight`.
    """

    source: str
    shape: tuple[int, ...]
    scheme: Scheme = PLAIN
    encoding: Encoding | None = None
    dtype: str = ""

    def tensors(self) -> list[str]:
        """Return the names of the tensors in which the weight is stored."""
        if self.scheme == PLAIN:
            return [self.source]
        n, k = self.shape
        return list(self.scheme.expected(self.source.removesuffix(".weight"), n, k))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The weights of the target by name.

    expected, ignores: tensors that the source must have, and tensors that it may have.
    config: values of config.json that change; None removes a key.
    """

    weights: Mapping[str, Weight]
    expected: Mapping[str, Expected]
    ignores: Callable[[str], bool]
    config: Mapping[str, Any]

    def check(self) -> None:
        """Raise ModelError for weights that are already quantized, or that an encoding does not support."""
        for name, weight in self.weights.items():
            if weight.encoding is not None:
                _require_fine(weight.scheme)
                n, k = weight.shape
                weight.encoding.scheme.expected(name.removesuffix(".weight"), n, k)


def _require_fine(scheme: Scheme) -> None:
    is_fp4 = isinstance(scheme, RowCodes) and scheme.table == Table.E2M1
    if not (scheme == PLAIN or is_fp4 or isinstance(scheme, Fp8)):
        raise ModelError(
            f"its weights are quantised already ({scheme.name}); give the checkpoint that it was made from"
        )


_CHUNK = 1 << 18
"""Elements that a thread converts at once, few enough to stay in a CPU cache."""
_LARGEST = 1e30
"""Limit of weights, so that scales, and the sums to find them, fit into float32 and bfloat16."""
_ENCODING = "encoding/encoding_*.py"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class Place:
    """The place of a tensor: bytes [begin, end) after the header of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def convert(source: Path, target: Path, encoding: Encoding, progress: Progress) -> None:
    """Convert the checkpoint `source` to `encoding` in the folder `target`, or resume an unfinished conversion there.

    Reports `progress("weights", bytes read, bytes in total)`. Raises ModelError, or ConfigError for a `target` that
    cannot be used, in one line.
    """
    config, stored = read_config(source), Checkpoint.open(source)
    try:
        plan = config.family.plan_conversion(config.model, stored.tensors, encoding)
        plan.check()
    except ModelError as error:
        raise ModelError(f"{source} cannot be converted: {error}") from None
    stored.require(plan.expected, plan.ignores)
    try:
        with claim(source, target, encoding.name) as require_unchanged:
            tensors = StoredTensors(source, progress)
            tensors.require(plan.expected, plan.ignores)
            content = _Conversion(config, target, tensors, plan).run()
            require_unchanged()
            write(target / CONFIG_FILE, as_json(content))
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror}"
        raise ModelError(
            f"converting to {target} failed: {reason}; once that is mended, the same command goes on"
        ) from None


class _Conversion:
    """Owns the files of `target`."""

    def __init__(self, config: CheckpointConfig, target: Path, tensors: StoredTensors, plan: Plan) -> None:
        self._config, self._source, self._target = config, Path(config.directory), target
        self._tensors, self._plan = tensors, plan

    def run(self) -> dict[str, Any]:
        """Write all files except config.json, and return its content."""
        files: dict[str, dict[str, Weight]] = {}
        for name, weight in self._plan.weights.items():
            files.setdefault(self._tensors[weight.tensors()[0]].file.name, {})[name] = weight
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            for file in sorted(files):
                self._write_file(self._target / file, files[file], threads)
        self._copy_other_files(files)
        if list(files) != [SINGLE_FILE]:
            write(self._target / INDEX_FILE, as_json(self._index(files)))
        config = self._target_config()
        self._verify(config)
        return config

    def _verify(self, config: dict[str, Any]) -> None:
        """Raise ModelError unless the files hold what config.json will say."""
        family, written = self._config.family, Checkpoint.open(self._target)
        inventory = family.inventory(family.parse(config, str(self._target / CONFIG_FILE)), written.tensors)
        written.require(inventory.expected(), inventory.ignores)

    def _places(self, weights: Mapping[str, Weight]) -> dict[str, Place]:
        """Place tensors with the widest elements first, as safetensors does, so that all are aligned."""
        kinds = {name: kind for weight in weights.items() for name, kind in self._kinds(*weight)}
        places, end = {}, 0
        for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-ITEM_BYTES[item[1][0]], item[0])):
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            places[name] = Place(dtype, shape, begin, end)
        return places

    def _kinds(self, name: str, weight: Weight) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """Yield dtype and shape of the tensors that a weight becomes."""
        if weight.encoding is None:
            yield name, (weight.dtype or self._tensors[weight.source].dtype, weight.shape)
            return
        n, k = weight.shape
        for tensor, wanted in weight.encoding.scheme.expected(name.removesuffix(".weight"), n, k).items():
            dtype = weight.encoding.dtypes.get(tensor.rpartition(".")[2], wanted.dtypes[0])
            yield tensor, (dtype, wanted.shape)

    def _write_file(self, path: Path, weights: Mapping[str, Weight], threads: ThreadPoolExecutor) -> None:
        """Write the converted `weights` to `path`, unless the file exists, which means that it is complete."""
        places = self._places(weights)
        header = header_of(places)
        if path.exists():
            for name, weight in weights.items():
                self._count(name, weight)
            return
        with new_file(path, len(header) + max(place.end for place in places.values())) as file:
            write_at(file.fileno(), header, 0)
            for name, weight in weights.items():
                convert_rows = self._writer(file.fileno(), len(header), name, weight, places)
                rows, step = weight.shape[0], max(1, _CHUNK // math.prod(weight.shape[1:]))
                _run_all(threads, [partial(convert_rows, at, min(rows, at + step)) for at in range(0, rows, step)])
                self._count(name, weight)

    def _writer(
        self, file: int, start: int, name: str, weight: Weight, places: Mapping[str, Place]
    ) -> Callable[[int, int], None]:
        """Return a function that converts rows [first, last) of a weight and writes them after byte `start`."""
        read, encoding, module = self._reader(weight), weight.encoding, name.removesuffix(".weight")

        def put(tensor: str, values: Array, first: int) -> None:
            offset = start + places[tensor].begin + first * (values.nbytes // len(values))
            write_at(file, np.ascontiguousarray(values).data.cast("B"), offset)

        def convert_rows(first: int, last: int) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                values = read(first, last)
            rounds = encoding is not None or (values.dtype == np.float32 and weight.dtype)
            if rounds and not (values.min() > -_LARGEST and values.max() < _LARGEST):
                raise ModelError(
                    f"{self._source}: {weight.source} has numbers that are not finite, or beyond {_LARGEST}"
                )
            if encoding is None:
                put(name, bfloat16(values) if rounds else values, first)
                return
            for tensor, encoded in encoding.encode(values).items():
                put(f"{module}.{tensor}", encoded, first)

        if f"{module}.weight_shape" in places:
            put(f"{module}.weight_shape", np.array(weight.shape, "<i8"), 0)
        return convert_rows

    def _reader(self, weight: Weight) -> Callable[[int, int], Array]:
        """Return a function that reads rows [first, last) of a weight in float32, or as stored if unchanged."""
        tensors, module = self._tensors, weight.source.removesuffix(".weight")
        if isinstance(weight.scheme, Fp8 | RowCodes):
            n, k = weight.shape
            return partial(dequantised, weight.scheme.read(MatrixTensors(tensors, module), n, k))
        tensor, width = tensors[weight.source], math.prod(weight.shape[1:])
        if weight.encoding is None and weight.dtype in ("", tensor.dtype):
            view = tensors.view(tensor)
            return lambda first, last: view[first:last]
        return lambda first, last: tensors.read(tensor, first * width, last * width).reshape(last - first, width)

    def _count(self, name: str, weight: Weight) -> None:
        """Count the source of a weight as read, only once if two weights are made from it."""
        if name == weight.source or weight.source not in self._plan.weights:
            for tensor in weight.tensors():
                self._tensors.forget(self._tensors[tensor])

    def _copy_other_files(self, written: Container[str]) -> None:
        """Copy all files except weights: tokenizer, generation config, chat template and others.

        Of folders, copy only the one with the encoding of DeepSeek V4's chats. Do not copy files that describe the
        source's quantization, since other engines would apply them to the target.
        """
        left = (CONFIG_FILE, UNFINISHED_FILE, *SECTION_FILES)
        for file in sorted((*self._source.iterdir(), *self._source.glob(_ENCODING))):
            weights = file.name in written or file.name.endswith(_WEIGHTS)
            if file.is_file() and file.name not in left and not weights:
                copied = self._target / file.relative_to(self._source)
                copied.parent.mkdir(exist_ok=True)
                copy(file, copied)

    def _index(self, files: Mapping[str, Mapping[str, Weight]]) -> dict[str, Any]:
        places = {file: self._places(weights) for file, weights in files.items()}
        total = sum(place.end - place.begin for of_file in places.values() for place in of_file.values())
        weight_map = {name: file for file, of_file in places.items() for name in of_file}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def _target_config(self) -> dict[str, Any]:
        config = read_json_file(self._source / CONFIG_FILE)
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = "bfloat16"
        return {key: value for key, value in (config | dict(self._plan.config)).items() if value is not None}


def _run_all(threads: ThreadPoolExecutor, tasks: Sequence[Callable[[], None]]) -> None:
    """Run all tasks. After a failure, start no further ones, and wait for the running ones."""
    futures = [threads.submit(task) for task in tasks]
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def header_of(places: Mapping[str, Place]) -> bytes:
    entries = {
        name: {"dtype": place.dtype, "shape": place.shape, "data_offsets": [place.begin, place.end]}
        for name, place in places.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
