"""Choose what is rounded to int8 beside the weights, where they leave a choice."""

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


_CHOICES = {"activations": _Choice("int8", "default for 4-bit weights", "only 4-bit weights leave a choice")}


def choose_precision(settings: Settings, model: ModelSpec) -> dict[str, Any]:
    """Choose the fields of EngineConfig. Raises ConfigError for an option that the model does not leave open."""
    return {name: _choose(settings, model, name, choice) for name, choice in _CHOICES.items()}


def _choose(settings: Settings, model: ModelSpec, name: str, choice: _Choice) -> Any:
    options = settings.options
    given = getattr(options, name) or "auto"
    if name not in model.choices:
        if given != "auto":
            raise ConfigError(f"{options.label(name)} is {given}, but {choice.obstacle}; drop it")
        settings.record(name, "auto", choice.obstacle)
        return choice.default
    value = choice.default if given == "auto" else given
    settings.record(name, value, settings.origin_or(name, choice.reason))
    return value
