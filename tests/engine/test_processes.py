"""Real engine core and worker processes on the null backend: start, faults, stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.errors import EXIT_ENGINE, EXIT_MODEL, EngineDeadError, QueueFullError, UnavailableError
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.tier import TierConfig
from tests.configs import change_config
from tests.engine.replica import QUICK, answer, answers_are_right, begun, collect, config, expected, request, run


def test_requests_are_answered_and_everything_ends() -> None:
    run(config(), answers_are_right)


def test_an_engine_whose_core_could_not_be_replaced_stops_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no more cores")

    async def scenario() -> None:
        engine = AsyncEngine(config())
        await engine.start()
        await engine.wait_ready()
        monkeypatch.setattr(engine, "_spawn", fail)
        assert engine._child is not None
        engine._child.process.kill()
        assert "no more cores" in str(await engine.wait_dead())
        await engine.stop()

    asyncio.run(scenario())


def test_requests_wait_in_the_queue_while_the_worker_loads() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(config())
        await engine.start()
        try:
            assert engine.health().status == "loading"
            await answers_are_right(engine)
            assert engine.health().status == "ready"
        finally:
            await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("points", [("before", "after"), ("hang", "raise")])
def test_a_worker_fault_changes_no_answer(points: tuple[str, str]) -> None:
    faults = {"1": [points[0], 5], "2": ["load", 0], "3": [points[1], 9]}

    async def scenario(engine: AsyncEngine) -> None:
        await answers_are_right(engine)
        assert engine.stats.num_respawns == 3

    run(config(worker_module="tests.faulty_worker", backend_options={"faults": faults}), scenario)


def test_an_idle_worker_that_stops_is_replaced() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        assert engine.ready is not None
        os.kill(engine.ready.worker_pid, signal.SIGSTOP)
        while engine.ready.epoch == 1:
            await asyncio.sleep(0.05)
        await answers_are_right(engine)

    run(config(), scenario)


def test_a_poisonous_request_fails_alone() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        good = [request(f"q{i}", 8, 60) for i in range(5)]
        params = SamplingParams(max_tokens=5, temperature=0)
        bad = EngineRequest(request_id="bad", token_ids=pack_ids([1, 2, 5000]), params=params)
        outputs = await collect(engine, *good, bad)
        fault = outputs["bad"][-1].fault
        assert fault is not None and fault.status == 500
        assert engine.stats.num_respawns == 3
        for source in good:
            assert answer(outputs[source.request_id]) == expected(source, engine.config)

    run(config(worker_module="tests.faulty_worker", backend_options={"poison": 5000}), scenario)


def test_many_poisonous_requests_fail_alone_and_end_nothing_else() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        good = [request(f"q{i}", 8, 60) for i in range(4)]
        params = SamplingParams(max_tokens=5, temperature=0)
        bad = [
            EngineRequest(request_id=f"bad{i}", token_ids=pack_ids([1, 2, 5000]), params=params)
            for i in range(engine.config.faults.max_respawns + 2)
        ]
        outputs = await collect(engine, *good, *bad)
        faults = [outputs[source.request_id][-1].fault for source in bad]
        assert all(fault is not None and fault.status == 500 for fault in faults)
        for source in good:
            assert answer(outputs[source.request_id]) == expected(source, engine.config)
        assert engine.health().ok

    run(config(worker_module="tests.faulty_worker", backend_options={"poison": 5000}), scenario)


def test_a_worker_that_never_comes_up_ends_the_replica() -> None:
    async def main() -> None:
        faults = msgspec.structs.replace(QUICK, max_respawns=2)
        options = {"faults": {str(epoch): ["load", 0] for epoch in range(1, 9)}}
        broken = config(worker_module="tests.faulty_worker", backend_options=options)
        engine = AsyncEngine(change_config(broken, faults=faults))
        await engine.start()
        with pytest.raises(EngineDeadError, match="died 3 times") as raised:
            await engine.wait_ready()
        assert raised.value.exit_code == EXIT_ENGINE
        assert engine.health().status == "dead"
        with pytest.raises(UnavailableError, match="died 3 times"):
            engine.submit([request("late")])
        await engine.stop()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_not_tried_again(tmp_path: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(change_config(config(), backend="cpu", model=str(tmp_path)))
        await engine.start()
        with pytest.raises(EngineDeadError, match=r"config\.json") as raised:
            await engine.wait_ready()
        assert raised.value.exit_code == EXIT_MODEL
        await engine.stop()

    asyncio.run(main())


def test_a_full_disk_is_not_writable_until_there_is_room(tmp_path: Path) -> None:
    """The worker may not let files grow, as on a full disk, and then it may."""

    async def store_until(engine: AsyncEngine, writable: bool, name: str) -> None:
        for i in range(1000):
            await collect(engine, request(f"{name}{i}", 40, 2))
            if engine.stats.tiers[0].writable == writable:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"writable is still {not writable}")

    async def scenario(engine: AsyncEngine) -> None:
        assert engine.ready is not None
        worker = psutil.Process(engine.ready.worker_pid)
        _, hard = worker.rlimit(psutil.RLIMIT_FSIZE)
        assert engine.stats.tiers[0].writable
        worker.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
        await store_until(engine, False, "full")
        assert engine.stats.tiers[0].stored_blocks == 0
        worker.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
        await store_until(engine, True, "room")
        assert engine.stats.tiers[0].stored_blocks > 0

    tier = TierConfig(tier="disk", size_bytes=1 << 20, num_slots=(64,), place=str(tmp_path / "kv"))
    run(config(tiers=(tier,)), scenario)


@pytest.mark.timeout(60)
def test_a_load_that_hangs_and_holds_the_pool_changes_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """The next worker goes without the tier, and the one after has it again."""
    sources = [request(name, 240, 4) for name in ("a", "b", "a")]

    async def scenario(engine: AsyncEngine) -> None:
        for source in sources:
            outputs = await collect(engine, source)
            assert answer(outputs[source.request_id]) == expected(source, engine.config)
            while engine.stats.tiers[0].stored_blocks < 15:
                await asyncio.sleep(0.01)
        assert engine.ready is not None and engine.ready.epoch == 2
        assert not engine.stats.tiers[0].writable
        os.kill(engine.ready.worker_pid, signal.SIGKILL)
        await answers_are_right(engine)
        assert engine.ready.epoch == 3 and engine.stats.tiers[0].writable

    options = {"stalled": 1, "seconds_per_token": 0.01}
    tier = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(64,))
    stalled = config(tiers=(tier,), worker_module="tests.faulty_worker", backend_options=options)
    faults = msgspec.structs.replace(QUICK, transfer_timeout_s=0.2)
    run(change_config(stalled, num_blocks=(18,), faults=faults), scenario)
    assert "transfers with host hang, and requests wait for their blocks" in capfd.readouterr().err


def test_a_worker_that_dies_after_a_few_steps_of_each_life_ends_the_replica() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = await collect(engine, request("q", 10, 200))
        fault = outputs["q"][-1].fault
        assert fault is not None and fault.status == 503
        assert "the worker died 4 times within 600 s; last: it ended" in str(await engine.wait_dead())

    options = {"faults": {str(epoch): ["after", 3] for epoch in range(1, 60)}}
    mortal = config(worker_module="tests.faulty_worker", backend_options=options)
    run(change_config(mortal, faults=msgspec.structs.replace(QUICK, max_deaths=3)), scenario)


def test_the_queue_is_bounded_and_admission_is_all_or_nothing() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        engine.submit([request(f"q{i}", 10, 200) for i in range(4)])
        with pytest.raises(
            QueueFullError, match="has 4 unfinished requests; it runs 1 at once and queues 4;"
        ) as raised:
            engine.submit([request("more1"), request("more2")])
        assert 1 <= raised.value.retry_after_s <= 60
        assert set(engine._streams) == {"q0", "q1", "q2", "q3"}
        engine.abort(["q1", "q2", "q3"])
        with pytest.raises(QueueFullError, match="has 1 unfinished request;"):
            engine.submit([request(f"more{i}") for i in range(5)])
        assert set(engine._streams) == {"q0"}

    run(config(max_queued_requests=4, max_num_seqs=1), scenario)


def test_the_queue_is_bounded_in_tokens() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(QueueFullError, match="has prompts of 70 tokens that wait, and queues at most 50;"):
            engine.submit([request("first", 70, 100)])  # nothing else waits, so it may be longer
            engine.submit([request("second", 1)])
        assert set(engine._streams) == {"first"}
        engine.abort(["first"])
        choices = [msgspec.structs.replace(request("choice", 30, 60), request_id=f"c{i}", choice=i) for i in range(4)]
        stream = engine.submit(choices)  # whose prompt counts once
        engine.submit([request("beside", 20, 2)])
        with pytest.raises(QueueFullError, match="prompts of 50 tokens"):
            engine.submit([request("more", 1)])
        await stream.deliver_to(lambda batch: None)
        while engine._queued.num_tokens:
            await asyncio.sleep(0)
        engine.submit([request("later", 50, 2)])

    run(config(max_queued_tokens=50), scenario)


@pytest.mark.parametrize("pause", [False, True])
def test_requests_for_which_rows_are_free_do_not_count_as_waiting(pause: bool) -> None:
    """A burst of exactly the rows and the queue is admitted, whatever the core has scheduled of it so far."""

    async def scenario(engine: AsyncEngine) -> None:
        for i in range(24 + 2):
            engine.submit([request(f"q{i}", 10, 200)])
            if pause:
                await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="has 26 unfinished requests; it runs 24 at once and queues 2"):
            engine.submit([request("more")])

    run(config(max_queued_requests=2, max_num_seqs=24), scenario)


def test_a_closed_stream_frees_its_blocks() -> None:
    async def scenario(engine: AsyncEngine) -> None:
        task, _ = await begun(engine, request("q", 10, 240))
        task.cancel()
        await answers_are_right(engine, count=1, max_tokens=5)
        assert engine.stats.num_running == engine.stats.num_waiting == 0
        assert max(engine.stats.kv_usage) == 0

    run(config(), scenario)


def test_stop_does_not_wait_for_a_step_that_hangs() -> None:
    """The worker is told, and then ended, whatever it does."""
    faults = {"1": ["hang", 3]}

    async def scenario(engine: AsyncEngine) -> None:
        task, outputs = await begun(engine, request("q", 10, 200))
        started_s = asyncio.get_running_loop().time()
        await engine.stop()
        assert asyncio.get_running_loop().time() - started_s < 5
        await task
        assert outputs[-1].fault is not None

    slow = msgspec.structs.replace(QUICK, step_timeout_s=600.0)
    hanging = config(worker_module="tests.faulty_worker", backend_options={"faults": faults})
    run(change_config(hanging, faults=slow), scenario)


def test_children_end_when_the_api_process_is_killed() -> None:
    script = (
        "import asyncio, sys\n"
        "from tests.engine.replica import config\n"
        "from pypto_serving.engine.async_engine import AsyncEngine\n"
        "async def main():\n"
        "    engine = AsyncEngine(config())\n"
        "    await engine.start()\n"
        "    await engine.wait_ready()\n"
        "    print(engine._child.pid, engine.ready.worker_pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    import subprocess

    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        children = [psutil.Process(int(pid)) for pid in api.stdout.readline().split()]
        os.kill(children[1].pid, signal.SIGSTOP)
        api.kill()
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert len(gone) == 2 and not alive


def test_a_disk_tier_that_is_lost_is_said_once_and_changes_no_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"

    async def scenario(engine: AsyncEngine) -> None:
        await answers_are_right(engine)
        folder.rename(tmp_path / "gone")
        folder.touch()
        os.kill(engine.ready.worker_pid, signal.SIGKILL)
        await answers_are_right(engine)

    tier = TierConfig(tier="disk", size_bytes=1 << 20, num_slots=(64,), place=str(folder))
    run(config(tiers=(tier,)), scenario)
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "disk tier" in line]
    assert re.match(r"\d\d:\d\d:\d\d WARNING worker: disk tier in ", said)
    assert said.endswith("it cannot be opened: not a directory")
