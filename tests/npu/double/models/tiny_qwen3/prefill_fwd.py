"""The host function of prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pypto.ir.distributed_compiled_program import Host, Parameter

KERNELS = str(Path(__file__).with_name("kernels.py"))


def make_host(config: Any, args: Any) -> Host:
    """Make the host function for a model's arguments."""
    shapes = [tuple(-1 if isinstance(size, str) else size for size in arg.shape) for arg in args]
    parameters = [Parameter(arg.name, arg.dtype, shape, arg.direction) for arg, shape in zip(args, shapes, strict=True)]
    return Host(KERNELS, "prefill", tuple(parameters))
