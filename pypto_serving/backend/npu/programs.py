"""Keep compiled programs on disk by what they were compiled from, since a compile takes minutes and a load seconds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pypto_serving.backend.npu.runtime import META_FILE, Runtime
from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import Argument, Sizes
from pypto_serving.util import hash128


class Programs:
    """Owns the folder `cache_dir`/npu, or without `cache_dir` one that ends with this process."""

    def __init__(self, runtime: Runtime, cache_dir: str) -> None:
        self._runtime = runtime
        self._temporary = None if cache_dir else tempfile.TemporaryDirectory(prefix="pypto-npu-")
        self._folder = Path(cache_dir) / "npu" if self._temporary is None else Path(self._temporary.name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time compile and prepare: the first to prepare builds kernels beside its program."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # chip processes inherit the open file

    def get(self, stage: str, host: Any, sources: bytes, arguments: Sequence[Argument], sizes: Sizes) -> Any:
        """Return the compiled program of `host`, whose `sources` are hashed; compile it if it is not kept.

        Raises ConfigError, also for a program that takes other arguments.
        """
        shapes = "; ".join(f"{each.name} {each.dtype} {each.resolve(sizes)}" for each in arguments)
        words = (self._runtime.platform, stage, shapes)
        key = hash128(self._runtime.identity, sources, *(word.encode() for word in words)).hex()
        folder = self._folder / key
        if not (folder / META_FILE).exists():
            self._compile(folder, host, arguments, sizes)
        _require_names(folder, arguments)
        return self._runtime.load(folder)

    def _compile(self, folder: Path, host: Any, arguments: Sequence[Argument], sizes: Sizes) -> None:
        """Compile in another folder, so that one that is not finished is never taken for a program."""
        place = self._folder / "compiling"
        shutil.rmtree(place, ignore_errors=True)
        self._runtime.compile(host, arguments, sizes, place)
        shutil.rmtree(folder, ignore_errors=True)
        place.rename(folder)


def _require_names(folder: Path, arguments: Sequence[Argument]) -> None:
    """Raise ConfigError where a program takes other arguments, or in another order.

    The compiler appends the version of a name to it.
    """
    params = json.loads((folder / META_FILE).read_text())["params"]
    found = [each["name"].partition("__ssa_v")[0] for each in params]
    wanted = [argument.name for argument in arguments]
    for place, (theirs, ours) in enumerate(zip_longest(found, wanted), start=1):
        if theirs != ours:
            raise ConfigError(
                f"the compiled program takes {len(found)} arguments, and the contract names {len(wanted)}: number "
                f"{place} is {theirs}, not {ours}; see docs/npu.md"
            )
