"""The parts that all handlers share: engine, prompts, seeds, admission and metrics."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from pypto_serving.api.http.allowance import ALLOWANCE, KeyMetrics
from pypto_serving.api.http.keys import ApiKeys
from pypto_serving.api.http.tracing import open_tracing
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.engine.client import EngineClient, Health
from pypto_serving.engine.history import History
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.errors import SHUTTING_DOWN, UnavailableError
from pypto_serving.types.request import StepStats
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")
MAX_REMEMBERED_FIELDS = 1000
"""Log at most this many different unknown fields."""
_MASK = 2**64 - 1


class Service:
    """The shared parts of one server. Created once, at start.

    Only `admission`, `history`, `keys`, `metrics` and `seeds` change.
    """

    def __init__(self, engine: EngineClient, serving: ServingConfig) -> None:
        self.engine = engine
        self.serving = serving
        self.prompter = Prompter.load(engine.config, serving)
        self.tokenizer = self.prompter.tokenizer
        self.eos_token_ids = self.prompter.eos_token_ids
        self.model_name = serving.served_model_names[0]
        self.metrics = ServerMetrics(engine, self.model_name)
        self.history = History(engine, self.metrics)
        engine.on_stats = self._observe
        self.admission = RequestAdmission()
        self.tracing = open_tracing(serving.otlp_traces_endpoint)
        self.created = int(time.time())
        self.keys = ApiKeys(serving.api_keys, serving.api_key_file)
        self.metrics.add(KeyMetrics(lambda: self.keys.allowances.values()))
        self.seeds = SeedSource(engine.config.seed)
        self._warned_fields: set[str] = set()
        logger.info("%s", serving.default_sampling.describe())

    def _observe(self, stats: StepStats) -> None:
        self.metrics.observe_step(stats)
        self.history.observe(time.monotonic())

    def warn_ignored(self, names: list[str]) -> None:
        """Log each unknown request field once."""
        for name in names:
            if name not in self._warned_fields and len(self._warned_fields) < MAX_REMEMBERED_FIELDS:
                self._warned_fields.add(name)
                logger.warning("ignoring the unknown request field %r (said once per field)", name)

    def require_admission(self, count: int) -> None:
        """Raise UnavailableError, QueueFullError or KeyLimitError if `count` requests would not be admitted now."""
        self.admission.require_open()
        if (allowance := ALLOWANCE.get()) is not None:
            allowance.require()
        self.engine.require_admission(count)

    def health(self) -> Health:
        """Return the engine's health or, while draining, report the drain."""
        health = self.engine.health()
        if self.admission.draining:
            detail = f"shutting down, {counted(self.admission.in_flight, 'request')} left"
            return Health(ok=False, status="draining", detail=detail, age_s=health.age_s)
        return health


class RequestAdmission:
    """Counts requests from admission to their last byte. Owned by Service; used in its event loop only."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def require_open(self) -> None:
        """Raise UnavailableError while draining."""
        if self.draining:
            raise UnavailableError(SHUTTING_DOWN)

    def enter(self) -> None:
        """Admit a request. Raises UnavailableError while draining."""
        self.require_open()
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count an admitted request as finished."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def drain(self) -> None:
        """Admit no more requests from now on."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Return when no admitted request is left."""
        await self._idle.wait()


class SeedSource:
    """Chooses the seed of each prompt; equal engine seeds give equal sequences of seeds. Owned by Service."""

    def __init__(self, engine_seed: int) -> None:
        self._random = random.Random(engine_seed)

    def seed_of(self, params: SamplingParams) -> int:
        """Return the seed in `params`, or draw one, as an unsigned 64-bit integer.

        Choices of one prompt share the seed; the sampler also uses the choice number.
        """
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        return seed & _MASK
