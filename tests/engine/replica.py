"""Real engine core and worker processes on the null backend, for tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from pypto_serving.backend.null.device import next_digest
from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import EngineConfig, FaultConfig
from pypto_serving.types.request import EngineRequest, RequestOutput
from pypto_serving.types.sampling import SamplingParams
from tests.simulation import null_config

QUICK = FaultConfig(heartbeat_s=0.2, step_timeout_s=2.0, load_timeout_s=60.0, respawn_delay_s=0.01)


def config(**changes: Any) -> EngineConfig:
    options = changes.pop("backend_options", {})
    return null_config(num_blocks=600, backend_options=options, **{"faults": QUICK, "depth": 2} | changes)


def run(config: EngineConfig, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """Run a scenario against a started engine; afterwards no process may be left."""

    async def main() -> None:
        engine = AsyncEngine(config)
        await engine.start()
        assert engine._child is not None
        core = psutil.Process(engine._child.pid)
        try:
            await engine.wait_ready()
            await scenario(engine)
        finally:
            processes = [core, *(core.children(recursive=True) if core.is_running() else [])]
            await engine.stop()
        _, alive = psutil.wait_procs(processes, timeout=5)
        assert not alive, f"left behind: {alive}"

    asyncio.run(main())


def request(name: str, length: int = 10, max_tokens: int = 20) -> EngineRequest:
    prompt = random.Random(name).choices(range(1000), k=length)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(request_id=name, token_ids=pack_ids(prompt), params=params)


async def collect(engine: AsyncEngine, *requests: EngineRequest) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {r.request_id: [] for r in requests}

    def take(batch: list[RequestOutput]) -> None:
        for output in batch:
            outputs[output.request_id].append(output)

    await engine.submit(requests).deliver_to(take)
    return outputs


async def begun(engine: AsyncEngine, source: EngineRequest) -> tuple[asyncio.Task[None], list[RequestOutput]]:
    """A task that collects the outputs of a request, of which the first has come."""
    outputs: list[RequestOutput] = []
    first = asyncio.Event()

    def take(batch: list[RequestOutput]) -> None:
        outputs.extend(batch)
        first.set()

    task = asyncio.create_task(engine.submit([source]).deliver_to(take))
    await first.wait()
    return task, outputs


def answer(outputs: list[RequestOutput]) -> list[int]:
    return [int(token) for output in outputs for token in unpack_ids(output.token_ids)]


def expected(source: EngineRequest, config: EngineConfig) -> list[int]:
    history = unpack_ids(source.token_ids).tolist()
    for _ in range(source.params.max_tokens or 0):
        history.append(next_digest(config.cache.groups, history) % config.model.vocab_size)
    return history[len(source.token_ids) // 4 :]


async def answers_are_right(engine: AsyncEngine, count: int = 6, max_tokens: int = 40) -> None:
    requests = [request(f"q{i}", 5 + 7 * i, max_tokens) for i in range(count)]
    outputs = await collect(engine, *requests)
    for source in requests:
        assert answer(outputs[source.request_id]) == expected(source, engine.config)
