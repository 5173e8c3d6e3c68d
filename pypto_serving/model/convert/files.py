"""The files of a conversion: a folder owned by one process; files that appear only when complete. Torch-free."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.model.checkpoint import UNFINISHED_FILE
from pypto_serving.model.fingerprint import checkpoint_state
from pypto_serving.util import decode_json


class _UnfinishedFolder(msgspec.Struct, frozen=True):
    """Content of UNFINISHED_FILE: the conversion of `source`, in `state`, to `format` by a `version` of this program.

    All fields except the path `source` determine the bytes of the target.
    """

    source: str
    state: str
    format: str
    version: str

    def continues(self, other: _UnfinishedFolder) -> bool:
        """Return whether files written by `other` can be used by this conversion."""
        return msgspec.structs.replace(other, source=self.source) == self


@contextmanager
def claim(source: Path, target: Path, format: str) -> Iterator[Callable[[], None]]:
    """Own `target` for the conversion of `source` to `format`. Raises ConfigError if it contains anything else.

    Yield a function that raises ModelError if `source` has changed meanwhile.
    """
    identity, state = checkpoint_state(source).hex(), target / UNFINISHED_FILE
    own = _UnfinishedFolder(str(source), identity, format, importlib.metadata.version("pypto-serving"))

    def require_unchanged() -> None:
        if checkpoint_state(source).hex() != identity:
            raise ModelError(f"{source} changed meanwhile; delete {target} and convert again")

    _make_target(target)
    with _locked(target) as file:
        # The file is empty if its process was killed before writing.
        if found := file.read():
            _require_same(target, own, found)
        if not found and (target / "config.json").exists():  # another process finished just before this one looked
            state.unlink()
            raise _complete(target)
        if not found:
            file.write(as_json(msgspec.to_builtins(own)))
            _flush(file)
        yield require_unchanged
        state.unlink()


_ADVICE = "give a folder that is empty or not there yet"


def _require_same(target: Path, own: _UnfinishedFolder, found: bytes) -> None:
    """Raise ConfigError unless `found` says that the files in `target` belong to the conversion `own`."""
    try:
        other = decode_json(found, _UnfinishedFolder)
    except ValueError:
        raise ConfigError(f"TARGET {target}/{UNFINISHED_FILE} is damaged; delete the folder, or give another") from None
    if own.continues(other):
        return
    changed = ", before that changed," if other.source == own.source and other.state != own.state else ""
    raise ConfigError(
        f"TARGET {target} holds a part of another conversion, of {other.source}{changed} to {other.format} by "
        f"pypto-serving {other.version}; delete it, or give another folder"
    )


def _complete(target: Path) -> ConfigError:
    return ConfigError(f"TARGET {target} is a complete checkpoint already; {_ADVICE}")


def _make_target(target: Path) -> None:
    """Create the folder `target`. Raises ConfigError if it contains anything except an unfinished conversion."""
    try:
        if target.exists() and not target.is_dir():
            raise ConfigError(f"TARGET {target} is a file; {_ADVICE}")
        if target.exists() and not (target / UNFINISHED_FILE).exists():
            if (target / "config.json").exists():
                raise _complete(target)
            if any(target.iterdir()):
                raise ConfigError(f"TARGET {target} is not empty; {_ADVICE}")
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or "it cannot be made").lower()
        raise ConfigError(f"TARGET {target} cannot be made: {reason}; give another folder") from None


@contextmanager
def _locked(target: Path) -> Iterator[BinaryIO]:
    """Open or create the state file, and lock it. Raises ConfigError if another process owns `target`."""
    state = target / UNFINISHED_FILE
    with os.fdopen(os.open(state, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"TARGET {target} is being written by another process") from None
        if not (state.exists() and os.path.samestat(os.fstat(file.fileno()), state.stat())):
            raise ConfigError(f"TARGET {target} was finished by another process just now")
        yield file


@contextmanager
def new_file(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open a new file, allocate its `size` bytes, and name it `path` once all is written and on disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            yield file
            _flush(file)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(path: Path, content: bytes) -> None:
    with new_file(path, len(content)) as file:
        file.write(content)


def copy(source: Path, target: Path) -> None:
    """Copy a file of any size, piece by piece."""
    with source.open("rb") as content, new_file(target, 0) as file:
        shutil.copyfileobj(content, file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def as_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
