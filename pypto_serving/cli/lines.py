"""Read what a user types: lines with a history, blocks of several lines, or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_HISTORY = 1000
FENCE = '"""'
"""A line that begins and ends a message of several lines."""


class LineReader:
    """Read messages from the terminal, or lines from a pipe. The history is kept in `file`, if it can be."""

    def __init__(self, file: Path | None = None) -> None:
        self._read = _prompted(file) if sys.stdin.isatty() else _piped

    def __call__(self) -> str:
        """Read one message. Raises EOFError at the end of the input."""
        line = self._read("> ")
        if line.strip() == FENCE:
            lines: list[str] = []
            while (line := self._read("… ").rstrip("\n")).strip() != FENCE:
                lines.append(line)
            return "\n".join(lines)
        while line.rstrip("\n").endswith("\\"):
            line = line.rstrip("\n")[:-1] + "\n" + self._read("… ")
        return line


def history_file() -> Path | None:
    """Return where the history of `chat` is kept: in the user's folder for states, if there is one."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    with suppress(RuntimeError):
        folder = given if given.is_absolute() else Path.home() / ".local/state"
        return folder / "pypto-serving/chat_history"
    return None


def _piped(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _prompted(file: Path | None) -> Callable[[str], str]:
    """Return what reads a line with editing and history. Only the user can read the file."""
    import atexit
    import readline

    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.read_history_file(file)
            readline.set_history_length(MAX_HISTORY)
            atexit.register(_keep, file)
    return input


def _keep(file: Path) -> None:
    import readline

    with suppress(OSError):
        readline.write_history_file(file)
