"""Find the shared library, check it against its sources, and bind it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from pathlib import Path

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.abi import KernelLibrary
from pypto_serving.kernels.constants import differing

FILE = "pypto_kernels.so"
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "portable")
"""Best first."""


@functools.cache
def library() -> KernelLibrary | None:
    """Load the library; None where the package was built without it.

    Raises ConfigError if it cannot be loaded, or was built from other sources than this checkout's.
    """
    for folder in sys.modules[__name__.rpartition(".")[0]].__path__:  # an editable install has two
        if (path := Path(folder) / FILE).is_file():
            try:
                lib = ctypes.CDLL(str(path))
                lib.pypto_sources.restype = ctypes.c_char_p
                built_from = lib.pypto_sources().decode()
            except (OSError, AttributeError) as error:
                raise ConfigError(f"the CPU kernels cannot be loaded ({error}); install pypto-serving again") from None
            if built_from != (_checkout_sources() or built_from):
                raise ConfigError("the CPU kernels are not those of csrc/ any more; run `make serve` or `make check`")
            lib.pypto_describe.restype = ctypes.c_char_p
            return _bind(lib)
    return None


def _bind(lib: ctypes.CDLL) -> KernelLibrary:
    """Bind the library's functions. Raises ConfigError if its layouts have other constants than this package's."""
    bound = KernelLibrary(lib, lib.pypto_describe().decode())
    if differ := differing(bound.constants):
        raise ConfigError(f"the CPU kernels have other constants ({', '.join(differ)}); install pypto-serving again")
    return bound


def _checkout_sources() -> str:
    """Hash the sources beside this package as csrc/CMakeLists.txt does; empty where there are none."""
    folder = Path(__file__).parents[2] / "csrc"
    files = sorted(path for path in folder.glob("*") if path.suffix in (".h", ".cpp"))
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(hashes.encode()).hexdigest() if files else ""


@functools.cache
def runnable() -> tuple[str, ...]:
    """List the instruction sets that library and machine support, best first; empty without a library."""
    lib = library()
    return tuple(name for name in INSTRUCTION_SETS if lib is not None and lib.name(name))
