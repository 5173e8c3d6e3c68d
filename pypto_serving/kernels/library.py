"""The shared library and the signatures of its functions, which are those of `csrc/api.cpp`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

FILE = "pypto_kernels.so"
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "portable")
"""Best first."""

_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}
_SIGNATURES: Mapping[str, str] = {
    # name: result, then arguments
    "open": "psipi",
    "close": " p",
    "name": "ss",
    "strip_rows": "ip",
    "huge_pages": " pl",
    "pack": " pppillli",
    "pieces": "ll",
    "hash": " plp",
    "read": "ipilplp",
    "record": "pp",
    "forget": " p",
    "operations": "ip",
    "replay": " piiiipppppppp",
    "embed": " ppplp",
    "norm": " ppplfip",
    "linear": " pppplliip",
    "heads": " pppppfipppliii",
    "attend": " ppippliiip",
    "route": "ppiiippppppp",
    "gather": " ppplp",
    "expert_linear": " ppppllip",
    "combine": " ppplp",
    "sample": " pplllpp",
    "logprobs": " ppllllpppppp",
    "measure_read": "dppl",
    "measure_compute": "dpl",
    "round_flops": "ip",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where the package was built without it or for another machine."""
    import pypto_serving.kernels

    for folder in pypto_serving.kernels.__path__:
        if (path := Path(folder) / FILE).is_file():
            try:
                return _declared(ctypes.CDLL(str(path)))
            except OSError:
                return None
    return None


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name, signature in _SIGNATURES.items():
        function = getattr(lib, f"pypto_{name}")
        function.restype = _TYPES.get(signature[0])
        function.argtypes = [_TYPES[letter] for letter in signature[1:]]
    return lib


@functools.cache
def runnable() -> tuple[str, ...]:
    """Instruction sets that the library has kernels for and this machine runs, best first; empty without a library."""
    lib = library()
    return tuple(name for name in INSTRUCTION_SETS if lib is not None and lib.pypto_name(name.encode()))
