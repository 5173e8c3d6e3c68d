"""The tree of commands. A command's module is imported when the command runs, or for its `--help`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "serve": ("Serve", "pypto_serving.cli.serve:app"),
    "join": ("Serve", "pypto_serving.cli.join:app"),
    "generate": ("Use", "pypto_serving.cli.generate:app"),
    "run-batch": ("Use", "pypto_serving.cli.run_batch:app"),
    "chat": ("Use", "pypto_serving.cli.chat:app"),
    "complete": ("Use", "pypto_serving.cli.complete:app"),
    "check": ("Prepare", "pypto_serving.cli.check:app"),
    "convert": ("Prepare", "pypto_serving.cli.convert:app"),
    "kv": ("Look after", "pypto_serving.cli.kv:kv_app"),
    "bench": ("Look after", "pypto_serving.cli.bench:bench_app"),
    "collect-env": ("Look after", "pypto_serving.cli.collect_env:app"),
}
"""Commands in the order of the help: the heading under which it lists each, and where it is."""


class LazyCommands(MutableMapping[str, Any]):
    """Commands by name; a command's module is imported when the command is looked up."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            panel, where = COMMANDS[name]
            module, attribute = where.split(":")
            commands: typer.Typer = getattr(importlib.import_module(module), attribute)
            single = len(commands.registered_commands) == 1
            command: Any = typer.main.get_command(commands) if single else typer.main.get_group(commands)
            command.name = name
            command.rich_help_panel = panel
            self._loaded[name] = command
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """A group whose commands are LazyCommands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)


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
