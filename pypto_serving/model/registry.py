"""Model families, by architecture, and the entry points that read a checkpoint folder. Torch-free."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.errors import ModelError
from pypto_serving.model.checkpoint import StoredTensor
from pypto_serving.model.contents import read_contents, read_headers
from pypto_serving.model.fields import Fields
from pypto_serving.model.folder import other_kind
from pypto_serving.model.formats.quantization import SECTION
from pypto_serving.model.inventory import STORED_DTYPES, Inventory
from pypto_serving.model.raw_config import CONFIG_FILE, dtype_of, flattened, overridden, read_raw_config
from pypto_serving.types.kv import DEFAULT_BLOCK_SIZE, KVCacheGroupSpec
from pypto_serving.types.model import SERVING_DTYPES, Contents, ModelSpec
from pypto_serving.util import brief, one_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """The options that decide the form in which a checkpoint is served.

    dtype: `auto`, `bfloat16` or `float32`; auto is the checkpoint's own, but bfloat16 for float16 and for quantized
        weights.
    block_size: tokens per KV block, for groups without a block size of their own.
    head, kv_dtype: `int8` to round the output layer, and keys and values, to int8.
    drafts: whether draft layers are served, too.
    """

    dtype: str = "auto"
    block_size: int = DEFAULT_BLOCK_SIZE
    head: str = "auto"
    kv_dtype: str = "auto"
    drafts: bool = False


DEFAULT_SERVING = Serving()
_READ_APART = ("architectures", "model_type", "dtype", "eos_token_id")
"""Keys of config.json that are read here, not by a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The parts of one model family. Programs are named `module:name` and imported on first use.

    parse(raw, source): parse the object in config.json at `source`. Raises ModelError naming an unsupported key.
    inventory(config, headers): list the tensors that a configuration needs.
    kv_groups(config, dtype, block_size): list the KV groups of a configuration.
    spec(config, serving, headers): describe a checkpoint to the engine, without its path and names; the dtype is not
        `auto`. Here and in `inventory`, `headers`, if any, decide where the configuration is ambiguous.
    card_program: "" if no program runs on NVIDIA cards.
    with_drafts: returns a configuration with its draft layers, or raises ModelError; None for a family without any.
    """

    parse: Callable[[dict[str, Any], str], Any]
    inventory: Callable[..., Inventory]
    kv_groups: Callable[..., tuple[KVCacheGroupSpec, ...]]
    spec: Callable[[Any, Serving, Mapping[str, StoredTensor]], ModelSpec]
    torch_program: str
    kernel_program: str
    conversion: str
    card_program: str = ""
    with_drafts: Callable[[Any], Any] | None = None

    @property
    def program(self) -> Any:
        """Import the class that runs the model in torch, and torch itself."""
        return pkgutil.resolve_name(self.torch_program)

    @property
    def plan_conversion(self) -> Any:
        """Import the function that plans conversions to other formats; see model/convert."""
        return pkgutil.resolve_name(self.conversion)

    @property
    def program_on_cards(self) -> Any:
        """Import the class that runs the model on NVIDIA cards, torch and Triton."""
        return pkgutil.resolve_name(self.card_program)

    @property
    def native_program(self) -> Any:
        """Import the class that runs the model on the CPU kernels."""
        return pkgutil.resolve_name(self.kernel_program)


def refused_dtype(dtype: str) -> tuple[str, str]:
    """Return the option `dtype` and why the CPU kernels refuse its value; both are "" if they accept it."""
    return ("", "") if dtype == "bfloat16" else ("dtype", f"the kernels serve bfloat16 only, not {dtype}")


FAMILIES = {
    "DeepseekV4ForCausalLM": "pypto_serving.model.deepseek_v4.spec:FAMILY",
    "LlamaForCausalLM": "pypto_serving.model.families.llama:FAMILY",
    "Ministral3ForCausalLM": "pypto_serving.model.families.mistral:MINISTRAL3",
    "Mistral3ForConditionalGeneration": "pypto_serving.model.families.mistral:MISTRAL3",
    "MistralForCausalLM": "pypto_serving.model.families.mistral:FAMILY",
    "MixtralForCausalLM": "pypto_serving.model.families.mistral:MIXTRAL",
    "Phi3ForCausalLM": "pypto_serving.model.families.phi3:FAMILY",
    "Qwen2ForCausalLM": "pypto_serving.model.families.qwen2:FAMILY",
    "Qwen3ForCausalLM": "pypto_serving.model.families.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": "pypto_serving.model.families.qwen3:FAMILY",
    "SeedOssForCausalLM": "pypto_serving.model.families.seed_oss:FAMILY",
    "SmolLM3ForCausalLM": "pypto_serving.model.families.smollm3:FAMILY",
}
"""Module and object of each architecture's family, which is imported on first use."""


