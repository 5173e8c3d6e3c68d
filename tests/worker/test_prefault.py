"""Memory for KV blocks is there before steps use it, a piece at a time, and what stands there stays."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pypto_serving.backend.null.program import NullProgram
from pypto_serving.parallel.topology import Placement
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.worker import loop
from pypto_serving.worker.__main__ import open_prefault
from pypto_serving.worker.layout import PackedTable, RowTables
from pypto_serving.worker.loop import PREFAULT_BYTES, PREFAULT_TOKENS, Prefault
from tests.configs import change_config
from tests.simulation import null_config

BLOCK_BYTES, BLOCKS = PREFAULT_BYTES // 2, 24
GROUP = FullSpec(
    name="kv",
    tensors=(KVTensorSpec(name="k", layers=(0,), dtype="bfloat16", row_shape=(1,)),),
    block_size=PREFAULT_TOKENS // 8,
)
"""Eight blocks hold the tokens for which there is memory ahead."""


class Blocks:
    def __init__(self) -> None:
        memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)  # begins at a page, whatever malloc was told in this process
        self.arena: BlockBytes = np.frombuffer(memory, np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        self.table = RowTables(4, [PackedTable(np.zeros((4, BLOCKS), np.int32))])
        self.ahead = Prefault([self.arena], [GROUP], [self.table])

    def there(self) -> list[int]:
        """Return the blocks all of whose memory the system has provided."""
        pages = BLOCK_BYTES // mmap.PAGESIZE
        found = (ctypes.c_ubyte * (BLOCKS * pages))()
        address = ctypes.c_void_p(self.arena.ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(self.arena.nbytes), found) == 0
        return np.flatnonzero((np.frombuffer(found, np.uint8) & 1).reshape(BLOCKS, pages).all(axis=1)).tolist()


def test_memory_is_there_for_the_next_tokens_and_no_more() -> None:
    blocks = Blocks()
    assert blocks.there() == []
    assert blocks.ahead()
    assert blocks.there() == [1, 2]  # a piece; the null block is not used
    assert [blocks.ahead() for _ in range(4)] == [True, True, True, False]
    assert blocks.there() == list(range(1, 9))
    blocks.table.set_row(2, np.array([3, 14], np.int32))
    while blocks.ahead():
        pass
    assert blocks.there() == [*range(1, 9), *range(15, 23)]  # those before it were handed out, and written, before
    blocks.table.set_row(1, np.array([BLOCKS - 1], np.int32))
    assert not blocks.ahead()


def test_what_stands_there_stays() -> None:
    blocks = Blocks()
    blocks.arena[2:6, ::4096] = 7
    while blocks.ahead():
        pass
    assert (blocks.arena[2:6, ::4096] == 7).all()
    assert not blocks.arena[6:9].any()


def test_a_system_that_provides_nothing_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, asked = Blocks(), []
    monkeypatch.setattr(loop, "populate", lambda memory: bool(asked.append(memory.nbytes)))
    assert blocks.ahead()
    assert not blocks.ahead()
    assert len(asked) == 1


@pytest.mark.parametrize(("nodes", "provides"), [((), True), ((0, 0), True), ((0, 1), False)])
def test_ranks_on_other_nodes_provide_their_own(nodes: tuple[int, ...], provides: bool) -> None:
    program = NullProgram(null_config())
    config = change_config(null_config(), placements=tuple(Placement(node=node) for node in nodes))
    tables = [RowTables(1, [PackedTable(np.zeros((1, 8), np.int32))]) for _ in program.groups]
    runner: Any = SimpleNamespace(batch=SimpleNamespace(tables=tables))
    assert open_prefault(config, program, runner)() is provides
