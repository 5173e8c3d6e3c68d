"""Programs for the conformance suite. Two share a resident tensor: `fill` writes it, `read` adds it to its input.

fill: kept = given + given          read: out = given + kept          all float32 [SIZE, SIZE]

The third runs on two devices: out_i = given + kept_0 + kept_1, on device i.
"""

from __future__ import annotations

from typing import Any

import pypto

SIZE = 128


def hosts() -> tuple[Any, Any]:
    """Return the host functions of `fill` and `read`: in numpy for the double, else in PyPTO's language."""
    if hasattr(pypto, "REVISION"):
        from pypto.ir.distributed_compiled_program import Host

        fill = Host(__file__, "fill_kept", parameters("given", "kept:out"))
        return fill, Host(__file__, "read_kept", parameters("given", "kept", "out:out"))
    from tests.npu import small_kernels

    return small_kernels.fill, small_kernels.read


def two_device_host() -> Any:
    """Return the host function of the program for two devices."""
    if hasattr(pypto, "REVISION"):
        from pypto.ir.distributed_compiled_program import Host

        own = tuple({"given": "given", "kept": f"kept_{i}", "out": f"out_{i}"} for i in range(2))
        return Host(__file__, "add_up", parameters("given", "kept_0", "out_0:out", "kept_1", "out_1:out"), own)
    from tests.npu import small_kernels

    return small_kernels.add_up


def parameters(*names: str) -> Any:
    """Describe tensors for the double; `:out` marks those that are written."""
    from pypto.ir.distributed_compiled_program import Parameter

    described = [name.partition(":") for name in names]
    return tuple(Parameter(name, "float32", (SIZE, SIZE), direction or "in") for name, _, direction in described)


def fill_kept(given: Any, kept: Any) -> None:
    """The kernel of `fill` in numpy."""
    kept[...] = given + given


def read_kept(given: Any, kept: Any, out: Any) -> None:
    """The kernel of `read` in numpy."""
    out[...] = given + kept


def add_up(given: Any, kept: Any, out: Any, exchange: Any) -> None:
    """The kernel of the program for two devices in numpy."""
    out[...] = given + sum(exchange(kept))
