"""EngineClient: the interface between HTTP handlers and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pypto_serving.engine.stream import OutputStream
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, StepStats
from pypto_serving.types.tier import Tier


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine makes progress. `age_s` is the age of its last completed step in seconds.

    `status` is one word: ready, loading, draining, stalled, silent or dead; `detail` is one line for the operator.
    """

    ok: bool
    status: str
    detail: str = ""
    age_s: float = 0.0


class Monitored(Protocol):
    """What metrics show of one replica."""

    @property
    def stats(self) -> StepStats:
        """The newest snapshot."""

    def health(self) -> Health:
        """Return whether requests make progress; see Health."""


class EngineClient(Protocol):
    """The interface of an engine for HTTP handlers. Call all methods in the event loop's thread.

    The engine calls `on_stats` with every new snapshot.
    """

    on_stats: Callable[[StepStats], None]

    @property
    def config(self) -> EngineConfig:
        """The configuration that the engine was started with."""

    @property
    def engines(self) -> Sequence[Monitored]:
        """The engine of each replica."""

    def require_admission(self, count: int, num_tokens: int = 0) -> None:
        """Raise QueueFullError or UnavailableError unless `count` requests with `num_tokens` of prompts fit."""

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Admit all of `requests` or none. Raises QueueFullError or UnavailableError.

        The last output of a request has a finish_reason, and a fault if the request failed.
        """

    def give_up_all(self) -> None:
        """End every unfinished request with a 503, before the server ends."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests whose client is gone. Ignore unknown and finished ids."""

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        """Forget the cached blocks of some tiers. Raises UnavailableError while no engine runs."""

    def health(self) -> Health:
        """Return whether requests make progress, not only whether the process exists; see Health."""
