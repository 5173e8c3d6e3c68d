"""The registry of model families, and the entry points that read a checkpoint folder. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.model.contents import STORED_DTYPES, Inventory, read_contents
from pypto_serving.model.family import ModelFamily
from pypto_serving.model.fields import Fields, read_json_file
from pypto_serving.model.quantization import SECTION
from pypto_serving.types.model import SERVING_DTYPES, Contents, ModelSpec
from pypto_serving.util import LazyRegistry

FAMILIES = LazyRegistry(
    "architecture",
    {
        "DeepseekV4ForCausalLM": "pypto_serving.model.deepseek_v4.spec:FAMILY",
        "Qwen3ForCausalLM": "pypto_serving.model.qwen3.spec:FAMILY",
        "Qwen3MoeForCausalLM": "pypto_serving.model.qwen3.spec:FAMILY",
    },
)

DEFAULT_BLOCK_SIZE = 32
"""Tokens per KV block: one panel of the CPU kernels."""


def model_family(architecture: str) -> ModelFamily:
    """Return the family that serves `architecture`; raise ModelError that lists the supported ones."""
    if architecture not in FAMILIES.names():
        supported = ", ".join(FAMILIES.names())
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {supported}")
    family = FAMILIES.load(architecture)
    assert isinstance(family, ModelFamily)
    return family


def load_config(model_dir: str | Path) -> tuple[str, Any]:
    """Read architecture and configuration of a checkpoint folder; raise ModelError."""
    path = Path(model_dir) / "config.json"
    raw = read_json_file(path)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures is {names!r}, but must name one")
    return names[0], model_family(names[0]).parse(raw, str(path))


def load_inventory(model_dir: str | Path) -> Inventory:
    """Read which tensors config.json implies; raise ModelError."""
    architecture, config = load_config(model_dir)
    return model_family(architecture).inventory(config)


def load_spec(model_dir: str | Path, dtype: str = "auto", block_size: int = DEFAULT_BLOCK_SIZE) -> ModelSpec:
    """Read what a checkpoint folder holds, without its weights.

    `dtype` is `auto`, `bfloat16` or `float32`; auto is the checkpoint's own, with float16 served as bfloat16, and
    bfloat16 beside int8 weights.
    Raises ModelError for a missing or invalid config.json and for architectures and values not supported.
    """
    architecture, config = load_config(model_dir)
    serving = serving_dtype(model_dir, dtype)
    return model_family(architecture).spec(config, str(model_dir), architecture, serving, block_size)


def load_contents(model_dir: str | Path) -> Contents:
    """List what a checkpoint folder holds, by the best source that is there: files, an index, or config.json alone.

    Raises ModelError as `load_spec` does, and for a damaged index.
    """
    return read_contents(model_dir, load_inventory(model_dir), stored_dtype(model_dir))


def stored_dtype(model_dir: str | Path) -> str:
    """Read the dtype that config.json names for weights that are not quantised: bfloat16, float16 or float32."""
    path = Path(model_dir) / "config.json"
    fields = Fields(read_json_file(path), str(path))
    stored = fields.get("dtype", "torch_dtype") or ("float32" if fields.get(SECTION) is None else "bfloat16")
    fields.require(stored in tuple(STORED_DTYPES), "dtype", stored, "float32, bfloat16 or float16")
    return str(stored)


def serving_dtype(model_dir: str | Path, dtype: str = "auto") -> str:
    """Decide the dtype that weights, activations and KV are served in."""
    if dtype == "auto":
        quantised = read_json_file(Path(model_dir) / "config.json").get(SECTION) is not None
        stored = stored_dtype(model_dir)
        dtype = "bfloat16" if quantised or stored == "float16" else stored
    if dtype not in SERVING_DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose auto, {' or '.join(SERVING_DTYPES)}")
    return dtype
