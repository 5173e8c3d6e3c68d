"""Find, check and bind the shared library. Its own description (csrc/abi.h) lists functions, structs, enums, constants.

Types are written as in the description: `f4`, `text`, `const f4*`, `Engine*`.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import operator
import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.constants import differing

Take = Callable[[Any], Any]
"""Converts an argument for ctypes. Raises TypeError or ValueError if it is not of the required type."""

Numbers = Mapping[str, int]
"""The values of an enum of the library, by their names in Python: SQRT_SOFTPLUS for kSqrtSoftplus."""

_view: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer
_addressof = ctypes.addressof


@dataclass(frozen=True, slots=True)
class Handle:
    """Address of an object of the library, such as an Engine."""

    kind: str
    address: int


def take(type_name: str, structs: Mapping[str, np.dtype[Any]], enums: Mapping[str, Numbers], nullable: bool) -> Take:
    """Return the conversion for a type; `structs` and `enums` are the library's, by name.

    If the pointer is `nullable`, None becomes a null pointer.
    """
    convert = _take_enum(type_name, enums[type_name]) if type_name in enums else _take(type_name, structs)
    return (lambda value: 0 if value is None else convert(value)) if nullable else convert


def _take(type_name: str, structs: Mapping[str, np.dtype[Any]]) -> Take:
    if type_name == "text":
        return _take_text
    if not type_name.endswith("*"):
        return _take_real if type_name.startswith("f") else _take_integer(np.iinfo(type_name))
    const, element = type_name.startswith("const "), type_name.removeprefix("const ").removesuffix("*")
    if element == "void":
        return _take_elements(None, const)
    if element in structs:
        return _take_struct(element, structs[element], const)
    if element[1:].isdigit():
        return _take_elements(np.dtype(element), const)
    return functools.partial(_address_of, kind=element)


def readable(type_name: str) -> str:
    """Return the name of a type for messages: `const float32*` instead of `const f4*`."""
    *const, element = type_name.split(" ")
    name = element.removesuffix("*")
    if name[1:].isdigit():
        element = element.replace(name, np.dtype(name).name)
    return " ".join([*const, element])


def shown(value: object) -> str:
    """Describe an argument, for messages."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, Handle):
        return f"a handle of {value.kind}"
    return f"{type(value).__name__} {value!r}"[:80]


def _take_elements(dtype: np.dtype[Any] | None, const: bool) -> Take:
    """Accept contiguous arrays of `dtype`, or of any type if it is None."""
    same = dtype  # the last dtype that was equal: comparing two structured ones takes a microsecond

    def convert(value: Any) -> int:
        nonlocal same
        if not isinstance(value, np.ndarray):
            raise TypeError
        if value.dtype is not same and same is not None:
            if value.dtype != dtype:
                raise TypeError
            same = value.dtype
        try:
            return _addressof(_view(value))  # a third of the time that value.ctypes.data takes
        except TypeError:  # not writeable, or not contiguous
            if not (const and value.flags.c_contiguous):
                raise ValueError("contiguous" if const else "contiguous and writeable") from None
            return int(value.ctypes.data)

    return convert


def _take_struct(name: str, dtype: np.dtype[Any], const: bool) -> Take:
    """Accept arrays of a struct, and handles of structs that the library keeps."""
    elements = _take_elements(dtype, const)

    def convert(value: Any) -> int:
        if isinstance(value, Handle):
            return _address_of(value, name)
        return int(elements(value))

    return convert


def _address_of(value: Any, kind: str) -> int:
    if not isinstance(value, Handle) or value.kind != kind:
        raise TypeError
    return value.address


def _take_enum(name: str, numbers: Numbers) -> Take:
    """Accept members of the Python enum of this name; `numbers` gives the library's value of each member."""

    def convert(value: Any) -> int:
        if not isinstance(value, enum.Enum) or type(value).__name__ != name or value.name not in numbers:
            raise TypeError
        return numbers[value.name]

    return convert


def _take_integer(limits: np.iinfo[Any]) -> Take:
    low, high = int(limits.min), int(limits.max)

    def convert(value: Any) -> int:
        number = operator.index(value)
        if low <= number <= high:
            return number
        raise ValueError(f"in [{low}, {high}]")

    return convert


