"""Run a command line, and keep what it prints."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from pypto_serving.cli import main


class CommandResult(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*arguments: object) -> CommandResult:
    """Run `pypto-serving bench` with `arguments`, written as text."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["bench", *map(str, arguments)])
    return CommandResult(code, out.getvalue(), err.getvalue())
