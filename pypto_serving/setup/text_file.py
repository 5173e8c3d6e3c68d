"""Read a text file that an option names."""

from __future__ import annotations

import os
from pathlib import Path

from pypto_serving.errors import ConfigError

MAX_CHARS = 1 << 20


def read_text(path: Path, flag: str) -> str:
    """Read the file at `path`, which `flag` names; raise ConfigError in one line.

    A FIFO is read to its end, as the shell's `<(command)` is one; it is empty if nobody writes to it.
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
    """Read a file of API keys: one on each line, without empty lines and those that begin with `#`.

    Raises ConfigError like `read_text`; what a key may be is for the rule of `api_key`.
    """
    lines = (line.strip() for line in read_text(path, flag).split("\n"))
    return [line for line in lines if line and not line.startswith("#")]
