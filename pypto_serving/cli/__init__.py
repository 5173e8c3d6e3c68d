"""The command line. `main()` runs one command; an error becomes one line and an exit code."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import typer

from pypto_serving.errors import EXIT_CRASH, EXIT_OK, EXIT_USAGE, PyptoError
from pypto_serving.logs import with_fields, writes_json
from pypto_serving.processes import reset_inherited
from pypto_serving.util import one_of

EXIT_INTERRUPTED = 130
STARTED_S = time.monotonic()
_VALIDATOR = re.compile(r"^(Invalid value for [^:]*: )Value error, ")
"""The beginning of messages from pydantic, with which typer checks values."""
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Reasons why a write fails. Commands name the files that they write, so an error without a name is about stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit code."""
    reset_inherited()
    _open_streams()
    try:
        code = _run(argv)
    except typer.TyperException as error:
        code = _fail(_VALIDATOR.sub(r"\1", _message(error)), EXIT_USAGE)
    except PyptoError as error:
        code = _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except OSError as error:
        return _refused(error)
    return _flushed(code)


def _open_streams() -> None:
    """Replace stdin, stdout and stderr that are closed, so that no other file gets their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    from pypto_serving.cli.app import app

    code = typer.main.get_command(app).main(argv, prog_name=_program_name(), standalone_mode=False)
    return code if isinstance(code, int) else EXIT_OK


def _message(error: typer.TyperException) -> str:
    """Return what an error says. Of options, those are proposed that are like the given one, not only in its dashes."""
    given, proposed = getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ()
    if not proposed:
        return error.format_message()
    names = {option.lstrip("-"): option for option in proposed}
    near = [names[name] for name in difflib.get_close_matches(given.lstrip("-"), names)]
    guess = f"did you mean {one_of(near)}? " if near else ""
    return f"No such option: {given}; {guess}--help lists all"


def _flushed(code: int) -> int:
    """Write the rest of the output and return `code`, or another one if that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _refused(error)
    return code


def _refused(error: OSError) -> int:
    """Say what the system refused, and return the exit code. A reader who closes a pipe needs no words."""
    if error.filename is None and error.errno in _WRITE_ERRORS:
        sys.stdout = None  # otherwise the interpreter flushes it again, and complains
    if isinstance(error, BrokenPipeError):
        return EXIT_CRASH
    reason = (error.strerror or str(error)).lower()
    if error.filename is not None:
        reason = f"{error.filename}: {reason}"
    elif error.errno in _WRITE_ERRORS:
        reason = f"the output cannot be written: {reason}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        reason += "; raise the limit of open files (ulimit -n)"
    return _fail(reason, EXIT_CRASH)


def _program_name() -> str:
    """Return the name of the console script that was called; shell completion needs it."""
    called = Path(sys.argv[0]).name
    return called if called in ("pypto", "pypto-serving") else "pypto-serving"


def _fail(message: str, code: int) -> int:
    shown = " ".join(message.split())
    if not shown:  # help was shown instead
        return code
    if writes_json():
        logging.getLogger(__name__).critical("%s", shown, extra=with_fields(exit_code=code))
    else:
        with suppress(OSError):
            print(f"error: {shown}", file=sys.stderr)
    return code
