"""Settings: decided values with the reason for each, as `check` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pypto_serving.setup.option_table import RULES
from pypto_serving.setup.options import Options, flag


class Setting(msgspec.Struct, frozen=True):
    """One decided value and the reason for it, for people to read.

    The reason begins with `given` for what the user gave, and with `default` where nothing else was considered.
    """

    name: str
    value: str | int | float | bool
    reason: str

    @property
    def is_given(self) -> bool:
        """Return whether the user gave it."""
        return self.reason.startswith("given ")

    @property
    def is_decided(self) -> bool:
        """Return whether the model or the machine decided it."""
        return not (self.is_given or self.reason.startswith("default"))


class Settings:
    """Owns the settings and warnings of one resolution; they grow as values are picked."""

    def __init__(self, options: Options, defaults: Mapping[str, Any]) -> None:
        self.options = options
        self.defaults = defaults
        self.warnings: list[str] = []
        self._recorded: list[Setting] = []

    def pick(self, name: str, default: Any, reason: str) -> Any:
        """Return the user's value of option `name`, or `default` for `reason`, and record it."""
        given = getattr(self.options, name)
        value = default if given is None else given
        self.record(name, value, reason if given is None else self.options.origin(name))
        return value

    def pick_fixed(self, name: str, reason: str = "default") -> Any:
        """Return the user's value of option `name`, or the fixed default, and record it."""
        return self.pick(name, self.defaults[name], reason)

    def record(self, name: str, value: str | int | float | bool, reason: str) -> None:
        """Record the value of option `name`."""
        self._recorded.append(Setting(flag(name), value, reason))

    def origin_or(self, name: str, reason: str) -> str:
        """Return where the user gave option `name`, or `reason` if it was not given."""
        return reason if getattr(self.options, name) in (None, "auto") else self.options.origin(name)

    def in_order(self) -> tuple[Setting, ...]:
        """List all settings in the order of the options."""
        order = {flag(name): i for i, name in enumerate(RULES)}
        return tuple(sorted(self._recorded, key=lambda setting: order[setting.name]))
