"""The shared library and the signatures of its functions, which are those of `csrc/api.cpp`."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from pypto_serving.errors import ConfigError

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
    "pack": " ppppillli",
    "pieces": "ll",
    "hash": " plp",
    "read": "ipilplp",
    "record": "pp",
    "forget": " p",
    "operations": "ip",
    "replay": " piiippppppp",
    "embed": " ppplip",
    "norm": " pplplfipp",
    "quantize": " ppplpp",
    "linear": " ppppppplllfiip",
    "heads": " pppppfipppliii",
    "attend": " ppippliiip",
    "route": "ppiiifpppppppppp",
    "gather": " ppplppp",
    "expert_linear": " pppppppllfip",
    "combine": " ppplp",
    "products": " ppplifip",
    "stream_inputs": " ppppplfiipp",
    "stream_outputs": " ppplp",
    "pages": "ppplliii",
    "turn": " pplipppllffpp",
    "compressor_state": " ppppllip",
    "compress": " pplpppllfp",
    "index": " ppplfiiiplpp",
    "latent_attend": " pppppiiiiiipppp",
    "sample": " pplllpp",
    "logprobs": " ppllllpppppp",
    "measure_read": "dppl",
    "measure_compute": "dpil",
    "round_flops": "ipi",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where the package was built without it.

    Raises ConfigError for one that cannot be loaded, or that was built from other sources than those of this checkout.
    """
    import pypto_serving.kernels

    for folder in pypto_serving.kernels.__path__:
        if (path := Path(folder) / FILE).is_file():
            try:
                lib = ctypes.CDLL(str(path))
                lib.pypto_sources.restype = ctypes.c_char_p
                built_from = lib.pypto_sources().decode()
            except (OSError, AttributeError) as error:
                raise ConfigError(f"the CPU kernels cannot be loaded ({error}); install pypto-serving again") from None
            if built_from != (_checkout_sources() or built_from):
                raise ConfigError("the CPU kernels are not those of csrc/ any more; run `make serve` or `make check`")
            return _declared(lib)
    return None


def _checkout_sources() -> str:
    """The hash that csrc/CMakeLists.txt makes of the sources beside this package; empty where there are none."""
    folder = Path(__file__).parents[2] / "csrc"
    files = sorted(path for path in folder.glob("*") if path.suffix in (".h", ".cpp"))
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(hashes.encode()).hexdigest() if files else ""


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
