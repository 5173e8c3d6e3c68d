"""Choose what is rounded to int8 beside the weights, where they leave a choice. Only the CPU kernels do so.

A rounded output layer embeds tokens too where both are tied: a bf16 table beside it would take more memory than without
the option. On the bundled model logits are off by 0.7 % in bf16, by 1.1 % with only the products in int8, and by
1.3 % like this.
"""

from __future__ import annotations

from typing import Any

from pypto_serving.errors import ConfigError
from pypto_serving.setup.settings import Settings
from pypto_serving.types.model import ModelSpec

_OBSTACLES = {
    "activations": "only 4-bit weights leave a choice",
    "head": "this model has no output layer of bf16 that can be rounded",
    "kv_dtype": "the KV cache of this model has a form of its own",
}
"""Why a model leaves no choice, by option."""


def choose_precision(settings: Settings, model: ModelSpec, kernels: str) -> dict[str, Any]:
    """Choose the fields of EngineConfig. The KV groups of `model` have the dtype that was asked for already.

    Raises ConfigError for a value that the model, or torch if that was chosen, does not leave open.
    """
    _choose_kv_dtype(settings, model, kernels)
    return {
        "activations": _choose(settings, model, kernels, "activations", "int8", "default for 4-bit weights"),
        "head": _choose(settings, model, kernels, "head", "auto", "default: as it is stored"),
    }


def _choose(settings: Settings, model: ModelSpec, kernels: str, name: str, default: str, reason: str) -> Any:
    given, obstacle = getattr(settings.options, name) or "auto", _obstacle(model, kernels, name)
    if obstacle and given != "auto":
        raise ConfigError(f"{settings.options.label(name)} is {given}, but {obstacle}; drop it")
    value = default if given == "auto" else given
    settings.record(name, "auto" if obstacle else value, obstacle or settings.origin_or(name, reason))
    return value


def _choose_kv_dtype(settings: Settings, model: ModelSpec, kernels: str) -> None:
    options, computed = settings.options, "bf16" if model.dtype == "bfloat16" else model.dtype
    given, obstacle = options.kv_dtype or "auto", _obstacle(model, kernels, "kv_dtype")
    if given == "bf16" != computed:
        obstacle = f"the model computes in {computed}, and keeps that"
    if obstacle and given not in ("auto", computed):
        raise ConfigError(f"{options.label('kv_dtype')} is {given}, but {obstacle}; drop it")
    value = computed if given == "auto" else given
    settings.record("kv_dtype", value, settings.origin_or("kv_dtype", "default: as the model computes"))


def _obstacle(model: ModelSpec, kernels: str, name: str) -> str:
    if name not in model.choices:
        return _OBSTACLES[name]
    return "torch computes, and rounds nothing to int8" if kernels == "torch" else ""
