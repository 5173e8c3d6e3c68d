"""Choose what is rounded to int8 beside the weights, where they leave a choice. Only the CPU kernels do so."""

from __future__ import annotations

from typing import Any, NamedTuple

from pypto_serving.errors import ConfigError
from pypto_serving.setup.settings import Settings
from pypto_serving.types.model import ModelSpec


class _Choice(NamedTuple):
    """The default of an option and the reason for it; and why a model may leave no choice."""

    default: str
    reason: str
    obstacle: str


_CHOICES = {
    "activations": _Choice("int8", "default for 4-bit weights", "only 4-bit weights leave a choice"),
    "head": _Choice("auto", "default: as it is stored", "this model has no output layer of bf16 that can be rounded"),
}


def choose_precision(settings: Settings, model: ModelSpec, kernels: str) -> dict[str, Any]:
    """Choose the fields of EngineConfig.

    Raises ConfigError for an option that neither the model nor torch, if that was chosen, leaves open.
    """
    return {name: _choose(settings, model, kernels, name, choice) for name, choice in _CHOICES.items()}


def _choose(settings: Settings, model: ModelSpec, kernels: str, name: str, choice: _Choice) -> Any:
    given = getattr(settings.options, name) or "auto"
    torch = "torch computes, and rounds nothing to int8" if kernels == "torch" else ""
    obstacle = torch if name in model.choices else choice.obstacle
    if obstacle and given != "auto":
        raise ConfigError(f"{settings.options.label(name)} is {given}, but {obstacle}; drop it")
    value = choice.default if given == "auto" else given
    settings.record(name, "auto" if obstacle else value, obstacle or settings.origin_or(name, choice.reason))
    return value
