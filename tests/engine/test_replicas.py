"""Data-parallel replicas: real cores and workers on the null backend behind one client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import msgspec
import psutil
import pytest

from pypto_serving.engine.replicas import Replicas
from pypto_serving.errors import EngineDeadError, QueueFullError, UnavailableError
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import EngineConfig, FaultConfig
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.sampling import SamplingParams
from tests.engine.replica import answer, begun, collect, config, expected, request


def run(scenario: Callable[[Replicas], Awaitable[None]], count: int = 2, **changes: object) -> None:
    """Run a scenario against started replicas; afterwards no process may be left."""

    async def main() -> None:
        replicas = Replicas([config(**changes) for _ in range(count)])
        await replicas.start()
        cores = [psutil.Process(engine._child.pid) for engine in replicas.engines if engine._child is not None]
        try:
            await replicas.wait_ready()
            await scenario(replicas)
        finally:
            processes = [*cores, *(child for core in cores if core.is_running() for child in core.children())]
            await replicas.stop()
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert not alive, f"left behind: {alive}"

    asyncio.run(main())


def steps(replicas: Replicas) -> list[int]:
    return [engine.stats.generation_tokens for engine in replicas.engines]


def after(source: EngineRequest, name: str) -> EngineRequest:
    """The next turn of a conversation: a request that begins with the prompt of another."""
    tokens = [*unpack_ids(source.token_ids).tolist(), 5, 6, 7]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    return EngineRequest(request_id=name, token_ids=pack_ids(tokens), params=params)


def test_all_replicas_answer_and_conversations_stay_with_theirs() -> None:
    async def scenario(replicas: Replicas) -> None:
        first = [request(f"q{i}", 200, 5) for i in range(6)]
        found = await collect(replicas, *first)
        assert all(answer(found[source.request_id]) == expected(source, replicas.config) for source in first)
        assert min(steps(replicas)) > 0
        second = [after(source, f"again {i}") for i, source in enumerate(first)]
        for source in second:
            (*_, last) = (await collect(replicas, source))[source.request_id]
            assert last.num_cached_tokens >= 192
        assert not replicas._router._unfinished

    run(scenario)


def test_requests_of_one_message_are_spread_and_choices_stay_together() -> None:
    async def scenario(replicas: Replicas) -> None:
        sources = [request(f"q{i}", 200 + i, 5) for i in range(4)]
        choices = [
            EngineRequest(request_id=f"{source.request_id} {choice}", token_ids=source.token_ids, params=source.params)
            for source in sources
            for choice in range(2)
        ]
        found = await collect(replicas, *choices)
        for choice in choices:
            assert answer(found[choice.request_id]) == expected(choice, replicas.config)
        assert [engine.stats.prompt_tokens for engine in replicas.engines] in (
            [804, 808],
            [808, 804],
            [806, 806],
            [802, 810],
        )

    run(scenario)


def test_a_core_that_dies_fails_its_requests_only() -> None:
    async def scenario(replicas: Replicas) -> None:
        tasks = [await begun(replicas, request(f"q{i}", 200, 200)) for i in range(2)]
        core = replicas.engines[0]._child
        assert core is not None
        os.kill(core.pid, signal.SIGKILL)
        await asyncio.gather(*(task for task, _ in tasks))
        faults = [[output.fault.status for output in outputs if output.fault] for _, outputs in tasks]
        assert sorted(faults) == [[], [503]]
        assert replicas.health().ok and "replica 0 is loading" in replicas.health().detail
        source = request("meanwhile", 20, 5)
        assert answer((await collect(replicas, source))["meanwhile"]) == expected(source, replicas.config)
        await replicas.wait_ready()
        assert replicas.health().detail == ""

    run(scenario)


def test_a_replica_that_loads_is_passed_over() -> None:
    """Its prefixes would have to wait for its worker."""

    async def scenario(replicas: Replicas) -> None:
        source = request("first", 200, 5)
        await collect(replicas, source)
        owner = next(engine for engine in replicas.engines if engine.stats.generation_tokens)
        lost = asyncio.Event()
        replicas.on_stats = lambda stats: None if owner.stats.ready else lost.set()
        assert owner.ready is not None
        os.kill(owner.ready.worker_pid, signal.SIGKILL)
        await lost.wait()
        assert (await collect(replicas, after(source, "again")))["again"][-1].finish_reason == "length"
        assert min(steps(replicas)) > 0 and owner.health().status == "loading"

    run(scenario, faults=FaultConfig(heartbeat_s=0.1, respawn_delay_s=300))


def test_a_conversation_does_not_wait_for_a_device_that_lost_it() -> None:
    """It goes to the replica that has computed less."""

    async def scenario(replicas: Replicas) -> None:
        source = request("first", 200, 5)
        await collect(replicas, source)
        owner, other = sorted(replicas.engines, key=lambda engine: -engine.stats.generation_tokens)
        assert owner.ready is not None
        os.kill(owner.ready.worker_pid, signal.SIGKILL)
        while not (owner.ready.epoch == 2 and owner.health().ok):
            await asyncio.sleep(0.01)
        await collect(replicas, after(source, "again"))
        assert other.stats.generation_tokens == 5

    run(scenario)


def test_a_full_replica_is_passed_over_and_full_ones_refuse() -> None:
    async def scenario(replicas: Replicas) -> None:
        tasks = [await begun(replicas, request(f"q{i}", 20, 300)) for i in range(2)]
        waiting = [request(f"w{i}", 20, 5) for i in range(2)]
        streams = [asyncio.create_task(replicas.submit([source]).deliver_to(lambda batch: None)) for source in waiting]
        with pytest.raises(QueueFullError):
            replicas.submit([request("one too many", 20, 5)])
        with pytest.raises(QueueFullError):
            replicas.require_admission(1)
        assert len(replicas._router._unfinished) == 4
        replicas.abort([f"q{i}" for i in range(2)])
        await asyncio.gather(*streams, *(task for task, _ in tasks))
        assert not replicas._router._unfinished

    run(scenario, max_num_seqs=1, max_queued_requests=1)


def broken() -> EngineConfig:
    """The configuration of a replica whose workers never load."""
    options = {"faults": {str(epoch): ["load", 0] for epoch in range(1, 9)}}
    never = config(backend_options=options, worker_module="tests.faulty_worker")
    return msgspec.structs.replace(never, faults=msgspec.structs.replace(never.faults, max_respawns=1))


def test_caches_are_cleared_beside_a_replica_that_gave_up() -> None:
    async def main() -> None:
        replicas = Replicas([broken(), config()])
        await replicas.start()
        try:
            with pytest.raises(EngineDeadError):
                await replicas.engines[0].wait_ready()
            await replicas.engines[1].wait_ready()
            source = request("q", 200, 5)
            await collect(replicas, source)
            replicas.clear_cache(("device",))
            await collect(replicas, msgspec.structs.replace(source, request_id="again"))
            assert replicas.engines[1].stats.prefix_hits == 0
        finally:
            await replicas.stop()

    asyncio.run(main())


def test_the_last_replica_that_gives_up_ends_the_server() -> None:
    async def main() -> None:
        replicas = Replicas([broken()] * 2)
        await replicas.start()
        try:
            error = await asyncio.wait_for(replicas.wait_dead(), 60)
            assert str(error)
            with pytest.raises(UnavailableError):
                replicas.submit([request("q", 5, 5)])
            assert replicas.health().status == "dead"
        finally:
            await replicas.stop()

    asyncio.run(main())
