"""Convert Qwen3 checkpoints of bf16, f16 or f32 to W8A8, file by file; a killed conversion resumes. Torch-free.

The result follows `quantization.py`: int8 weights in all linear layers but routers, bfloat16 elsewhere. The output
layer is int8 too; a tied one becomes a tensor of its own. A file gets its name when it is complete and on disk, and
config.json comes last, so an unfinished conversion never looks like a checkpoint. The output depends on the source
alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.model.checkpoint import INDEX_FILE, INT8, SINGLE_FILE, Checkpoint
from pypto_serving.model.fields import read_json_file
from pypto_serving.model.fingerprint import checkpoint_state
from pypto_serving.model.quantization import SECTION, Quantization, scale_name
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.model.qwen3.inventory import Qwen3Inventory
from pypto_serving.model.registry import load_config
from pypto_serving.model.tensors import Progress, StoredTensors, bfloat16

STATE_FILE = "unfinished-conversion.json"
"""Names the source of an unfinished conversion; locked while a process converts."""

_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROUTERS = r"re:.*\.mlp\.gate$"
_BYTES = {"F32": 4, "BF16": 2, INT8: 1}
_CHUNK = 1 << 20
"""Elements converted at once: they stay in a cache."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: bytes [begin, end) behind the header of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def convert_to_w8a8(source: Path, target: Path, progress: Progress) -> None:
    """Convert the checkpoint `source` to W8A8 in the folder `target`, or resume an unfinished conversion there.

    Reports `progress("weights", bytes read, bytes in total)`. Raises ModelError, or ConfigError for a `target` that
    cannot be used, in one line.
    """
    architecture, model = load_config(source)
    if not isinstance(model, Qwen3Config):
        raise ModelError(f"{source} is a {architecture}, which cannot be converted; Qwen3 can")
    if model.quantization is not None:
        raise ModelError(f"{source} is quantised already; give the checkpoint that it was made from")
    inventory = Qwen3Inventory(model)
    Checkpoint.open(source).require(inventory.tensors(), inventory.ignores)
    wanted = replace(model, tied_embeddings=False, quantization=Quantization((_ROUTERS,) if model.experts else ()))
    try:
        with _claim(source, target):
            tensors = StoredTensors(source, progress)
            tensors.require(inventory.tensors(), inventory.ignores)
            _Conversion(source, target, tensors, wanted, model.tied_embeddings).run()
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror}"
        raise ModelError(
            f"converting to {target} failed: {reason}; once that is mended, the same command goes on"
        ) from None