def _take_real(value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        raise ValueError("within its range") from None


def _take_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    if "\0" in value:
        raise ValueError("without a null character")
    return value.encode()


class Arguments:
    """Names and types of the arguments of a function, or the fields of a struct; those `nullable` may be None."""

    def __init__(self, line: _DescribedLine, structs: Mapping[str, Any], enums: Mapping[str, Numbers]) -> None:
        self.owner, self.types, self.nullable = line.name, line.types, line.nullable
        self._takes = tuple(take(kind, structs, enums, name in line.nullable) for name, kind in line.types.items())

    def convert(self, values: Sequence[Any], but: int = 0) -> list[Any]:
        """Convert values to ctypes arguments, for all parameters but the last `but`.

        Raises TypeError or ValueError that names the first value of a wrong type.
        """
        if len(values) != len(self._takes) - but:
            raise TypeError(f"{self.owner} takes {len(self._takes) - but} arguments, not {len(values)}")
        try:
            return [convert(value) for convert, value in zip(self._takes, values, strict=False)]
        except (TypeError, ValueError):
            self._refuse(values)
            raise

    def _refuse(self, values: Sequence[Any]) -> None:
        for (name, type_name), convert, value in zip(self.types.items(), self._takes, values, strict=False):
            try:
                convert(value)
            except (TypeError, ValueError) as error:
                kind, also = (ValueError, f", {error}") if isinstance(error, ValueError) else (TypeError, "")
                wanted = readable(type_name) + " or None" * (name in self.nullable)
                raise kind(f"{self.owner}({name}) must be {wanted}{also}, not {shown(value)}") from None


class Struct:
    """A struct that functions take."""

    def __init__(self, dtype: np.dtype[Any], arguments: Arguments) -> None:
        self.dtype, self.arguments = dtype, arguments
        self._pack = struct.Struct(_format(dtype)).pack

    def array(self, structs: Iterable[Sequence[Any]]) -> NDArray[np.void]:
        """Pack structs, each with all fields in order. Raises TypeError or ValueError for fields of a wrong type."""
        convert, pack = self.arguments.convert, self._pack
        return np.frombuffer(bytearray(b"".join([pack(*convert(fields)) for fields in structs])), self.dtype)

    def pack(self, fields: Mapping[str, Any]) -> bytes:
        """Pack one struct. Raises TypeError or ValueError if a field is missing, unknown or of a wrong type."""
        names = self.arguments.types
        if fields.keys() != names.keys():
            differ = ", ".join(sorted(fields.keys() ^ names.keys()))
            raise TypeError(f"{self.arguments.owner} needs all of its fields and no others: {differ}")
        return self._pack(*self.arguments.convert([fields[name] for name in names]))


class Function:
    """A function of the library that checks its arguments."""

    def __init__(self, symbol: Callable[..., Any], result: str, arguments: Arguments, struct: Struct | None) -> None:
        self.arguments, self._symbol, self._struct = arguments, symbol, struct
        self._kind = _pointed(result)

    def __call__(self, *values: Any, **fields: Any) -> Any:
        """Call the function; keywords are the fields of the struct that the last argument points to.

        Raises TypeError or ValueError that names the first argument of a wrong type.
        """
        if fields:
            if self._struct is None:
                raise TypeError(f"{self.arguments.owner} takes no struct")
            result = self._symbol(*self.arguments.convert(values, but=1), self._struct.pack(fields))
        else:
            result = self._symbol(*self.arguments.convert(values))
        if self._kind:
            return Handle(self._kind, result) if result else None
        return result.decode() if isinstance(result, bytes) else result


class KernelLibrary:
    """Owns the library's functions, also as attributes, and the structs that they take, by name."""

    def __init__(self, lib: ctypes.CDLL, description: str) -> None:
        lines = [_DescribedLine.parse(line) for line in description.splitlines()]
        self.constants = {line.name: int(line.what) for line in lines if line.kind == "constant"}
        self.enums = {line.name: line.numbers for line in lines if line.kind == "enum"}
        formats = {line.name: line.what for line in lines if line.kind == "enum"}
        dtypes = {line.name: line.dtype(formats) for line in lines if line.kind == "struct"}
        self.structs: dict[str, Struct] = {}
        for line in lines:
            if line.kind == "struct":
                self.structs[line.name] = Struct(dtypes[line.name], Arguments(line, dtypes, self.enums))
        self.functions: dict[str, Function] = {}
        for line in lines:
            if line.kind == "function":
                self.functions[line.name] = self._bind(lib, line, Arguments(line, dtypes, self.enums))
        self.__dict__.update(self.functions)

    def _bind(self, lib: ctypes.CDLL, line: _DescribedLine, arguments: Arguments) -> Function:
        symbol, types = getattr(lib, f"pypto_{line.name}"), list(line.types.values())
        symbol.restype, symbol.argtypes = _ctype(line.what), [_ctype(type_name) for type_name in types]
        struct = self.structs.get(_pointed(types[-1])) if types else None
        return Function(symbol, line.what, arguments, struct)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Function: ...


@dataclass(frozen=True, slots=True)
class _DescribedLine:
    """A line of the description; `what` is a result type, a struct's size, an enum's type or a constant's value."""

    kind: str
    name: str
    what: str
    types: Mapping[str, str]
    nullable: frozenset[str]
    offsets: Sequence[int]

    @classmethod
    def parse(cls, line: str) -> _DescribedLine:
        head, *parts = line.split("; ")
        kind, name, what = head.split(" ", 2)
        if kind == "enum":
            parts = [f"{what} {part}" for part in parts]
        fields = [part.rsplit(" ", 2 if kind == "struct" else 1) for part in parts]
        offsets = [int(field[2]) for field in fields] if kind == "struct" else []
        types = {field[1].removesuffix("?"): field[0] for field in fields}
        nullable = frozenset(field[1][:-1] for field in fields if field[1].endswith("?"))
        return cls(kind, name, what, types, nullable, offsets)

    @property
    def numbers(self) -> Numbers:
        """Return an enum's values by their Python names."""
        return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[1:]).upper(): i for i, name in enumerate(self.types)}

    def dtype(self, enums: Mapping[str, str]) -> np.dtype[Any]:
        """Return the struct's numpy dtype; pointers are uint64, and `enums` gives the types of enums."""
        formats = ["u8" if name.endswith("*") else enums.get(name, name) for name in self.types.values()]
        parts = {"names": list(self.types), "formats": formats, "offsets": self.offsets, "itemsize": int(self.what)}
        dtype: np.dtype[Any] = np.dtype(parts)  # type: ignore[call-overload]
        return dtype


