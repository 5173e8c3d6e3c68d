"""Fingerprints of everything but tokens that the content of KV blocks depends on. Torch-free."""

from __future__ import annotations

from pathlib import Path

from pypto_serving.model.checkpoint import weight_files
from pypto_serving.model.digests import digests, file_state
from pypto_serving.model.formats.section import section_file
from pypto_serving.model.tensors import Progress
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import hash128, read_regular


def checkpoint_state(model_dir: str | Path) -> bytes:
    """Hash the states of configuration and weight files to 16 bytes, which name the checkpoint on this machine."""
    directory = Path(model_dir)
    files = (*_config_files(directory), *weight_files(directory))
    return hash128(*(file_state(file).encode() for file in files))


def checkpoint_digest(model_dir: str | Path, cache: str, progress: Progress) -> bytes:
    """Hash the configuration and every byte of the weight files to 16 bytes, which name the checkpoint everywhere.

    See `digests` for `cache`, `progress` and errors.
    """
    return hash128(*_contents(Path(model_dir), cache, progress).values())


def file_digests(model_dir: str | Path, cache: str, progress: Progress) -> dict[str, bytes]:
    """Return what `checkpoint_digest` hashes as 16 bytes for each file, by name."""
    return {name: hash128(content) for name, content in _contents(Path(model_dir), cache, progress).items()}


def _contents(directory: Path, cache: str, progress: Progress) -> dict[str, bytes]:
    """Return the bytes of files of configuration, and the digests of weight files, by name."""
    files = weight_files(directory)
    configuration = {file.name: read_regular(file) for file in _config_files(directory)}
    return configuration | dict(zip((file.name for file in files), digests(files, cache, progress), strict=True))


def _config_files(directory: Path) -> tuple[Path, ...]:
    beside = section_file(directory)
    return (directory / "config.json",) if beside is None else (directory / "config.json", beside)


def program_fingerprint(
    config: EngineConfig, progress: Progress, architecture: str, program: str, *numerics: str
) -> bytes:
    """Hash everything but tokens that the content of a KV block depends on to 16 bytes.

    All bytes of the weights are read only for blocks that others may read, or that outlive the replica.
    """
    if config.cache.shares_kv:
        weights = checkpoint_digest(config.model.path, config.worker.cache_dir, progress)
    else:
        weights = checkpoint_state(config.model.path)
    blocks = tuple(
        " ".join((group.name, str(group.block_size), *(tensor.dtype for tensor in group.tensors)))
        for group in config.cache.groups
    )
    rope, activations = f"max_model_len {config.limits.max_model_len}", f"activations {config.model.activations}"
    words = (architecture, config.model.dtype, rope, activations, *blocks, program, *numerics)
    return hash128(weights, *(word.encode() for word in words))
