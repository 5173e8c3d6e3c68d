"""What the caches hold of models: files of hubs and packages, and what GGUF files were unpacked to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pypto_serving.errors import ModelError
from pypto_serving.setup.catalog import catalog, known_models
from pypto_serving.setup.download import MODELSCOPE
from pypto_serving.setup.host import read_cache_dir


class CachedModel(msgspec.Struct, frozen=True):
    """A model in the caches: its name, all quantizations of a repository together, and its files and folders."""

    name: str
    num_bytes: int
    paths: tuple[Path, ...]


def cached_models() -> list[CachedModel]:
    """List the models in the caches, largest first."""
    found: dict[str, list[Path]] = {}
    for name, path in _downloaded():
        found.setdefault(name, []).append(path)
    for source, folder in _unpacked():
        origin = (name for name, paths in found.items() if any(source.is_relative_to(path) for path in paths))
        found.setdefault(next(origin, str(source)), []).append(folder)
    listed = [CachedModel(name, sum(map(_num_bytes, paths)), tuple(paths)) for name, paths in found.items()]
    return sorted(listed, key=lambda model: (-model.num_bytes, model.name))


def remove(name: str) -> CachedModel:
    """Delete what the caches hold of the model `name`. Raises ModelError if that is nothing, or cannot be deleted."""
    known, name = catalog().get(name), re.sub(r"^(hf\.co|huggingface\.co)/", "", name)
    wanted = {name, name.rpartition(":")[0]} | ({known.name, known.repo} if known else set())
    model = next((model for model in cached_models() if model.name in wanted), None)
    if model is None:
        raise ModelError(f"{name} is not in the cache; `pypto-serving models` lists what is")
    for path in model.paths:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as error:
            raise ModelError(f"{error.filename or path} cannot be deleted: {error.strerror}") from None
    return model


def _downloaded() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        yield folder.name.removeprefix("models--").replace("--", "/"), folder
    if cache := read_cache_dir():
        for folder in sorted(Path(cache, MODELSCOPE).glob("*/*")):
            yield f"{MODELSCOPE}/{folder.parent.name}/{folder.name}", folder
        for known in known_models():
            if known.package and (path := Path(cache, "models", known.package.kept_as)).exists():
                yield known.name, path


def _unpacked() -> Iterator[tuple[Path, Path]]:
    """Yield the path of each GGUF file that was unpacked, and the folder that it was unpacked to."""
    if cache := read_cache_dir():
        for folder in sorted(Path(cache, "gguf").glob("*")):
            try:
                yield Path(os.fsdecode((folder / "lock").read_bytes()) or folder), folder
            except OSError:
                yield folder, folder


def _num_bytes(path: Path) -> int:
    """Return the bytes on disk of a file, or of all files in a folder, without links."""
    files = [path] if path.is_file() else [Path(root, name) for root, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        try:
            total += file.lstat().st_blocks * 512
        except OSError:  # deleted meanwhile
            continue
    return total