def model_family(architecture: str) -> ModelFamily:
    """Return the family that serves `architecture`; raise ModelError that lists the supported ones."""
    if architecture not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {supported}")
    family = pkgutil.resolve_name(FAMILIES[architecture])
    assert isinstance(family, ModelFamily)
    return family


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The config.json of a checkpoint folder, read once: its object, and the family's configuration made from it.

    `raw` is what `read_raw_config` made of it, with the values of `overrides`.

    Methods raise ModelError for values that are not supported.
    """

    directory: str
    architecture: str
    family: ModelFamily
    model: Any
    raw: Mapping[str, Any]
    overrides: Mapping[str, Any]

    def stored_dtype(self) -> str:
        """Return the dtype of weights that are not quantised: bfloat16, float16 or float32."""
        fields = Fields(self.raw, str(Path(self.directory) / CONFIG_FILE))
        stored = fields.get("dtype")
        if stored in (None, "auto"):
            found = dtype_of(read_headers(Path(self.directory))[0].values())
            stored = found or ("float32" if fields.get(SECTION) is None else "bfloat16")
        fields.require(stored in tuple(STORED_DTYPES), "dtype", stored, "float32, bfloat16 or float16")
        return str(stored)

    def serving_dtype(self, dtype: str = "auto") -> str:
        """Decide the dtype of weights, activations and KV in serving."""
        if dtype == "auto":
            stored, quantised = self.stored_dtype(), self.raw.get(SECTION) is not None
            dtype = "bfloat16" if quantised or stored == "float16" else stored
        if dtype not in SERVING_DTYPES:
            raise ModelError(f"dtype {dtype!r} is not supported; choose {one_of(['auto', *SERVING_DTYPES])}")
        return dtype

    def spec(self, serving: Serving = DEFAULT_SERVING) -> ModelSpec:
        """Describe the checkpoint to the engine, without its weights. Headers of its files say which are quantised."""
        if unread := getattr(self.model, "unread", ()):
            logger.warning(
                "%s: nothing reads these keys of RoPE: %s", Path(self.directory) / CONFIG_FILE, ", ".join(unread)
            )
        if useless := [".".join(path) for path in _leaves(flattened(self.overrides)) if not self._reads(path)]:
            logger.warning("hf-overrides: nothing reads %s", ", ".join(useless))
        serving = replace(serving, dtype=self.serving_dtype(serving.dtype))
        headers = {} if self.raw.get(SECTION) is None else read_headers(Path(self.directory))[0]
        spec = self.family.spec(self.served_model(serving.drafts), serving, headers)
        fields = Fields(self.raw, str(Path(self.directory) / CONFIG_FILE))
        names = {"path": self.directory, "architecture": self.architecture}
        return msgspec.structs.replace(spec, **names, eos_token_ids=fields.int_list("eos_token_id"))

    def _reads(self, path: Sequence[str]) -> bool:
        """Return whether the value at `path` of config.json matters: whether nonsense there is refused, or noticed."""
        nonsense: Any = "nonsense"
        for key in reversed(path):
            nonsense = {key: nonsense}
        try:
            changed = self.family.parse(overridden(self.raw, nonsense), self.directory)
        except ModelError:
            return True
        return path[0] in _READ_APART or bool(changed != self.model)

    def served_model(self, drafts: bool) -> Any:
        """Return the model, with its draft layers if `drafts`."""
        if not drafts:
            return self.model
        if self.family.with_drafts is None:
            raise ModelError(f"{self.architecture} has no draft layers; look drafts up instead (method ngram)")
        return self.family.with_drafts(self.model)

    def contents(self) -> Contents:
        """Return the contents of the folder, from the best available source: files, an index, or only config.json.

        Raises ModelError also for a damaged index.
        """
        return read_contents(self.directory, partial(self.family.inventory, self.model), self.stored_dtype())


def read_config(model_dir: str | Path, overrides: Mapping[str, Any] | None = None) -> CheckpointConfig:
    """Read the configuration of a checkpoint folder, with the values of `overrides` in it.

    Raises ModelError for one that is missing or not supported.
    """
    raw = read_raw_config(Path(model_dir), overrides or {})
    path = f"{Path(model_dir) / CONFIG_FILE}{' with hf-overrides' if overrides else ''}"
    name = _architecture(raw, path)
    kind, hint = other_kind(Path(model_dir), raw, name, FAMILIES, next(iter(_of_type(raw)), ""))
    if kind:
        raise ModelError(f"{model_dir} is {kind}, which is not served: {name}{hint}")
    family = model_family(name)
    return CheckpointConfig(str(model_dir), name, family, family.parse(raw, path), raw, overrides or {})


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value in an object of objects."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from ((key, *rest) for rest in _leaves(value))
        else:
            yield (key,)


def _architecture(raw: Mapping[str, Any], path: str) -> str:
    """Return the name of the architecture; if it is absent, that of the causal model of `model_type`."""
    names = raw.get("architectures")
    if names is None:
        names = _of_type(raw)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures is {brief(raw.get('architectures'))}, but must name one")
    return names[0]


def _of_type(raw: Mapping[str, Any]) -> list[str]:
    """Return the architecture that is served for `model_type`; empty if there is none."""
    kind = str(raw.get("model_type")).replace("_", "")
    return [name for name in FAMILIES if name.removesuffix("ForCausalLM").lower() == kind]


def load_spec(model_dir: str | Path, serving: Serving = DEFAULT_SERVING) -> ModelSpec:
    """Describe a checkpoint folder without reading its weights. See `CheckpointConfig.spec`."""
    return read_config(model_dir).spec(serving)