def _pointed(type_name: str) -> str:
    """Return the pointed-to type, or "" for a type that is not a pointer."""
    return type_name.removeprefix("const ").removesuffix("*") if type_name.endswith("*") else ""


def _ctype(type_name: str) -> Any:
    if type_name.endswith("*"):
        return ctypes.c_void_p
    others = {"void": None, "text": ctypes.c_char_p}
    return others[type_name] if type_name in others else np.ctypeslib.as_ctypes_type(np.dtype(type_name))


def _format(dtype: np.dtype[Any]) -> str:
    """Convert a struct's dtype, with its gaps, to a format of the struct module, which shares numpy's letters."""
    assert dtype.fields is not None
    parts, end = ["@"], 0
    for field, offset in (entry[:2] for entry in dtype.fields.values()):
        parts.append(f"{offset - end}x{field.char}")
        end = offset + field.itemsize
    return "".join([*parts, f"{dtype.itemsize - end}x"])


FILE = "pypto_kernels.so"
INSTRUCTION_SETS = ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
"""Instruction sets, best first."""


@functools.cache
def library() -> KernelLibrary | None:
    """Load the library; return None if the package was built without it.

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
    """Hash the sources beside this package like csrc/CMakeLists.txt; return "" if there are none."""
    folder = Path(__file__).parents[2] / "csrc"
    files = sorted(path for path in folder.glob("*") if path.suffix in (".h", ".cpp"))
    hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(hashes.encode()).hexdigest() if files else ""


@functools.cache
def runnable() -> tuple[str, ...]:
    """Return the instruction sets that library and machine support, best first; () without a library."""
    lib = library()
    return tuple(name for name in INSTRUCTION_SETS if lib is not None and lib.name(name))


def loaded() -> KernelLibrary:
    """Return the library, which must exist."""
    lib = library()
    assert lib is not None
    return lib


class LibraryObject:
    """Owns an object of the library, `handle`; its end frees the object with the function `drop`."""

    drop: ClassVar[str]

    def __init__(self) -> None:
        self._lib = loaded()

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._lib.functions[self.drop](handle)
