"""Write texts of models and servers: a terminal is shown no control sequences in them, a pipe gets every character."""

from __future__ import annotations

import re
import sys
from typing import TextIO

CONTROLS = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, but for the tab and ends of lines: with them a text could rename, clear or fake a terminal."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def shown(text: str) -> str:
    """Return `text` as a terminal may show it: with escapes in place of control characters."""
    return CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def write(text: str, *, to_stderr: bool = False, dim: bool = False, newline: bool = False) -> None:
    """Write a text of any origin; `dim` is for terminals. Characters that the encoding lacks are escaped."""
    stream: TextIO | None = sys.stderr if to_stderr else sys.stdout
    if stream is None:
        return
    if stream.isatty():
        text = shown(text)
        text = f"{DIM}{text}{PLAIN}" if dim and text else text
    encoding = stream.encoding or "utf-8"
    stream.write((text + "\n" * newline).encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
