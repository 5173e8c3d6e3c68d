"""Every function and struct of the library refuses arguments of a wrong type. All cases follow from its description."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import ElementType, Engine, Extent, KVCacheLayer, Recording, Scoring, StepRows, runnable
from pypto_serving.kernels.abi import Arguments, Handle, KernelLibrary, library
from pypto_serving.kernels.constants import differing
from pypto_serving.kernels.forms import Blocks, Inputs, Scale, Weights
from pypto_serving.kernels.operands import Epilogue
from pypto_serving.types.weights import Layout
from tests.kernels.layouts import Array
from tests.kernels.stage import Stage, engine_of, int32, matrix_of
from tests.needs import needs_kernels

pytestmark = needs_kernels

ELEMENTS = ("u1", "u2", "u4", "u8", "i4", "i8", "f2", "f4", "f8")
_ENUMS: tuple[type[enum.Enum], ...] = (
    StepRows,
    Epilogue,
    Extent,
    Scoring,
    ElementType,
    Weights,
    Inputs,
    Scale,
    Layout,
    Blocks,
)
ENUMS = {kind.__name__: kind for kind in _ENUMS}


def bound() -> KernelLibrary:
    lib = library()
    assert lib is not None
    return lib


def cases() -> list[Any]:
    """Each function and each struct."""
    if not runnable():
        return []
    owners = [("function", bound().functions), ("struct", bound().structs)]
    return [pytest.param(kind, name, id=name) for kind, entries in owners for name in entries]


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def element_of(type_name: str) -> str:
    return type_name.removeprefix("const ").removesuffix("*")


def right(type_name: str) -> Any:
    """A value of a type."""
    element = element_of(type_name)
    if type_name == "text":
        return "text"
    if type_name in bound().enums:
        return next(iter(ENUMS[type_name]))
    if not type_name.endswith("*"):
        return 1.5 if type_name.startswith("f") else 1
    if element == "void":
        return np.zeros(4, np.int16)
    if element in bound().structs:
        return np.zeros(2, bound().structs[element].dtype)
    return np.zeros(4, element) if element[1:].isdigit() else Handle(element, 0)


def wrong(type_name: str, nullable: bool) -> Iterator[Any]:
    """Values of other types, and values that do not fit into the type."""
    yield from (np.zeros((4, 4))[:, 1:], "1" if type_name != "text" else b"text", Handle("Other", 0), object())
    element, const = element_of(type_name), type_name.startswith("const ")
    if not nullable:
        yield None
    if not type_name.endswith("*"):
        if type_name in bound().enums:
            yield from (
                0,
                1,
                "kTokens",
                next(member for name, kind in ENUMS.items() if name != type_name for member in kind),
            )
        elif type_name == "text":
            yield "a\0b"
        elif type_name.startswith("f"):
            yield 10**400
        elif type_name.startswith(("i", "u")):
            yield from (1.0, 1 << 80, -(1 << 80), np.zeros(4, type_name))
        return
    yield from (1, 0, 1 << 40, 1.5, [1, 2], b"bytes")
    if element[1:].isdigit() or element in bound().structs:
        dtype = right(type_name).dtype
        yield from (np.zeros(4, other) for other in ELEMENTS if other != element)
        yield from (np.zeros((4, 4), dtype)[:, 1:], np.zeros(4, dtype)[::2], np.zeros((4, 4), dtype).T)
        if not const:
            yield read_only(np.zeros(4, dtype))
    elif element == "void" and not const:
        yield read_only(np.zeros(4))
    elif element != "void":
        yield np.zeros(4, np.uint8)


def arguments_of(kind: str, name: str) -> Arguments:
    return (bound().functions if kind == "function" else bound().structs)[name].arguments


def refusal(call: Any, values: dict[str, Any]) -> str:
    try:
        call(*values.values())
    except (TypeError, ValueError) as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(("kind", "name"), cases())
def test_a_wrong_type_is_refused(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(kind, name)
    types = arguments.types
    calls: list[Any] = []
    if kind == "function":
        call: Any = bound().functions[name]
        monkeypatch.setattr(call, "_symbol", lambda *values: calls.append(values))  # wrong memory would not tell
    else:
        struct = bound().structs[name]

        def call(*values: Any) -> None:
            calls.append(struct.array([values]))

    values = {other: right(type_name) for other, type_name in types.items()}
    call(*values.values())
    assert len(calls) == 1
    for argument, type_name in types.items():
        nullable = argument in arguments.nullable
        if nullable:
            assert type_name.endswith("*")
            call(*{**values, argument: None}.values())
            calls.pop()
        for value in wrong(type_name, nullable):
            assert refusal(call, {**values, argument: value}).startswith(f"{name}({argument}) must be "), repr(value)
    assert len(calls) == 1


@pytest.mark.parametrize("name", bound().functions if runnable() else [])
def test_a_wrong_number_of_arguments_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = bound().functions[name]
    monkeypatch.setattr(function, "_symbol", lambda *values: pytest.fail("called"))
    values = [right(type_name) for type_name in function.arguments.types.values()]
    for some in (values[:-1], [*values, 1]) if values else ([1],):
        with pytest.raises(TypeError, match=f"^{name} takes {len(values)} arguments"):
            function(*some)


@pytest.mark.parametrize("name", bound().structs if runnable() else [])
def test_a_missing_or_unknown_field_is_refused(name: str) -> None:
    struct = bound().structs[name]
    fields = {field: right(type_name) for field, type_name in struct.arguments.types.items()}
    assert struct.pack(dict(reversed(fields.items()))) == struct.array([list(fields.values())]).tobytes()
    for some in ({**fields, "other": 1}, dict(list(fields.items())[:-1])):
        with pytest.raises(TypeError, match=f"^{name} needs all of its fields and no others: "):
            struct.pack(some)


def number_of(value: Any) -> int:
    """What the library gets for a value that is no enum."""
    if isinstance(value, Handle):
        return value.address
    return int(value.ctypes.data if isinstance(value, np.ndarray) else value)


@pytest.mark.parametrize("name", bound().structs if runnable() else [])
def test_fields_come_to_their_places(name: str) -> None:
    """Numbers, and addresses of pointers, read back through the layout that the library describes."""
    struct, wanted = bound().structs[name], {}
    values: list[Any] = []
    for i, (field, type_name) in enumerate(struct.arguments.types.items()):
        value = right(type_name) if type_name.endswith("*") or type_name in ENUMS else i
        wanted[field] = 0 if type_name in ENUMS else number_of(value)
        values.append(value)
    packed = struct.array([values, values])
    assert packed.nbytes == 2 * struct.dtype.itemsize
    assert all(packed[field].tolist() == [value, value] for field, value in wanted.items())


def test_types_follow_from_the_declarations() -> None:
    types = bound().structs["QkNormRope"].arguments.types
    assert types["x"] == "const f4*" and types["queries"] == "u2*"
    assert types["keys"] == "u4*" and types["block_stride"] == "i8"  # of KvCache, which QkNormRope contains
    replay = bound().functions["replay"].arguments.types
    assert list(replay)[:2] == ["recording", "tokens"] and replay["groups"] == "const GroupTables*"
    assert bound().functions["replay"].arguments.nullable == {"seconds"}
    assert bound().structs["RmsNorm"].arguments.nullable == {"scales"}
    assert "weight" in bound().structs["NormRope"].arguments.nullable  # of NormRopeParams, which NormRope contains
    assert "const Pages*" in bound().structs["NormRope"].arguments.types.values()


def test_enums_have_the_names_of_the_declarations() -> None:
    """Their numbers are the library's alone."""
    assert {name: set(numbers) for name, numbers in bound().enums.items()} == {
        name: set(kind.__members__) for name, kind in ENUMS.items()
    }
    pack = KernelLibrary(
        ctypes.CDLL(None), "enum ElementType i4; kI8; kBf16\nstruct Pack 4; ElementType stored 0"
    ).structs["Pack"]
    assert pack.array([[ElementType.BF16], [ElementType.I8]])["stored"].tolist() == [1, 0]


