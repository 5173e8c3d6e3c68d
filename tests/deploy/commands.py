"""Command lines in files of deploy/."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from pypto_serving.cli.app import app


def check_command(arguments: Sequence[str]) -> None:
    """Parse the arguments of `pypto-serving` as the program does. Raises UsageError for what it does not know."""
    name, *rest = arguments
    group = typer.main.get_command(app)
    with group.make_context("pypto-serving", [name, *rest], resilient_parsing=True) as context:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command is not None, name
        command.make_context(name, [*rest])
