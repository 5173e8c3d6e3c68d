"""Hold what all handlers share: engine, prompts, seeds, admission and metrics."""

from __future__ import annotations

import logging
import time

from pypto_serving.api.http.drain import Admission
from pypto_serving.api.http.keys import ApiKeys
from pypto_serving.api.http.tracing import open_tracing
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.prompting.seeds import SeedSource
from pypto_serving.api.settings import ServingConfig
from pypto_serving.engine.client import EngineClient, Health
from pypto_serving.engine.history import History
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.types.stats import StepStats
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")

MAX_REMEMBERED_FIELDS = 1000
"""Unknown fields that are logged."""


class Service:
    """Join the parts of one server. Made once, at start.

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
        self.admission = Admission()
        self.tracing = open_tracing(serving.otlp_traces_endpoint)
        self.created = int(time.time())
        self.keys = ApiKeys(serving.api_keys, serving.api_key_file)
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
        """Raise what the admission of `count` requests would raise now: UnavailableError or QueueFullError."""
        self.admission.require_open()
        self.engine.require_admission(count)

    def health(self) -> Health:
        """Return the engine's health; while draining, report that instead."""
        health = self.engine.health()
        if self.admission.draining:
            detail = f"shutting down, {counted(self.admission.in_flight, 'request')} left"
            return Health(ok=False, status="draining", detail=detail, age_s=health.age_s)
        return health
