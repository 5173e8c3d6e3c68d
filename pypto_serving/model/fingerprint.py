"""Fingerprints of everything but tokens that the content of KV blocks depends on. Torch-free."""

from __future__ import annotations

from pathlib import Path

from pypto_serving.model.checkpoint import Checkpoint
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import hash128

_PAGE_BYTES = 4096
_SAMPLED_PAGES = 64


def fingerprint(model_dir: str | Path) -> bytes:
    """Hash config.json, headers, sizes and evenly sampled pages to 16 bytes, which change when the weights do."""
    checkpoint = Checkpoint.open(model_dir)
    parts = [(checkpoint.directory / "config.json").read_bytes()]
    for file in checkpoint.files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = stream.read(int.from_bytes(stream.read(8), "little"))
            start = stream.tell()
            pages = (size - start) // _PAGE_BYTES
            offsets = {start + pages * i // _SAMPLED_PAGES * _PAGE_BYTES for i in range(_SAMPLED_PAGES)}
            parts += [header, size.to_bytes(8, "little")]
            for offset in sorted(offsets):
                stream.seek(offset)
                parts.append(stream.read(_PAGE_BYTES))
    return hash128(*parts)


def program_fingerprint(config: EngineConfig, architecture: str, program: str, *numerics: str) -> bytes:
    """Hash everything but tokens that the content of a KV block depends on to 16 bytes."""
    blocks = tuple(f"{group.name} {group.block_size}" for group in config.groups)
    rope = f"max_model_len {config.max_model_len}"
    words = (architecture, config.dtype, rope, *blocks, program, *numerics)
    return hash128(fingerprint(config.model), *(word.encode() for word in words))
