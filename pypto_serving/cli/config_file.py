"""Read a configuration file, in YAML or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import read_keys, read_text
from pypto_serving.setup.rules import TEXT

INT, FLOAT, TIMESTAMP = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
PLAIN_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,99})$|0x[0-9a-fA-F]{1,99}$")
PLAIN_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


class Loader(yaml.SafeLoader):
    """Reads only plain numbers as numbers. `80:00`, `017`, dates and very long numbers stay text, to be checked later.

    In YAML 1.1, `80:00` is 4800 (base 60), and `017` is 15 (octal).
    """


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT, FLOAT, TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(INT, PLAIN_INT, list("-+0123456789"))
Loader.add_implicit_resolver(FLOAT, PLAIN_FLOAT, list("-+0123456789."))
Loader.add_constructor(INT, lambda loader, node: int(str(node.value), 0))


def read_config(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file; raise ConfigError in one line."""
    text = read_text(path, "--config")
    try:
        node, values = yaml.compose(text, Loader), yaml.load(text, Loader)
    except Exception as error:  # deep nesting, and values that contradict their tag, raise more than YAMLError
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}{place} is neither YAML nor JSON; mend it") from None
    if isinstance(node, yaml.MappingNode):
        _refuse_repeats(path, [(key.value, key.start_mark.line + 1) for key, _ in node.value])
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} holds a {type(values).__name__}, but must hold `option: value` pairs")
    return _with_key(path, values)


def _with_key(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add the API keys in the file named by `api-key-file`."""
    for name in ("api-key-file", "api_key_file"):
        if name in values:
            label = f"{name} in {path.name}"
            try:
                key_file = TEXT.parse(values[name])
            except ValueError:
                raise ConfigError(f"{label} must be the path of a file that holds the API key") from None
            values["api-key"] = read_keys(Path(key_file), label)
    return values


def _refuse_repeats(path: Path, keys: Iterable[tuple[object, int]]) -> None:
    """Raise ConfigError if two keys, given with their lines, name the same option, also in different spellings."""
    seen: dict[str, tuple[object, int]] = {}
    for key, line in keys:
        name = str(key).replace("-", "_")
        if name in seen:
            first, at = seen[name]
            again = "again" if first == key else f"{key}, the same option,"
            raise ConfigError(f"--config {path} gives {first} on line {at} and {again} on line {line}; keep one")
        seen[name] = key, line
    if "api_key" in seen and "api_key_file" in seen:
        (_, first_line), (_, second_line) = sorted((seen["api_key"], seen["api_key_file"]), key=lambda entry: entry[1])
        raise ConfigError(
            f"--config {path} gives api-key and api-key-file, on lines {first_line} and {second_line}; drop one"
        )
