"""Where on its machine a rank runs."""

from __future__ import annotations

import msgspec


class NumaNode(msgspec.Struct, frozen=True):
    """CPUs that this process may use and that share the memory of one NUMA node."""

    index: int
    cpus: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs: its memory is that of the CPU which first writes to it.

    cpus: CPUs of its threads; empty for all that the process may use.
    node: NUMA node of all these CPUs, or None.
    num_threads: threads that compute; 0 for one per CPU.
    """

    cpus: tuple[int, ...] = ()
    node: int | None = None
    num_threads: int = 0
