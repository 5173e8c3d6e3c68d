"""The tree of commands. A command's module is imported when the command runs, or for its `--help`."""

from __future__ import annotations

import copy
import functools
import json
import pkgutil
import re
from collections import UserDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pypto_serving.errors import ConfigError
from pypto_serving.util import parse_json

COMMANDS = {
    "serve": ("Serve", "pypto_serving.cli.serve:serve"),
    "join": ("Serve", "pypto_serving.cli.serve:join"),
    "generate": ("Use", "pypto_serving.cli.generate:generate"),
    "run-batch": ("Use", "pypto_serving.cli.run_batch:run_batch"),
    "chat": ("Use", "pypto_serving.cli.chat:chat"),
    "complete": ("Use", "pypto_serving.cli.chat:complete"),
    "check": ("Prepare", "pypto_serving.cli.check:check"),
    "convert": ("Prepare", "pypto_serving.cli.convert:convert"),
    "models": ("Look after", "pypto_serving.cli.models:models_app"),
    "kv": ("Look after", "pypto_serving.cli.kv:kv_app"),
    "bench": ("Look after", "pypto_serving.cli.bench:bench_app"),
    "collect-env": ("Look after", "pypto_serving.cli.collect_env:collect_env"),
}
"""Commands in the order of the help: for each, its heading in the help, and its function or group."""


class LazyCommands(UserDict[str, Any]):
    """Commands by name; a command's module is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], tuple):
            panel, where = self.data[name]
            found = pkgutil.resolve_name(where)
            if isinstance(found, typer.Typer):
                command: Any = typer.main.get_group(found)
            else:
                alone = typer.Typer(add_completion=False)
                alone.command(cls=HelpCommand)(found)
                command = typer.main.get_command(alone)
            command.name, command.rich_help_panel = name, panel
            self.data[name] = command
        return self.data[name]


class LazyGroup(TyperGroup):
    """A group whose commands are LazyCommands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands(COMMANDS)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` among them."""
        return _converting_less(super().get_params(ctx))


app = typer.Typer(cls=LazyGroup, name="pypto-serving", context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(wanted: bool) -> None:
    if wanted:
        from pypto_serving import __version__

        typer.echo(f"pypto-serving {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve and run large language models: paged KV cache, continuous batching, OpenAI-compatible API."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class HelpCommand(TyperCommand):
    """A command that reads options as vLLM does.

    They may have underscores, several values after one that may repeat, and keys of an object (`--hf-overrides.a.b 1`).

    Its help lists both names of a switch in one column, to leave room for long names.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, `--help` among them."""
        return _converting_less(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        known = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        dashed = [re.sub("^--[^=.]*", lambda name: name[0].replace("_", "-"), arg) for arg in args]
        args = [new if re.split("[=.]", new)[0] in known else arg for arg, new in zip(args, dashed, strict=True)]
        args = _joined_keys(args, known)
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        if rest or (values.get("model") and values.get("model_argument")):
            args = _repeated(args, {name for each in self.params if each.multiple for name in each.opts})
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        shown = copy.copy(self)
        shown.params = [_in_one_column(parameter) for parameter in self.params]
        TyperCommand.format_help(shown, ctx, formatter)


def _converting_less(parameters: list[Any]) -> list[Any]:
    """Keep texts and what was not given as they are; for other values, typer imports pydantic and builds validators."""
    for each in parameters:
        if each.default is None and not each.required and not isinstance(each.process_value, functools.partial):
            each.process_value = functools.partial(_convert, each.process_value, each.type_descriptor.annotation is str)
    return parameters


def _convert(convert: Callable[[Any, Any], Any], is_text: bool, ctx: Any, value: Any) -> Any:
    if value is None or value == ():
        return None
    return value if is_text and isinstance(value, str) else convert(ctx, value)


def _joined_keys(args: Sequence[str], known: Container[str]) -> list[str]:
    """Write `--name.key value` of a `known` option as `--name JSON`; `key+` has a list, of values between commas.

    A value that is no JSON is text. Raises ConfigError for one that is missing, or has no room beside others.
    """
    objects: dict[str, dict[str, Any]] = {}
    kept, rest = [], iter(args)
    for arg in rest:
        head, equals, value = arg.partition("=")
        name, *keys = head.split(".")
        if not keys or name not in known:
            kept.append(arg)
            continue
        text = value if equals else next(rest, "--")
        inner: Any = objects.setdefault(name, {})
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
        last, is_list = keys[-1].removesuffix("+"), keys[-1].endswith("+")
        held: Any = inner.get(last, [] if is_list else None) if isinstance(inner, dict) else ""
        if (not equals and text.startswith("--")) or not isinstance(held, list if is_list else type(None)):
            raise ConfigError(f"{head} needs one value; give it once, and not also a key within it or around it")
        inner[last] = [*(held or ()), *map(_value_of, text.split(","))] if is_list else _value_of(text)
    whole = {arg.partition("=")[0] for arg in kept}
    if twice := next((name for name in objects if name in whole), None):
        raise ConfigError(f"{twice} is given whole and by its keys; choose one way")
    return [*kept, *(f"{name}={json.dumps(value)}" for name, value in objects.items())]


def _value_of(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _repeated(args: Iterable[str], names: Container[str]) -> list[str]:
    """Write an option of `names` before each of the values that follow it."""
    written: list[str] = []
    option = ""
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in names else ""
        elif option and written[-1] != option:
            written.append(option)
        written.append(arg)
    return written


def _in_one_column(parameter: Any) -> Any:
    if not parameter.secondary_opts:
        return parameter
    shown = copy.copy(parameter)
    shown.opts, shown.secondary_opts = ["\n".join((*parameter.opts, *parameter.secondary_opts))], []
    return shown