class _Conversion:
    """Owns the files of `target`, which will hold `model`."""

    def __init__(self, source: Path, target: Path, tensors: StoredTensors, model: Qwen3Config, tied: bool) -> None:
        self._source, self._target, self._tensors, self._tied = source, target, tensors, tied
        self._quantization, inventory = model.quantization, Qwen3Inventory(model)
        self._shapes, self._int8 = inventory.weights(), inventory.int8_weights()

    def run(self) -> None:
        stored = Checkpoint.open(self._source)
        files: dict[str, list[str]] = {file.name: [] for file in stored.files}
        for name in self._shapes:
            files[stored.tensors[self._source_of(name)].file.name].append(name)
        files = {file: names for file, names in files.items() if names}
        for file, names in files.items():
            self._write_file(self._target / file, names)
        self._copy_other_files()
        if list(files) != [SINGLE_FILE]:
            _write(self._target / INDEX_FILE, _as_json(self._index(files)))
        _write(self._target / "config.json", _as_json(self._config()))

    def _source_of(self, name: str) -> str:
        return _EMBEDDING if self._tied and name == _LM_HEAD else name

    def _places(self, names: Sequence[str]) -> dict[str, _Place]:
        """Place tensors with the widest elements first, as safetensors does, so that all are aligned."""
        shapes, kinds = self._shapes, {}
        for name in names:
            kinds[name] = (INT8, shapes[name]) if name in self._int8 else ("BF16", shapes[name])
            if name in self._int8:
                kinds[scale_name(name)] = ("F32", (shapes[name][0], 1))
        places, end = {}, 0
        for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-_BYTES[item[1][0]], item[0])):
            begin, end = end, end + math.prod(shape) * _BYTES[dtype]
            places[name] = _Place(dtype, shape, begin, end)
        return places

    def _write_file(self, path: Path, names: Sequence[str]) -> None:
        """Write the tensors `names` and their scales to `path`, unless the file exists: then it is complete."""
        places = self._places(names)
        header = _header(places)
        if path.exists():
            for name in names:
                self._count(name)
            return
        with _new_file(path, len(header) + max(place.end for place in places.values())) as file:
            file.write(header)
            for name in names:
                if name in self._int8:
                    self._write_int8(file, len(header), name, places)
                else:
                    self._write_bf16(file, len(header), name, places)
                self._count(name)

    def _write_bf16(self, file: BinaryIO, start: int, name: str, places: Mapping[str, _Place]) -> None:
        file.seek(start + places[name].begin)
        for _, values in self._chunks(name):
            file.write(bfloat16(values).data)

    def _write_int8(self, file: BinaryIO, start: int, name: str, places: Mapping[str, _Place]) -> None:
        """Quantize `name`: the largest magnitude of each output becomes 127, and ties round to even."""
        place, scales = places[name], np.empty(places[name].shape[0], np.float32)
        file.seek(start + place.begin)
        for first, values in self._chunks(name):
            rows = values.reshape(-1, place.shape[1])
            top = np.maximum(rows.max(axis=1), -rows.min(axis=1))
            if not np.isfinite(top).all():
                raise ModelError(f"{self._source}: {self._source_of(name)} has numbers that are not finite")
            scale = top / np.float32(127)
            scale[scale == 0] = 1
            scales[first : first + len(rows)] = scale
            numbers = np.rint(np.divide(rows, scale[:, None], out=rows), out=rows)
            file.write(np.clip(numbers, -127, 127, out=rows).astype(np.int8).data)
        file.seek(start + places[scale_name(name)].begin)
        file.write(scales.data)

    def _chunks(self, name: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, values of whole rows in float32) of the source of `name`, in order."""
        tensor = self._tensors[self._source_of(name)]
        rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
        step = max(1, _CHUNK // width)
        for first in range(0, rows, step):
            yield first, self._tensors.read(tensor, first * width, min(rows, first + step) * width)

    def _count(self, name: str) -> None:
        if self._source_of(name) == name:
            self._tensors.forget(self._tensors[name])

    def _copy_other_files(self) -> None:
        """Copy all files but the weights: tokenizer, generation config, chat template and others."""
        for file in sorted(self._source.iterdir()):
            if file.is_file() and file.name not in ("config.json", STATE_FILE) and not file.name.endswith(_WEIGHTS):
                _write(self._target / file.name, file.read_bytes())

    def _index(self, files: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        places = {file: self._places(names) for file, names in files.items()}
        total = sum(place.end - place.begin for of_file in places.values() for place in of_file.values())
        weight_map = {name: file for file, of_file in places.items() for name in of_file}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def _config(self) -> dict[str, Any]:
        config = read_json_file(self._source / "config.json")
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = "bfloat16"
        assert self._quantization is not None
        ignore = list(self._quantization.ignore)
        return config | {"tie_word_embeddings": False, SECTION: Quantization.to_json(ignore)}


@contextmanager
def _claim(source: Path, target: Path) -> Iterator[None]:
    """Own `target` for the conversion of `source`; raises ConfigError where it holds anything else."""
    identity, state = checkpoint_state(source).hex(), target / STATE_FILE
    _make_target(target)
    with _locked(target) as file:
        what = _as_json({"format": Quantization.name, "source": identity})
        # What a process that was killed at once left is empty.
        if (found := file.read()) and found != what:
            raise ConfigError(f"TARGET {target} holds a part of another conversion; delete it, or give another folder")
        file.seek(0)
        file.write(what)
        _flush(file)
        yield
        if checkpoint_state(source).hex() != identity:
            (target / "config.json").unlink()
            raise ModelError(f"{source} changed meanwhile; delete {target} and convert again")
        state.unlink()


def _make_target(target: Path) -> None:
    """Make the folder `target`. Raises ConfigError if it holds anything but an unfinished conversion."""
    advice = "give a folder that is empty or not there yet"
    if target.exists() and not target.is_dir():
        raise ConfigError(f"TARGET {target} is a file; {advice}")
    if target.exists() and not (target / STATE_FILE).exists():
        if (target / "config.json").exists():
            raise ConfigError(f"TARGET {target} is a complete checkpoint already; {advice}")
        if any(target.iterdir()):
            raise ConfigError(f"TARGET {target} is not empty; {advice}")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or "it cannot be made").lower()
        raise ConfigError(f"TARGET {target} cannot be made: {reason}; give another folder") from None


@contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """Open and lock the state file, which is made if missing. Raises ConfigError if another process has `target`."""
    state = target / STATE_FILE
    with os.fdopen(os.open(state, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"TARGET {target} is being written by another process") from None
        if not (state.exists() and os.path.samestat(os.fstat(file.fileno()), state.stat())):
            raise ConfigError(f"TARGET {target} was finished by another process just now")
        yield file


def _header(places: Mapping[str, _Place]) -> bytes:
    entries = {
        name: {"dtype": place.dtype, "shape": place.shape, "data_offsets": [place.begin, place.end]}
        for name, place in places.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open a new file, allocate its `size` bytes, and name it `path` once all is written and on disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            yield file
            _flush(file)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, content: bytes) -> None:
    with _new_file(path, len(content)) as file:
        file.write(content)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
