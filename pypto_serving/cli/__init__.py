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

from pypto_serving.cli import terminal
from pypto_serving.errors import EXIT_CRASH, EXIT_OK, EXIT_USAGE, PyptoError
from pypto_serving.logs import with_fields, writes_json
from pypto_serving.processes import reset_inherited
from pypto_serving.util import one_of

EXIT_INTERRUPTED = 130
STARTED_S = time.monotonic()
_VALIDATOR = re.compile(r"^(Invalid value for [^:]*: )Value error, ")
"""The beginning of error messages from pydantic, which typer uses to check values."""
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writes. Errors of named files are handled by the commands, so one without a file name concerns stdout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's, and return the exit code."""
    reset_inherited()
    _open_streams()
    try:
        from pypto_serving.cli.app import app

        found = typer.main.get_command(app).main(argv, prog_name=_program_name(), standalone_mode=False)
        code = found if isinstance(found, int) else EXIT_OK
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
    """Reopen closed stdin, stdout and stderr, so that no other file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _message(error: typer.TyperException) -> str:
    """Return the message of an error. For an unknown option, propose options with a similar name."""
    from pypto_serving.setup.vllm_options import VLLM_ONLY

    given, proposed = getattr(error, "option_name", ""), getattr(error, "possibilities", None) or ()
    if not proposed:
        return error.format_message()
    names = {option.lstrip("-"): option for option in proposed}
    names = {name: option for name, option in names.items() if name.replace("-", "_") not in VLLM_ONLY}
    near = [names[name] for name in difflib.get_close_matches(given.lstrip("-"), names)]
    guess = f"did you mean {one_of(near)}? " if near else ""
    return f"No such option: {given}; {guess}--help lists all"


def _flushed(code: int) -> int:
    """Flush the output and return `code`, or the exit code of the error if that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _refused(error)
    return code


def _refused(error: OSError) -> int:
    """Print the error of a refused system call, except for a closed pipe, and return the exit code."""
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
    """Return the name of the called console script, which shell completion needs."""
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
            terminal.write(f"error: {shown}", to_stderr=True, newline=True)
    return code
