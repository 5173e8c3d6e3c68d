"""Check and convert arguments of library functions: arrays, handles, numbers and text.

A type is written as the library describes it (csrc/abi.h): `f4`, `text`, `const f4*`, `Engine*`.
"""

from __future__ import annotations

import ctypes
import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

Take = Callable[[Any], Any]
"""Converts an argument to what ctypes passes. Raises TypeError or ValueError where it is not of the type."""

Numbers = Mapping[str, int]
"""The enumerators of an enum of the library, by the names that Python has for them: SQRT_SOFTPLUS for kSqrtSoftplus."""

_view: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer
_addressof = ctypes.addressof


@dataclass(frozen=True, slots=True)
class Handle:
    """Address of an object of the library, such as an Engine."""

    kind: str
    address: int


def take(type_name: str, structs: Mapping[str, np.dtype[Any]], enums: Mapping[str, Numbers], nullable: bool) -> Take:
    """Return the conversion for a type; `structs` and `enums` are those that the library describes, by name.

    None becomes a null pointer where the pointer is `nullable`.
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
    return _take_handle(element)


def readable(type_name: str) -> str:
    """Write a type for messages: `const float32*` instead of `const f4*`."""
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
    """Accept contiguous arrays of `dtype`, or of any type where it is None."""
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
    """Accept arrays of a struct, and handles of those that the library keeps."""
    elements = _take_elements(dtype, const)

    def convert(value: Any) -> int:
        if isinstance(value, Handle):
            return _address_of(value, name)
        return int(elements(value))

    return convert


def _take_handle(kind: str) -> Take:
    return lambda value: _address_of(value, kind)


def _address_of(value: Any, kind: str) -> int:
    if not isinstance(value, Handle) or value.kind != kind:
        raise TypeError
    return value.address


def _take_enum(name: str, numbers: Numbers) -> Take:
    """Accept members of the Python enum of this name; the library says which number a member's name has."""

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
