"""Compile kernels ahead, on all CPUs, into Triton's cache on disk; and the identity of the kernels."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from pypto_serving.backend.base import Progress
from pypto_serving.errors import EXIT_CRASH, EXIT_OK
from pypto_serving.kernels import cuda
from pypto_serving.kernels.cuda.launch import Launch
from pypto_serving.processes import Copy
from pypto_serving.util import hash128

logger = logging.getLogger(__name__)

MAX_COPIES = 16
"""Each opens the card, which takes half a GiB of its memory for as long."""


def kernel_identity() -> bytes:
    """Hash what decides the bits that kernels compute: their sources, and who compiles them."""
    folder = Path(cuda.__path__[0])
    sources = (file.read_bytes() for file in sorted(folder.glob("*.py")))
    return hash128(triton.__version__.encode(), *sources)


def compile_ahead(launches: Iterable[Launch], card: int, cache_dir: str, progress: Progress) -> None:
    """Compile the kernels of launches whose tensors may be without memory, in copies of this process.

    Nothing is done where the cache has them. Copies end before the card is used; what they could not compile is
    compiled by its first launch.
    """
    distinct = {_key(each): each for each in launches}
    stamp = _stamp(_cache_folder(cache_dir), distinct)
    if stamp.exists():
        return
    count = min(MAX_COPIES, len(os.sched_getaffinity(0)), len(distinct))
    shares = [list(distinct.values())[i::count] for i in range(count)]
    read, write = os.pipe()
    copies = [Copy(partial(_compile, share, card, write)) for share in shares]
    os.close(write)
    done = 0
    progress("kernels", 0, len(distinct))
    while ended := os.read(read, 1 << 10):
        done += len(ended)
        progress("kernels", done, len(distinct))
    os.close(read)
    codes = [copy.wait() for copy in copies]
    if any(codes):
        logger.warning("%d of %d processes that compile kernels failed", sum(map(bool, codes)), len(copies))
    else:
        stamp.touch()


def _compile(share: Sequence[Launch], card: int, report: int) -> int:
    """Compile, and return an exit code. Whoever opens the card next reports what is wrong with it, once."""
    try:
        torch.cuda.set_device(card)
        for each in share:
            each.kernel.warmup(*each.arguments, grid=each.grid, **each.constants)
            os.write(report, b".")
    except Exception as error:
        logger.debug("a kernel was not compiled ahead: %r", error)
        return EXIT_CRASH
    return EXIT_OK


def _cache_folder(cache_dir: str) -> Path:
    """Return the folder of Triton's cache: the given one, or one of this process if that cannot be written."""
    folder = Path(os.environ.setdefault("TRITON_CACHE_DIR", str(Path(cache_dir or tempfile.gettempdir(), "triton"))))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", folder, error.strerror)
        folder = Path(tempfile.mkdtemp(prefix="pypto-triton-"))
        os.environ["TRITON_CACHE_DIR"] = str(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _stamp(folder: Path, launches: Iterable[tuple[Any, ...]]) -> Path:
    """Return the file that marks kernels as compiled."""
    words = sorted(map(repr, launches))
    return folder / f"compiled-{hash128(kernel_identity(), *(word.encode() for word in words)).hex()}"


def _key(launch: Launch) -> tuple[Any, ...]:
    """Return what a compiled kernel depends on, and a little more."""
    return launch.kernel.__name__, *map(_kind, launch.arguments), *sorted(launch.constants.items())


def _kind(argument: Any) -> Any:
    """Return what of an argument Triton specialises kernels for."""
    if isinstance(argument, Tensor):
        return str(argument.dtype)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument == 1, argument % 16 == 0
    if hasattr(argument, "block_shape"):
        return str(argument.base.dtype), *argument.block_shape
    return argument if isinstance(argument, str | bool | None) else type(argument).__name__
