"""Options that a user gives by flag, configuration file or Python call, and the settings decided from them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.setup.option_table import ALIASES, ENVIRONMENT, REASONS, RULES, SERVER_OPTIONS, TABLE
from pypto_serving.setup.rules import SIZE, TEXT, TEXTS, Rule
from pypto_serving.setup.vllm_options import HARMLESS, REFUSED, VALUES, VLLM_ONLY
from pypto_serving.types.api_keys import read_api_keys
from pypto_serving.util import brief, format_size

_VARIABLES = {**ENVIRONMENT, **dict.fromkeys(("host", "port", "uds"), "LISTEN_FDS")}
"""Variables that messages name for options of `from_environment`; addresses come from the service manager's socket."""
KEY_FILE = "api_key_file"
"""Key, among given options, of the file from which `api_key` was read."""
_Given = msgspec.defstruct("_Given", [(row.name, Any, None) for row in TABLE], frozen=True, kw_only=True)


class Options(_Given, frozen=True, kw_only=True):  # type: ignore[misc,valid-type,call-arg]
    """The options that the user gave; None means not given. Values are checked and normalised here.

    `from_file` lists options given by the configuration file `config_file`, `from_environment` options given by
    environment variables; the others are flags or, with `as_arguments`, arguments of a Python call. `api_key_file` is
    the file from which `api_key` was read, if any. `notes` tell what options of vLLM mean here. Raises ConfigError, in
    one line that names the option, its value and the allowed values.
    """

    api_key_file: str = ""
    config_file: str = ""
    from_file: frozenset[str] = frozenset()
    from_environment: frozenset[str] = frozenset()
    as_arguments: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = getattr(self, name)
            if value is not None:
                msgspec.structs.force_setattr(self, name, self._parse(name, rule, value))

    def _parse(self, name: str, rule: Rule, value: object) -> Any:
        try:
            return rule.parse(value)
        except (ValueError, OverflowError):
            if name == "api_key":
                raise ConfigError(f"{self.label(name)} {_what_is_wrong(value, rule)}") from None
            shown = _shorten(_text(value)) or "empty"
            quotes = "; put it in quotes" if rule in (TEXT, TEXTS) and isinstance(value, int | float) else ""
            raise ConfigError(f"{self.label(name)} is {shown}, but must be {rule.allowed}{quotes}") from None

    @property
    def given_length(self) -> int | None:
        """Return the given `max_model_len`; None if there is none, or it is auto."""
        return None if self.max_model_len == "auto" else self.max_model_len

    def label(self, name: str, beside: str = "") -> str:
        """Return the name of option `name` in the form in which it was given: flag, key in the file, or argument.

        If it was not given, use the form of option `beside`, else the file's if that gave any option.
        """
        if name in self.from_environment:
            return _VARIABLES[name]
        shown = f"{flag(KEY_FILE)} {self.api_key_file}" if name == "api_key" and self.api_key_file else flag(name)
        if self._filed(name, beside):
            return f"{shown} in {self.config_file}"
        if self.as_arguments:
            return name
        return "MODEL" if name == "model" else "--" + shown

    def refusal(self, name: str, problem: str) -> ConfigError:
        """Return the error that option `name`, in the form in which it was given, has a `problem`."""
        return ConfigError(f"{self.label(name)} {problem}")

    def giving(self, name: str, value: object, beside: str = "") -> str:
        """Return option `name` with `value` in the form of `label`; True and False are values of a switch."""
        if self._filed(name, beside):
            return f"{flag(name)}: {str(value).lower() if isinstance(value, bool) else value} in {self.config_file}"
        if self.as_arguments:
            return f"{name}={value}"
        if isinstance(value, bool):
            return f"--{'' if value else 'no-'}{flag(name)}"
        return f"--{flag(name)} {value}"

    def _filed(self, name: str, beside: str) -> bool:
        """Return whether option `name` was given, or should be given, in the configuration file."""
        if getattr(self, name) is not None:
            return name in self.from_file
        return beside in self.from_file if beside else bool(self.from_file)

    def origin(self, name: str) -> str:
        """Return the source of option `name`'s value, as the reason for a setting."""
        return f"given in {self.config_file}" if name in self.from_file else f"given by {self.label(name)}"


def flag(name: str) -> str:
    """Return the name of an option as users write it: `max-model-len` for `max_model_len`."""
    return name.replace("_", "-")


def make_options(
    given: Mapping[str, Any],
    file_values: Mapping[str, Any] | None = None,
    config_file: str = "",
    *,
    environment: Mapping[str, str] | None = None,
    as_arguments: bool = False,
) -> Options:
    """Make options from `given` values, which win, then a configuration file, then the `environment`.

    None counts as not given; names may be written with dashes. `api_key_file` names the file of `api_key`. Messages
    name `given` values as flags or, `as_arguments`, as arguments of a Python call, which starts no server. Raises
    ConfigError for a bad value, an unknown name, an option given twice, or an argument that only a server uses.
    """
    notes: list[str] = []
    direct = _known(given, "", notes, as_arguments)
    filed = _known(file_values or {}, f" in {config_file}", notes)
    if "api_key" in direct:
        filed.pop(KEY_FILE, None)
    from_file = frozenset(filed.keys() - direct.keys())
    found = {name: (environment or {}).get(variable) for name, variable in ENVIRONMENT.items()}
    ambient = {name: value for name, value in found.items() if value is not None and name not in direct.keys() | filed}
    return Options(
        **{**filed, **direct, **ambient},
        config_file=config_file,
        from_file=from_file,
        from_environment=frozenset(ambient),
        as_arguments=as_arguments,
        notes=tuple(notes),
    )


