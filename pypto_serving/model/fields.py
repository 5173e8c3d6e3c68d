"""Typed access to a checkpoint's config.json; errors name key and value. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.util import brief, parse_json, read_regular


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelError in one line if it cannot be read."""
    try:
        content = parse_json(read_regular(path))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, but must hold an object")
    return content


MOST = (1 << 31) - 1
"""Limit of whole numbers; real sizes, counts and ids are far smaller."""
MOST_LAYERS, MOST_EXPERTS = 1 << 10, 1 << 17
"""Limits of layers, and of experts in all layers, since their tensors are listed one by one."""


class Fields:
    """Reads one JSON object. A key may have older spellings; null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, *keys: str) -> Any:
        """Return the value of the first of `keys` present, or None."""
        return self.values.get(self._present(keys))

    def section(self, *keys: str) -> Fields:
        """Return the nested object under one of `keys`, empty if absent."""
        value = self.get(*keys)
        self.require(value is None or isinstance(value, dict), self._present(keys), value, "an object")
        return Fields(value or {}, self.source)

    def positive_int(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """Return an integer from 1 to `most`."""
        return self._whole(keys, default, 1, most, f"a positive whole number, at most {most}")

    def natural(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """Return an integer from 0 to `most`."""
        return self._whole(keys, default, 0, most, f"a whole number from 0 to {most}")

    def positive_float(self, *keys: str, default: float | None = None) -> float:
        """Return a number > 0 that float32 holds."""
        value = self._number(keys, default, lambda v: 1e-37 < v < 3e38, "a positive number that float32 holds")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(key)
        self.require(value is None or isinstance(value, bool), key, value, "true or false")
        return default if value is None else bool(value)

    def int_list(self, key: str) -> tuple[int, ...]:
        """Return a list of integers, empty if absent; a single number is a list of one."""
        value = self.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        whole = all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MOST for i in items)
        self.require(whole, key, value, f"whole numbers, at most {MOST}")
        return tuple(items)

    def require(self, holds: bool, key: str, value: object, allowed: str) -> None:
        """Raise ModelError naming `key` and `value` unless `holds`."""
        if not holds:
            raise ModelError(f"{self.source}: {key} is {_shown(value)}, but must be {allowed}")

    def _present(self, keys: tuple[str, ...]) -> str:
        """Return the key that is present, else the first."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def _whole(self, keys: tuple[str, ...], default: int | None, least: int, most: int, allowed: str) -> int:
        value: int = self._number(keys, default, lambda v: isinstance(v, int) and least <= v <= most, allowed)
        return value

    def _number(self, keys: tuple[str, ...], default: Any, holds: Callable[[Any], bool], allowed: str) -> Any:
        value = self.get(*keys)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {keys[0]} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self.require(is_number and holds(value), self._present(keys), value, allowed)
        return value


def _shown(value: object) -> str:
    """Return `value` in the form of the file, cut to 100 characters."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return brief(value)
    return text if len(text) <= 100 else text[:97] + "..."
