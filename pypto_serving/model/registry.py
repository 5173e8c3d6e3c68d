"""Which model families there are, and what a checkpoint directory holds. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.model.contents import STORED_DTYPES, read_contents
from pypto_serving.model.fields import Fields, read_json_file
from pypto_serving.model.quantization import SECTION
from pypto_serving.types.model import Contents, ModelSpec
from pypto_serving.util import LazyRegistry

_DEEPSEEK_V4 = "pypto_serving.model.deepseek_v4"
_QWEN3 = "pypto_serving.model.qwen3"

CONFIGS = LazyRegistry(
    "architecture",
    {
        "DeepseekV4ForCausalLM": f"{_DEEPSEEK_V4}.spec:DeepseekV4Config",
        "Qwen3ForCausalLM": f"{_QWEN3}.spec:Qwen3Config",
        "Qwen3MoeForCausalLM": f"{_QWEN3}.spec:Qwen3Config",
    },
)
PROGRAMS = LazyRegistry(
    "architecture",
    {
        "DeepseekV4ForCausalLM": f"{_DEEPSEEK_V4}.program:DeepseekV4Program",
        "Qwen3ForCausalLM": f"{_QWEN3}.program:Qwen3Program",
        "Qwen3MoeForCausalLM": f"{_QWEN3}.program:Qwen3Program",
    },
)
NATIVE_PROGRAMS = LazyRegistry(
    "architecture",
    {
        "DeepseekV4ForCausalLM": f"{_DEEPSEEK_V4}.native:NativeDeepseekV4",
        "Qwen3ForCausalLM": f"{_QWEN3}.native:NativeQwen3",
        "Qwen3MoeForCausalLM": f"{_QWEN3}.native:NativeQwen3",
    },
)

DEFAULT_BLOCK_SIZE = 32
"""Tokens per KV block: what a panel of the CPU kernels holds."""

SERVING_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What serves an architecture: a torch-free config class, and a torch program that is imported on demand."""

    architecture: str

    @property
    def config(self) -> Any:
        """Class that parses config.json and lists tensors and KV groups."""
        return CONFIGS.load(self.architecture)

    @property
    def program(self) -> Any:
        """Class that loads and runs the model; importing it imports torch."""
        return PROGRAMS.load(self.architecture)

    @property
    def native_program(self) -> Any:
        """Class that runs the model on the CPU kernels."""
        return NATIVE_PROGRAMS.load(self.architecture)


def model_family(architecture: str) -> ModelFamily:
    """The family that serves `architecture`; raises ModelError that lists the supported ones."""
    if architecture not in CONFIGS.names():
        supported = ", ".join(CONFIGS.names())
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {supported}")
    return ModelFamily(architecture)


def load_config(model_dir: str | Path) -> tuple[str, Any]:
    """(architecture, parsed config) of a checkpoint directory; raises ModelError."""
    path = Path(model_dir) / "config.json"
    raw = read_json_file(path)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures is {names!r}, but must name one")
    return names[0], model_family(names[0]).config.from_json(raw, str(path))


def load_spec(model_dir: str | Path, dtype: str = "auto", block_size: int = DEFAULT_BLOCK_SIZE) -> ModelSpec:
    """Read what a checkpoint directory holds, without its weights.

    `dtype` is `auto`, `bfloat16` or `float32`; auto is the checkpoint's own, with float16 served as bfloat16, and
    bfloat16 beside int8 weights.
    Raises ModelError for a missing or invalid config.json and for architectures and values not supported.
    """
    architecture, config = load_config(model_dir)
    serving = serving_dtype(model_dir, dtype)
    spec: ModelSpec = config.spec(str(model_dir), architecture, serving, block_size)
    return spec


def load_contents(model_dir: str | Path) -> Contents:
    """What a checkpoint directory holds, by what is there of it: files, an index, or config.json alone.

    Raises ModelError as `load_spec` does, and for a damaged index.
    """
    return read_contents(model_dir, load_config(model_dir)[1], stored_dtype(model_dir))


def stored_dtype(model_dir: str | Path) -> str:
    """The dtype that config.json names for weights that are not quantised: bfloat16, float16 or float32."""
    path = Path(model_dir) / "config.json"
    fields = Fields(read_json_file(path), str(path))
    stored = fields.get("dtype", "torch_dtype") or ("float32" if fields.get(SECTION) is None else "bfloat16")
    fields.require(stored in tuple(STORED_DTYPES), "dtype", stored, "float32, bfloat16 or float16")
    return str(stored)


def serving_dtype(model_dir: str | Path, dtype: str = "auto") -> str:
    """The dtype that weights, activations and KV are served in."""
    if dtype == "auto":
        quantised = read_json_file(Path(model_dir) / "config.json").get(SECTION) is not None
        stored = stored_dtype(model_dir)
        dtype = "bfloat16" if quantised or stored == "float16" else stored
    if dtype not in SERVING_DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose auto, {' or '.join(SERVING_DTYPES)}")
    return dtype