@pytest.mark.parametrize("change", [{"kPanel": 64}, {"kOther": 1}])
def test_a_library_with_other_constants_is_refused(change: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    described = {**bound().constants, **change}
    assert differing(bound().constants) == [] and set(differing(described)) == set(change)
    assert "kPanel" in differing({})
    monkeypatch.setattr(KernelLibrary, "__init__", lambda self, *_: setattr(self, "constants", described))
    library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"other constants .*{next(iter(change))}"):
            library()
    finally:
        library.cache_clear()


@pytest.fixture
def stage() -> Stage:
    return Stage(engine_of("portable"))


def test_an_operation_refuses_arrays_of_other_types(stage: Stage) -> None:
    weight, out = np.ones(64, np.float32), np.zeros(32, np.uint32)
    for x in (np.zeros((1, 64), np.int32), np.zeros((1, 64), np.uint16)):
        with pytest.raises(TypeError, match=r"^RmsNorm\(x\) must be const float32\*, not an array of .*int"):
            stage.record.rms_norm(x, weight, 1e-6, out)
    with pytest.raises(ValueError, match="not contiguous"):
        stage.record.rms_norm(np.zeros((1, 128), np.float32)[:, ::2], weight, 1e-6, out)
    with pytest.raises(ValueError, match=r"^RmsNorm\(out\) must be uint32\*, contiguous and writeable"):
        stage.record.rms_norm(np.zeros((1, 64), np.float32), weight, 1e-6, read_only(out))
    assert stage.record.names == []


