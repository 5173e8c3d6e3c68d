"""Replicas: several engines of one server. `Router` chooses the engine of each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from pypto_serving.engine.async_engine import AsyncEngine
from pypto_serving.engine.client import Health, OutputStream
from pypto_serving.engine.routing import Router
from pypto_serving.errors import PyptoError, QueueFullError, UnavailableError
from pypto_serving.types.arrays import ID_BYTES
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestOutput, StepStats, num_prompt_tokens
from pypto_serving.types.tier import Tier
from pypto_serving.util import counted

log = logging.getLogger(__name__)


OnProgress = Callable[[str, int, int], None]


def make_engine(configs: Sequence[EngineConfig], on_progress: OnProgress | None = None) -> AsyncEngine | Replicas:
    """Make the engine of a server: one, or data-parallel replicas."""
    return AsyncEngine(configs[0], on_progress) if len(configs) == 1 else Replicas(configs, on_progress)


class Replicas:
    """Owns the engines of data-parallel replicas, and the router. Lives in one event loop. Implements EngineClient.

    Replicas without progress, such as one that is loading, get no requests while another makes progress. The server
    ends when all replicas have given up.
    """

    def __init__(self, configs: Sequence[EngineConfig], on_progress: OnProgress | None = None) -> None:
        self.engines = [
            AsyncEngine(config, on_progress if index == 0 else None) for index, config in enumerate(configs)
        ]
        self._router = Router(configs[0], len(configs))
        for index, engine in enumerate(self.engines):
            engine.on_milestone = self._on_milestone
            engine.on_lost = partial(self._router.lose, index)
            engine.on_worker_lost = partial(self._router.lose_device, index)

    # Life.

    async def start(self) -> None:
        """Start all cores, each of which starts its worker."""
        for engine in self.engines:
            await engine.start()

    async def wait_ready(self) -> None:
        """Wait until a worker of every replica is ready. Raise the error of a replica that gives up first."""
        await asyncio.gather(*(engine.wait_ready() for engine in self.engines))

    async def wait_dead(self) -> PyptoError:
        """Wait until every replica gave up, and return the last reason."""
        waits = [asyncio.ensure_future(engine.wait_dead()) for engine in self.engines]
        try:
            for done in asyncio.as_completed(waits):
                error = await done
                log.error("a replica gave up: %s; %s left", error, counted(self._num_alive, "replica"))
        finally:
            for wait in waits:
                wait.cancel()
        return error

    @property
    def _num_alive(self) -> int:
        return sum(engine.health().status != "dead" for engine in self.engines)

    async def stop(self) -> None:
        """End all cores and their workers. Unfinished requests end with a 503."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    # Requests.

    @property
    def config(self) -> EngineConfig:
        """The configuration of the first replica; the others differ only in placement and addresses."""
        return self.engines[0].config

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Admit all of `requests` or none. Requests that continue the same prompt go to the same replica."""
        shares = self._route(requests)
        stream = OutputStream([request.request_id for request in requests], self.abort)
        for index, share in enumerate(shares):
            if share:
                self.engines[index].submit_to(stream, share)
                stream.replicas |= {request.request_id: index for request in share}
        return stream

    def _route(self, requests: Sequence[EngineRequest]) -> list[list[EngineRequest]]:
        """Assign requests to replicas. If none admits a prompt's requests, raise the error of the best replica."""
        shares: list[list[EngineRequest]] = [[] for _ in self.engines]
        for _, run in groupby(requests, attrgetter("token_ids")):
            prompted = list(run)
            try:
                self._route_prompt(prompted, shares)
            except PyptoError:
                self._forget([request.request_id for request in requests])
                raise
        return shares

    def _route_prompt(self, requests: Sequence[EngineRequest], shares: list[list[EngineRequest]]) -> None:
        prompt = requests[0].token_ids
        links = self._router.links(prompt, requests[0].cache_salt)
        refusals: list[PyptoError] = []
        order = self._router.order(len(prompt) // ID_BYTES, links, [engine.stats for engine in self.engines])
        for index in sorted(order, key=lambda index: not self.engines[index].health().ok):
            try:
                share = [*shares[index], *requests]
                self.engines[index].require_admission(len(share), num_prompt_tokens(share))
            except (QueueFullError, UnavailableError) as refusal:
                refusals.append(refusal)
                continue
            ids = [request.request_id for request in requests]
            self._router.add_requests(index, ids, len(prompt) // ID_BYTES, links)
            shares[index] += requests
            return
        raise refusals[0]

    def require_admission(self, count: int, num_tokens: int = 0) -> None:
        """Raise the error of a replica if none would admit `count` requests with `num_tokens` of prompts."""
        refusals: list[PyptoError] = []
        for engine in self.engines:
            try:
                return engine.require_admission(count, num_tokens)
            except (QueueFullError, UnavailableError) as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without a further output. Ignore unknown ids."""
        for engine in self.engines:
            engine.abort(request_ids)
        self._forget(request_ids)

    def give_up_all(self) -> None:
        """End every unfinished request with a 503."""
        for engine in self.engines:
            engine.give_up_all()

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        """Forget the cached blocks of some tiers in all replicas that have not given up.

        Raises UnavailableError while one has no core; the others have forgotten their blocks all the same.
        """
        refusals: list[UnavailableError] = []
        for engine in self.engines:
            try:
                if engine.health().status != "dead":
                    engine.clear_cache(tiers)
            except UnavailableError as refusal:
                refusals.append(refusal)
        self._router.clear_caches()
        if refusals:
            raise refusals[0]

    def _on_milestone(self, output: RequestOutput) -> None:
        if output.finish_reason is None:
            self._router.begin_output(output.request_id)
        else:
            self._router.finish(output.request_id)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._router.finish(request_id)

    # Views.

    @property
    def kv_events(self) -> list[tuple[str, str]]:
        """Return the endpoints of KV events and of their replay, for each replica that publishes events."""
        return [endpoints for engine in self.engines for endpoints in engine.kv_events]

    @property
    def on_stats(self) -> Callable[[StepStats], None]:
        """Return the callback that each engine calls with every new snapshot."""
        return self.engines[0].on_stats

    @on_stats.setter
    def on_stats(self, on_stats: Callable[[StepStats], None]) -> None:
        for engine in self.engines:
            engine.on_stats = on_stats

    def health(self) -> Health:
        """Return the best health of a replica, and name the replicas without progress."""
        found = [engine.health() for engine in self.engines]
        best = max(found, key=lambda health: health.ok)
        ill = [f"replica {index} is {health.status}" for index, health in enumerate(found) if not health.ok]
        return replace(best, detail="; ".join([best.detail, *ill] if best.detail else ill)) if ill else best
