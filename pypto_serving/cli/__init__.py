"""The command line. `main()` runs one command; an error becomes one line and an exit code."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from pypto_serving.errors import EXIT_CRASH, EXIT_OK, EXIT_USAGE, PyptoError

EXIT_INTERRUPTED = 130
STARTED_S = time.monotonic()
_VALIDATOR = re.compile(r"^(Invalid value for [^:]*: )Value error, ")
"""The beginning of messages from pydantic, with which typer checks values."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit code."""
    from pypto_serving.cli.app import app

    try:
        code = typer.main.get_command(app).main(argv, prog_name=_program_name(), standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_VALIDATOR.sub(r"\1", error.format_message()), EXIT_USAGE)
    except PyptoError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # nobody reads it any more, so there is nothing to flush
        return EXIT_CRASH
    return code if isinstance(code, int) else EXIT_OK


def _program_name() -> str:
    """Return the name of the console script that was called; shell completion needs it."""
    called = Path(sys.argv[0]).name
    return called if called in ("pypto", "pypto-serving") else "pypto-serving"


def _fail(message: str, code: int) -> int:
    if message.strip():  # empty where help was shown instead
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
