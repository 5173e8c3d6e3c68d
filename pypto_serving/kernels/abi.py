"""Bind the library's functions, structs, enums and constants from its own description (csrc/abi.h)."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pypto_serving.kernels.arguments import Handle, Numbers, readable, shown, take


class Arguments:
    """Names and types of the arguments of a function, or the fields of a struct; those `nullable` may be None."""

    def __init__(self, line: _DescribedLine, structs: Mapping[str, Any], enums: Mapping[str, Numbers]) -> None:
        self.owner, self.types, self.nullable = line.name, line.types, line.nullable
        self._takes = tuple(take(kind, structs, enums, name in line.nullable) for name, kind in line.types.items())

    def convert(self, values: Sequence[Any], but: int = 0) -> list[Any]:
        """Convert values to ctypes arguments, all but the last `but` of them.

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
        """Pack structs, each with all fields in order. Raises TypeError or ValueError where one is of another type."""
        convert, pack = self.arguments.convert, self._pack
        return np.frombuffer(bytearray(b"".join([pack(*convert(fields)) for fields in structs])), self.dtype)

    def pack(self, fields: Mapping[str, Any]) -> bytes:
        """Pack one struct. Raises TypeError or ValueError where a field is missing, unknown or of another type."""
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

        Raises TypeError or ValueError, naming the argument, where one is of another type.
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
    """A line of the description; `what` is a result, a struct's bytes, an enum's type or a value."""

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
        """Number an enum's enumerators, by their Python names."""
        return {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name[1:]).upper(): i for i, name in enumerate(self.types)}

    def dtype(self, enums: Mapping[str, str]) -> np.dtype[Any]:
        """Return the struct as numpy has it; pointers are uint64, and `enums` have these types."""
        formats = ["u8" if name.endswith("*") else enums.get(name, name) for name in self.types.values()]
        parts = {"names": list(self.types), "formats": formats, "offsets": self.offsets, "itemsize": int(self.what)}
        dtype: np.dtype[Any] = np.dtype(parts)  # type: ignore[call-overload]
        return dtype


def _pointed(type_name: str) -> str:
    """Return the pointed-to type, or nothing for a type that is no pointer."""
    return type_name.removeprefix("const ").removesuffix("*") if type_name.endswith("*") else ""


def _ctype(type_name: str) -> Any:
    if type_name.endswith("*"):
        return ctypes.c_void_p
    others = {"void": None, "text": ctypes.c_char_p}
    return others[type_name] if type_name in others else np.ctypeslib.as_ctypes_type(np.dtype(type_name))


def _format(dtype: np.dtype[Any]) -> str:
    """Write a struct, gaps included, as a format of the struct module, whose letters are numpy's."""
    assert dtype.fields is not None
    parts, end = ["@"], 0
    for field, offset in (entry[:2] for entry in dtype.fields.values()):
        parts.append(f"{offset - end}x{field.char}")
        end = offset + field.itemsize
    return "".join([*parts, f"{dtype.itemsize - end}x"])