def _known(values: Mapping[str, Any], where: str, notes: list[str], as_arguments: bool = False) -> dict[str, Any]:
    """Return the values of known options by name; add what values of vLLM mean here to `notes`. Raises ConfigError."""
    known: dict[str, Any] = {}
    written: dict[str, object] = {}
    for key, value in values.items():
        alias = _text(key).replace("-", "_")
        name = ALIASES.get(alias, alias)
        if name in VLLM_ONLY:
            if value is not None:
                if name in REFUSED and _text(value) not in HARMLESS:
                    shown = name if as_arguments else f"{'' if where else '--'}{flag(name)}{where}"
                    raise ConfigError(f"{shown} is an option of vLLM that is not here; {REFUSED[name]}")
                notes.append(f"{flag(name)} (no effect)")
            continue
        if name not in RULES and (as_arguments or name != KEY_FILE):
            raise ConfigError(f"unknown option {_shorten(brief(key))}{where}; {_hint(name, as_arguments)}")
        if value is None:
            continue
        if name in known:
            raise ConfigError(f"{written[name]} and {key}{where} are the same option; keep one")
        if alias.startswith("disable_") and isinstance(value, bool):
            value = not value
        if isinstance(value, str | int) and (ours := VALUES.get(name, {}).get(value)):
            notes.append(f"{flag(name)} {value} (here {ours})")
            value = ours
        known[name], written[name] = value, key
    if as_arguments and (useless := sorted(known.keys() & SERVER_OPTIONS)):
        raise ConfigError(f"LLM starts no server; leave out {' and '.join(useless)}, which only a server uses")
    return known


def _hint(name: str, as_arguments: bool) -> str:
    """Suggest an option for the unknown `name`, or list all options."""
    write = str if as_arguments else flag
    names = [name for name in RULES if name not in SERVER_OPTIONS] if as_arguments else [*RULES, KEY_FILE]
    switch = name.removeprefix("no_")
    if switch != name and switch in RULES and RULES[switch].is_switch:
        return f"did you mean {switch}=False?" if as_arguments else f"did you mean {flag(switch)}: false?"
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {write(close[0])}?" if close else "known are: " + ", ".join(map(write, names))


def _what_is_wrong(given: object, rule: Rule) -> str:
    """Describe what is wrong with API keys without showing them."""
    keys = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(key, str) for key in keys):
        return "is not text, but must be; put it in quotes"
    if not keys or not all(map(str.strip, keys)):
        return f"is empty, but must be {rule.allowed}"
    try:
        read_api_keys(map(str, keys))
    except ValueError as error:
        return str(error)
    return "is not one line of characters that can be printed, but must be"


def _text(value: object) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, deep nesting
        return brief(value)


def _shorten(text: str) -> str:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= 80 else line[:77] + "..."


class Setting(msgspec.Struct, frozen=True):
    """One decided value and the reason for it, for people to read.

    The reason begins with `given` for values of the user, and with `default` if nothing else was considered.
    """

    name: str
    value: str | int | float | bool
    reason: str

    @property
    def is_given(self) -> bool:
        """Return whether the user gave the value."""
        return self.reason.startswith("given ")

    @property
    def is_decided(self) -> bool:
        """Return whether the model or the machine decided the value."""
        return not (self.is_given or self.reason.startswith("default"))


class Settings:
    """Owns the settings and warnings of one resolution, added as values are decided."""

    def __init__(self, options: Options, defaults: Mapping[str, Any]) -> None:
        self.options = options
        self.defaults = defaults
        self.warnings: list[str] = []
        self._recorded: list[Setting] = []

    def pick(self, name: str, default: Any, reason: str) -> Any:
        """Return the user's value of option `name`, or `default` for `reason`, and record it."""
        given = getattr(self.options, name)
        value = default if given is None else given
        shown = format_size(value) if RULES[name] is SIZE else value
        self.record(name, shown, reason if given is None else self.options.origin(name))
        return value

    def pick_fixed(self, name: str) -> Any:
        """Return the user's value of option `name`, or the fixed default, and record it."""
        return self.pick(name, self.defaults[name], REASONS.get(name, "default"))

    def pick_fields(self, part: type[msgspec.Struct]) -> dict[str, Any]:
        """Return the values of all fields of a `part` of the configuration whose options have fixed defaults."""
        picked = {}
        for field in msgspec.structs.fields(part):
            if (name := field.name.removesuffix("_s")) in self.defaults:
                value = self.pick_fixed(name)
                picked[field.name] = "" if value is False and field.default == "" else value
        return picked

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


MAX_CHARS = 1 << 20


def read_text(path: Path, flag: str) -> str:
    """Read the file at `path`, the value of `flag`. Raises ConfigError in one line.

    A FIFO, such as the shell's `<(command)`, is read to its end; without a writer it is empty.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(file, True)
        with os.fdopen(file, encoding="utf-8") as stream:
            text = stream.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from None
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{flag} {path} cannot be read: it has more than {MAX_CHARS} characters")
    return text


def read_keys(path: Path, flag: str) -> list[str]:
    """Read a file of API keys, one per line; skip empty lines and lines that begin with `#`.

    Raises ConfigError like `read_text`; the rule of `api_key` checks the keys.
    """
    lines = (line.strip() for line in read_text(path, flag).split("\n"))
    return [line for line in lines if line and not line.startswith("#")]