def test_a_closed_engine_is_refused() -> None:
    engine = Engine("portable")
    engine.close()
    with pytest.raises(TypeError, match=r"^record\(engine\) must be Engine\*"):
        Recording(engine)


def test_a_product_refuses_an_output_of_another_type(stage: Stage) -> None:
    strips, matrix = stage.strip_room(1, 32), matrix_of(np.zeros((32, 32), np.float32))
    with pytest.raises(TypeError, match="STORE writes float32, not uint32"):
        stage.record.linear(strips, matrix, np.zeros((1, 32), np.uint32), StepRows.TOKENS)
    with pytest.raises(TypeError, match="SWIGLU writes uint32, not float32"):
        stage.record.linear_swiglu(strips, matrix, np.zeros(8, np.float32))


def test_a_step_refuses_arrays_of_other_types(stage: Stage) -> None:
    one, table = int32([1]), int32([[0]])
    with pytest.raises(TypeError, match=r"^replay\(token_ids\) must be const int32\*, not an array of int64"):
        stage.record.replay(one.astype(np.int64), one, int32([0, 1]), one, one[:0], [one], [table])
    with pytest.raises(TypeError, match=r"^GroupTables\(tables\) must be const int32\*"):
        stage.record.replay(one, one, int32([0, 1]), one, one[:0], [one], [table.astype(np.uint32)])
    with pytest.raises(ValueError, match="not contiguous"):
        stage.record.replay(one, one, int32([0, 1]), one, one[:0], [one], [int32([[0, 0]])[:, ::2]])
    with pytest.raises(ValueError, match="seconds"):
        stage.record.replay(one, one, int32([0, 1]), one, one[:0], [one], [table], np.zeros(1))


def test_pages_outside_of_their_arena_are_refused(stage: Stage) -> None:
    with pytest.raises(ValueError, match="not within blocks"):
        stage.record.pages(np.zeros((2, 256), np.uint8), 192, 16, 0, 16, 2)
    with pytest.raises(ValueError, match="contiguous"):
        KVCacheLayer(np.zeros((2, 2, 2, 2, 64), np.uint16)[:, :, :, ::2], 0, 32).fields()


def test_more_experts_per_token_than_there_are(stage: Stage) -> None:
    with pytest.raises(ValueError, match="per_token is 9, but must be between 1 and the 8 experts"):
        stage.record.route(np.zeros((4, 8), np.float32), 9, Scoring.SOFTMAX)


def test_packing_refuses_what_is_too_short(stage: Stage) -> None:
    with pytest.raises(ValueError, match=r"62 bytes hold no \[1, 32\]"):
        stage.engine.pack(np.zeros(512, np.uint32), np.zeros(31, np.uint16), ElementType.BF16, 1, 32)
