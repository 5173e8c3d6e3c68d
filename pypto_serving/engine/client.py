"""What the API process needs of an engine: the seam between HTTP handlers and the front half of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pypto_serving.engine.stream import OutputStream
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest
from pypto_serving.types.stats import StepStats
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


class EngineClient(Protocol):
    """An engine as handlers see it. All methods are called in the event loop's thread.

    `on_stats` is called with every new snapshot.
    """

    on_stats: Callable[[StepStats], None]

    @property
    def config(self) -> EngineConfig:
        """What the engine was started with."""

    @property
    def stats(self) -> StepStats:
        """The newest snapshot."""

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Admit all of `requests` or none; raises QueueFullError or UnavailableError.

        The last output of a request has its finish_reason, and a fault where the engine gave it up.
        """

    def give_up_all(self) -> None:
        """End every unfinished request with a 503, because the server is about to end."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more; unknown and finished ids are ignored."""

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        """Forget cached blocks of some tiers; raises UnavailableError while there is no engine to do so."""

    def health(self) -> Health:
        """Progress, not existence: see Health."""
