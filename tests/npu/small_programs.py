"""Two programs that share a resident tensor, for the conformance suite: `fill` writes it, `read` adds it to its input.

fill: kept = given + given          read: out = given + kept          all float32 [SIZE, SIZE]
"""

from __future__ import annotations

from typing import Any

import pypto

SIZE = 128


def hosts() -> tuple[Any, Any]:
    """Return the host functions of `fill` and `read`: in numpy for the double, else in PyPTO's language."""
    if hasattr(pypto, "REVISION"):
        from pypto.ir.distributed_compiled_program import Host, Parameter

        def tensor(name: str, direction: str = "in") -> Parameter:
            return Parameter(name, "float32", (SIZE, SIZE), direction)

        fill = Host(__file__, "fill_kept", (tensor("given"), tensor("kept", "out")))
        return fill, Host(__file__, "read_kept", (tensor("given"), tensor("kept"), tensor("out", "out")))
    from tests.npu import small_kernels

    return small_kernels.fill, small_kernels.read


def fill_kept(given: Any, kept: Any) -> None:
    """The kernel of `fill` in numpy."""
    kept[...] = given + given


def read_kept(given: Any, kept: Any, out: Any) -> None:
    """The kernel of `read` in numpy."""
    out[...] = given + kept
