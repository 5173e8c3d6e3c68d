"""A small model, a machine, and the resolved configuration of both."""

from __future__ import annotations

from typing import Any

from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.types.kv import FullSpec, KVCacheGroupSpec, KVTensorSpec, StateSpec, WindowSpec
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import GIB

MIB = 1 << 20
HOST = HostFacts(available_bytes=16 * GIB, num_cpus=4)
WITH_KERNELS = HostFacts(available_bytes=16 * GIB, num_cpus=4, kernels=("avx2", "portable"))
FULL = FullSpec(
    name="full",
    block_size=16,
    tensors=(KVTensorSpec(name="kv", layers=(0, 1), dtype="bfloat16", row_shape=(2, 64)),),
)
WINDOW = WindowSpec(
    name="window",
    block_size=32,
    window=100,
    tensors=(KVTensorSpec(name="kv", layers=(2, 3, 4), dtype="bfloat16", row_shape=(96,)),),
)
STATE = StateSpec(
    name="state",
    block_size=4,
    period=8,
    overlap=4,
    tensors=(KVTensorSpec(name="state", layers=(0,), dtype="float32", row_shape=(32,)),),
)
GROUPS = ((FULL,), (FULL, WINDOW), (STATE, FULL, WINDOW), (WINDOW,))


def make_model(groups: tuple[KVCacheGroupSpec, ...] = (FULL,), **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "path": "models/small",
        "architecture": "Small",
        "dtype": "bfloat16",
        "num_layers": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "num_parameters": 10**6,
        "weight_bytes": 2 * 10**6,
    }
    return ModelSpec(kv_groups=groups, **{**values, **changes})


def make_resolved(model: ModelSpec | None = None, facts: HostFacts = HOST, /, **options: Any) -> Resolved:
    return resolve(Options(**options), model or make_model(), facts)


def setting(resolved: Resolved, name: str) -> tuple[Any, str]:
    return next((s.value, s.reason) for s in resolved.settings if s.name == name)
