"""The engine core dies, stops, or cannot be started: its requests end, and another one takes over."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from pypto_serving.engine import async_engine
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import EngineDeadError, UnavailableError
from pypto_serving.types.request import StepStats, StepTotals
from pypto_serving.types.tier import TierConfig
from tests.engine.replica import answers_are_right, begun, collect, config, request, run


def test_requests_while_a_core_is_replaced_end() -> None:
    """Each is refused, or lost with the old core, or answered by the new one; none waits for nobody."""

    async def scenario(engine: AsyncEngine) -> None:
        assert engine._child is not None
        old = engine._child.pid
        tasks = [asyncio.create_task(collect(engine, request("first", 10, 200)))]
        await asyncio.sleep(0)
        os.kill(old, signal.SIGKILL)
        while engine._child is None or engine._child.pid == old or engine.ready is None:
            tasks.append(asyncio.create_task(collect(engine, request(f"q{len(tasks)}", 5, 1))))
            await asyncio.sleep(0.001)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, UnavailableError)
            else:
                ((*_, last),) = result.values()
                assert last.finish_reason is not None

    run(config(), scenario)


def test_a_core_that_dies_fails_its_requests_and_is_replaced() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        task, outputs = await begun(engine, request("q", 10, 200))
        assert outputs[0].token_ids
        assert engine._child is not None and engine.ready is not None
        worker = psutil.Process(engine.ready.worker_pid)
        os.kill(engine._child.pid, signal.SIGKILL)
        await task
        faults = [output.fault for output in outputs if output.fault]
        assert [fault.status for fault in faults] == [503]
        assert engine.health().status == "loading"
        psutil.wait_procs([worker], timeout=5)
        assert not worker.is_running(), "the worker outlived its core"
        await engine.wait_ready()
        await answers_are_right(engine)

    run(config(), scenario)


def test_totals_go_on_when_a_core_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """And deaths count as in a row only if no step was completed in between."""
    monkeypatch.setattr(async_engine, "MAX_CORE_RESPAWNS", 1)
    names = (*(name for name in StepTotals.__struct_fields__ if name != "num_core_respawns"), "num_core_respawns")
    seen: list[tuple[int, ...]] = []

    def watch(stats: StepStats) -> None:
        seen.append(tuple(getattr(stats, name) for name in names))

    async def scenario(engine: AsyncEngine) -> None:
        engine.on_stats = watch
        await answers_are_right(engine)
        while not engine.stats.tiers[0].stored_blocks:
            await asyncio.sleep(0.01)
        for deaths, count in ((1, 2), (2, 1)):
            before = engine.stats
            assert engine._child is not None
            core = engine._child.pid
            os.kill(core, signal.SIGKILL)
            while engine._child is None or engine._child.pid == core:
                watch(engine.stats)
                await asyncio.sleep(0.01)
            await engine.wait_ready()
            await answers_are_right(engine, count, max_tokens=3)
            assert engine.stats.num_core_respawns == deaths
            assert engine.stats.generation_tokens == before.generation_tokens + 3 * count
        assert all(x <= y for one, two in pairwise(seen) for x, y in zip(one, two, strict=True))
        assert engine.stats.tiers[0].stored_blocks > 0

    tier = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(64,))
    run(config(tiers=(tier,)), scenario)


def test_another_core_waits_for_the_worker_of_the_one_that_died(tmp_path: Path) -> None:
    """It holds the lock of the disk tier's folder: the next worker would only read it, all its life."""

    async def scenario(engine: AsyncEngine) -> None:
        await answers_are_right(engine, count=1, max_tokens=5)
        assert engine._child is not None and engine.stats.tiers[0].writable
        os.kill(engine._child.pid, signal.SIGKILL)
        while engine.ready is not None:
            await asyncio.sleep(0.01)
        await engine.wait_ready()
        await answers_are_right(engine, count=1, max_tokens=5)
        assert engine.stats.tiers[0].writable

    tier = TierConfig(tier="disk", size_bytes=1 << 20, num_slots=(64,), place=str(tmp_path / "kv"))
    lingering = {"faults": {"1": ["linger", 2]}}
    run(config(tiers=(tier,), worker_module="tests.faulty_worker", backend_options=lingering), scenario)


def test_another_core_goes_without_a_folder_that_is_gone(tmp_path: Path) -> None:
    """As another worker does: only the first one of a server ends it, with an error of the option."""
    folder = tmp_path / "kv"

    async def scenario(engine: AsyncEngine) -> None:
        await answers_are_right(engine, count=1, max_tokens=5)
        shutil.rmtree(folder)
        folder.touch()
        assert engine._child is not None
        os.kill(engine._child.pid, signal.SIGKILL)
        while engine.ready is not None:
            await asyncio.sleep(0.01)
        await engine.wait_ready()
        await answers_are_right(engine, count=1, max_tokens=5)
        assert not engine.stats.tiers[0].writable

    tier = TierConfig(tier="disk", size_bytes=1 << 20, num_slots=(64,), place=str(folder))
    run(config(tiers=(tier,)), scenario)


def test_stop_does_not_wait_for_the_worker_of_a_core_that_died() -> None:
    async def main() -> None:
        options = {"faults": {"1": ["linger", 2]}}
        engine = AsyncEngine(config(worker_module="tests.faulty_worker", backend_options=options))
        await engine.start()
        await engine.wait_ready()
        await answers_are_right(engine, count=1, max_tokens=5)
        assert engine._child is not None and engine.ready is not None
        (lingering,) = psutil.Process(engine.ready.worker_pid).children()
        lingering.suspend()
        try:
            os.kill(engine._child.pid, signal.SIGKILL)
            while engine._channel is not None:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(engine.stop(), 20)
            assert lingering.is_running()
        finally:
            lingering.kill()

    asyncio.run(main())


def test_a_core_that_cannot_be_started_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, and when one that died is replaced. No file is left open."""

    async def scenario(engine: AsyncEngine) -> None:
        assert engine._child is not None
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        os.kill(engine._child.pid, signal.SIGKILL)
        assert "cannot be started" in str(await asyncio.wait_for(engine.wait_dead(), 20))

    async def at_start() -> None:
        before = psutil.Process().num_fds()
        engine = AsyncEngine(config())
        await engine.start()
        with pytest.raises(EngineDeadError, match=r"cannot be started: .*/no/such/python"):
            await engine.wait_ready()
        await engine.stop()
        assert psutil.Process().num_fds() == before

    run(config(), scenario)
    asyncio.run(at_start())


def test_a_core_that_stops_is_replaced() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert engine._child is not None
        pid = engine._child.pid
        os.kill(pid, signal.SIGSTOP)
        while engine.health().ok:
            await asyncio.sleep(0.05)
        while engine._child is None or engine._child.pid == pid:
            await asyncio.sleep(0.05)
        await engine.wait_ready()
        await answers_are_right(engine)

    run(config(), scenario)
