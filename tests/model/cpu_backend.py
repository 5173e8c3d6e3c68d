"""Programs that the CPU backend prepares, and the memory they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.model.registry import Serving, load_spec
from pypto_serving.types.config import EngineConfig
from tests.configs import change_config, make_config


def config_for(path: Path, dtype: str = "float32", **changes: Any) -> EngineConfig:
    spec = load_spec(path, Serving(dtype))
    config = make_config(
        model=str(path),
        backend="cpu",
        dtype=dtype,
        vocab_size=spec.vocab_size,
        groups=spec.kv_groups,
        num_blocks=(40,),
        max_model_len=512,
        num_threads=1,
        kernels="torch",
    )
    return change_config(config, **changes)


def prepare(config: EngineConfig) -> Any:
    return CpuBackend(config).prepare(lambda *_: None)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
