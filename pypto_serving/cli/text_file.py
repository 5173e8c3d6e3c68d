"""Read a text file that an option names."""

from __future__ import annotations

from pathlib import Path

from pypto_serving.errors import ConfigError


def read_text(path: Path, flag: str) -> str:
    """Read the file at `path`, which `flag` names; raise ConfigError in one line."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from None
