"""A real engine on a real checkpoint: core and worker processes, driven without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.setup.options import make_options
from pypto_serving.setup.prepare import model_spec, prepare
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import EngineConfig, FaultConfig
from pypto_serving.types.request import EngineRequest, RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import TokenLogprobs
from tests.configs import change_config

Reply = tuple[list[int], list[TokenLogprobs]]
"""Output tokens, and their log-probabilities if asked for."""

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FOR_KERNELS = {"deepseek_v4_fast": {"o_lora_rank": 32}}
"""What kinds of checkpoints need to be served by the kernels."""
QUICK_FAULTS = FaultConfig(respawn_delay_s=0.01, max_deaths=200)


def engine_config(model: Path, changes: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    """What `serve` would run with these options, then changed as no option can."""
    chosen = make_options({"model": str(model), "max_model_len": 512, "kv_memory": "64MiB", **options})
    config = prepare(chosen, model_spec(chosen)).engine
    return change_config(config, **(changes or {}))


def run_engine(config: EngineConfig, scenario: Callable[[AsyncEngine], Awaitable[Any]]) -> Any:
    """The scenario's result, against a started engine that is ended afterwards."""

    async def main() -> Any:
        engine = AsyncEngine(config)
        await engine.start()
        try:
            await engine.wait_ready()
            return await scenario(engine)
        finally:
            await engine.stop()

    return asyncio.run(main())


def requests_of(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], eos_token_ids: tuple[int, ...] = ()
) -> list[EngineRequest]:
    """One request for each prompt, with the seed of its parameters."""
    return [
        EngineRequest(
            request_id=f"q{i}",
            token_ids=pack_ids(prompt),
            params=wanted,
            seed=wanted.seed or 0,
            eos_token_ids=eos_token_ids,
        )
        for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
    ]


async def replies(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
    eos_token_ids: tuple[int, ...] = (),
) -> list[Reply]:
    """All prompts at once; what they get in order. No request may fail."""
    wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    found: dict[str, Reply] = {f"q{i}": ([], []) for i in range(len(prompts))}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.fault is None, output.fault
            tokens, values = found[output.request_id]
            tokens += unpack_ids(output.token_ids).tolist()
            values += output.logprobs or []
            on_output(output)

    await engine.submit(requests_of(prompts, wanted, eos_token_ids)).deliver_to(take)
    return list(found.values())


async def answers(engine: AsyncEngine, *arguments: Any, **options: Any) -> list[list[int]]:
    """The output tokens of `replies`."""
    return [tokens for tokens, _ in await replies(engine, *arguments, **options)]


class Killer:
    """Kills the worker at a random point of each of its lives, `count` times in all; an `on_output` for `answers`.

    A quick kill hits the recovery from the one before; a slow one comes once every stream has gone on, so that no
    stream is hit three times at the same place, after which the engine may give it up. `planned` are lives that
    end by themselves.
    """

    def __init__(self, engine: AsyncEngine, count: int, seed: int, planned: Collection[int] = ()) -> None:
        self.engine, self.left, self.planned = engine, count, planned
        self.killed = 0
        self._rng = random.Random(seed)
        self._epoch = 0
        self._due = 0
        self._quick = False
        self._seen: set[str] = set()
        self._finished: set[str] = set()

    def __call__(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self._finished.add(output.request_id)
        ready = self.engine.ready
        if ready is None or self.left == 0 or ready.epoch in self.planned:
            return
        if ready.epoch != self._epoch:
            self._begin(ready.epoch)
        self._seen.add(output.request_id)
        everybody = self._seen | self._finished >= set(self.engine._streams)
        if self._quick or everybody:
            self._due -= 1
            if self._due <= 0:
                self._kill(ready.worker_pid)

    def _begin(self, epoch: int) -> None:
        after_quick = self._quick or epoch - 1 in self.planned
        self._epoch = epoch
        self._quick = not after_quick and epoch + 1 not in self.planned and self._rng.random() < 0.5
        self._due = self._rng.randrange(1, 40)
        self._seen.clear()

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.left -= 1
        self.killed += 1
        self._due = 1 << 30
