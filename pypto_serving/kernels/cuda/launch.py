"""Launch kernels at once, or record the calls: for a graph, for a device of tests, or to compile them ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a Triton kernel. `constants` are its constexpr arguments, warps and stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)


Call = Callable[[], object]
_recorder: Callable[[Call], object] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel`, or record the launch."""
    run(Launch(kernel, grid, arguments, constants))


def run(call: Call) -> None:
    """Make a call that works on the device, such as a copy, or record it."""
    if _recorder is None:
        call()
    else:
        _recorder(call)


@contextmanager
def recording(record: Callable[[Call], object]) -> Iterator[None]:
    """Hand calls of this process to `record` instead of making them."""
    global _recorder
    before, _recorder = _recorder, record
    try:
        yield
    finally:
        _recorder = before


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
