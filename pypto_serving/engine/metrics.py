"""The metrics of /metrics: values of the newest snapshot of each engine, and histograms of the server."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pypto_serving.engine.client import EngineClient
from pypto_serving.types.request import StepStats, TierStats, Timeline
from pypto_serving.types.tier import TIERS

_SHORT_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2,
    5,
    10,
    30,
)
_LONG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, *(10 * 2**i for i in range(9)))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)
_HTTP_S = (0.1, 0.5, 1, 5, 10, 60)
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
UNCOUNTED = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/server_info", "/version"})
"""Paths of machines that watch the server, left out of HTTP metrics as in vLLM."""

HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first output token.", _LONG_S),
    "vllm:inter_token_latency_seconds": ("Time between outputs of one request.", _SHORT_S),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token after the first.", _SHORT_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last output token.", _LONG_S),
    "vllm:request_queue_time_seconds": ("From arrival until first scheduled.", _LONG_S),
    "vllm:request_prefill_time_seconds": ("From first scheduled to the first token.", _LONG_S),
    "vllm:request_decode_time_seconds": ("From the first to the last token.", _LONG_S),
    "vllm:request_inference_time_seconds": ("From first scheduled to the last token.", _LONG_S),
    "vllm:request_prompt_tokens": ("Prompt tokens of a finished request.", None),
    "vllm:request_generation_tokens": ("Output tokens of a finished request.", None),
    "vllm:request_max_num_generation_tokens": ("Output tokens of the longest choice of a finished HTTP request.", None),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens of a finished request that were not cached.", None),
    "vllm:request_params_n": ("Choices of each prompt of a finished HTTP request.", _CHOICES),
    "vllm:request_params_max_tokens": (
        "Limit of output tokens (max_tokens) of a finished HTTP request, given or by default.",
        None,
    ),
    "vllm:request_num_preemptions": ("Preemptions of a finished request.", _PREEMPTIONS),
    "vllm:iteration_tokens_total": ("Tokens computed per engine step.", None),
}


class Histogram:
    """Counts per bucket, and the sum. `bounds` are inclusive upper limits; one more bucket takes larger values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` once."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts in Prometheus' form, ending with +Inf."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(total)) for name, total in zip(names, accumulate(self.counts), strict=True)]


def token_bounds(max_model_len: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to the first bound that is at least `max_model_len`."""
    bounds: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            bounds.append(float(step * power))
            if bounds[-1] >= max_model_len:
                return bounds
        power *= 10


CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""vLLM's names of the limits at which requests are refused."""
STEP_PARTS = ("core", "packing", "computing", "sampling")
"""Time fields of StepStats, without their unit."""
_SOURCES = ("device", "host", "disk", "external_unspecified")
"""vLLM's name of each of TIERS."""
Values = float | Mapping[str, float]
"""The value of one engine, or its values by an additional label."""
_FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


def _lower_hits(stats: StepStats) -> int:
    return sum(tier.hit_tokens for tier in stats.tiers)


def _device_hits(stats: StepStats) -> int:
    """Return the prompt tokens found on the device. Like vLLM, count those of lower tiers separately."""
    return max(0, stats.prefix_hits - _lower_hits(stats))


def _sleep_states(stats: StepStats) -> Mapping[str, float]:
    """Return vLLM's states of an engine; one of this server never sleeps."""
    return {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def _waiting_by_reason(stats: StepStats) -> Mapping[str, float]:
    return {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}


def _tokens_by_source(stats: StepStats) -> Mapping[str, float]:
    return {
        "local_compute": max(0, stats.prompt_tokens - stats.prefix_hits),
        "local_cache_hit": _device_hits(stats),
        "external_kv_transfer": _lower_hits(stats),
    }


def _cached_by_source(stats: StepStats) -> Mapping[str, float]:
    names = dict(zip(TIERS, _SOURCES, strict=True))
    return {"device": _device_hits(stats)} | {names[tier.tier]: tier.hit_tokens for tier in stats.tiers}


_GAUGES: dict[str, tuple[str, Callable[[StepStats], Values]]] = {
    "vllm:num_requests_running": ("Requests in the running batch.", attrgetter("num_running")),
    "vllm:num_requests_waiting": ("Requests waiting to be scheduled.", attrgetter("num_waiting")),
    "vllm:kv_cache_usage_perc": (
        "Share of KV blocks in use, in the fullest group; 1 is full.",
        lambda stats: max(stats.kv_usage, default=0.0),
    ),
    "pypto:worker_epoch": ("Number of worker starts so far.", attrgetter("epoch")),
    "vllm:num_requests_waiting_by_reason": (
        "Requests waiting for room (capacity), or for a load or another's prefix (deferred).",
        _waiting_by_reason,
    ),
    "vllm:engine_sleep_state": ("1 for the state that the engine is in: always awake.", _sleep_states),
}
_COUNTERS: dict[str, tuple[str, Callable[[StepStats], Values]]] = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", attrgetter("prefix_queries")),
    "vllm:prefix_cache_hits": ("Prompt tokens found on the device.", _device_hits),
    "vllm:external_prefix_cache_queries": (
        "Prompt tokens looked up in tiers below the device.",
        lambda stats: stats.prefix_queries - _device_hits(stats) if stats.tiers else 0,
    ),
    "vllm:external_prefix_cache_hits": ("Prompt tokens found in tiers below the device.", _lower_hits),
    "vllm:prompt_tokens_cached": ("Prompt tokens that came from the device or a tier.", attrgetter("prefix_hits")),
    "vllm:prompt_tokens_by_source": ("Prompt tokens by where they came from.", _tokens_by_source),
    "vllm:prompt_tokens_cached_by_source": (
        "Cached prompt tokens by tier; external_unspecified is the remote one.",
        _cached_by_source,
    ),
    "vllm:prompt_tokens": ("Prompt tokens processed.", attrgetter("prompt_tokens")),
    "vllm:generation_tokens": ("Output tokens generated.", attrgetter("generation_tokens")),
    "vllm:num_preemptions": ("Preemptions.", attrgetter("num_preemptions")),
    "pypto:worker_respawns": ("Worker restarts.", attrgetter("num_respawns")),
    "pypto:core_respawns": ("Engine core restarts.", attrgetter("num_core_respawns")),
    "pypto:engine_steps": ("Engine steps.", attrgetter("num_steps")),
    "pypto:step_part_seconds": (
        "Time of the core, and of each part of steps in the worker.",
        lambda stats: {part: getattr(stats, f"{part}_s") for part in STEP_PARTS},
    ),
}
_LABELS = {
    "vllm:num_requests_waiting_by_reason": "reason",
    "vllm:engine_sleep_state": "sleep_state",
    "vllm:prompt_tokens_by_source": "source",
    "vllm:prompt_tokens_cached_by_source": "source",
    "pypto:step_part_seconds": "part",
}
_DRAFT_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("Times that a request had drafts to verify.", attrgetter("num_draft_rounds")),
    "vllm:spec_decode_num_draft_tokens": ("Drafts that were verified.", attrgetter("num_drafts")),
}
_TIER_GAUGES = {
    "writable": "1 while a tier has room for new blocks, and they can be stored.",
    "num_blocks": "Blocks that fit in a tier.",
    "held_blocks": "Blocks that a tier holds.",
    "queued_bytes": "Bytes being transferred to or from a tier.",
    "backlog_blocks": "Blocks waiting to be stored in a tier.",
}
_TIER_COUNTERS = {
    "hit_tokens": "Prompt tokens that came from a tier.",
    "loaded_blocks": "Blocks loaded from a tier.",
    "loaded_bytes": "Bytes loaded from a tier.",
    "load_s": "Total time of loads from a tier.",
    "stored_blocks": "Blocks stored in a tier.",
    "stored_bytes": "Bytes stored in a tier.",
    "store_s": "Total time of stores in a tier.",
    "evicted_blocks": "Blocks evicted from a tier.",
    "failed_blocks": "Blocks whose transfer failed.",
    "lost_blocks": "Blocks evicted from the device before they were stored in a tier.",
    "refused_fills": "Loads not started because computing was expected to be faster.",
    "saved_s": "Computing time saved by loads from a tier, minus loading time.",
}


class ServerMetrics(Collector):
    """All metrics of /metrics. Owned by the server; used in the event loop's thread only.

    `first_token` and `next_token` have the histogram of each engine.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]
        bounds_of_tokens = token_bounds(engine.config.limits.max_model_len)
        self._histograms = {
            name: [Histogram(bounds or bounds_of_tokens) for _ in engine.engines]
            for name, (_, bounds) in HISTOGRAMS.items()
        }
        self.first_token = self._histograms["vllm:time_to_first_token_seconds"]
        self.next_token = self._histograms["vllm:inter_token_latency_seconds"]
        self._finished = [Counter(dict.fromkeys(FINISH_REASONS, 0)) for _ in engine.engines]
        self._http: dict[tuple[str, str, str], Histogram] = {}
        self._responses: Counter[int] = Counter()
        self._rejections: Counter[str] = Counter(dict.fromkeys(REJECTIONS, 0))
        self._num_corrupted = 0
        self._gauge = partial(self._of_engines, GaugeMetricFamily)
        self._counter = partial(self._of_engines, CounterMetricFamily)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Show the metrics of `collector`, too."""
        self._registry.register(collector)

    def observe_step(self, stats: StepStats) -> None:
        """Record the steps of a new snapshot."""
        replica = next((i for i, engine in enumerate(self._engine.engines) if engine.stats is stats), 0)
        for num_tokens in stats.step_tokens:
            self._observe("vllm:iteration_tokens_total", num_tokens, replica)

    def observe_finish(
        self,
        reason: str,
        num_prompt: int,
        num_output: int,
        e2e_s: float,
        timeline: Timeline | None,
        num_cached: int = 0,
        replica: int = 0,
    ) -> None:
        """Record a request that ended for `reason` in a replica, `e2e_s` seconds after its arrival."""
        self._finished[replica][reason] += 1
        if reason not in ("stop", "length"):
            return
        observe = partial(self._observe, replica=replica)
        observe("vllm:e2e_request_latency_seconds", e2e_s)
        observe("vllm:request_prompt_tokens", num_prompt)
        observe("vllm:request_generation_tokens", num_output)
        observe("vllm:request_prefill_kv_computed_tokens", num_prompt - num_cached)
        if timeline is None:
            return
        observe("vllm:request_num_preemptions", timeline.num_preemptions)
        decode_s = timeline.finished_s - timeline.first_token_s
        observe("vllm:request_queue_time_seconds", timeline.scheduled_s - timeline.arrival_s)
        observe("vllm:request_prefill_time_seconds", timeline.first_token_s - timeline.scheduled_s)
        observe("vllm:request_decode_time_seconds", decode_s)
        observe("vllm:request_inference_time_seconds", timeline.finished_s - timeline.scheduled_s)
        if num_output > 1:
            observe("vllm:request_time_per_output_token_seconds", decode_s / (num_output - 1))

    def observe_answer(self, num_choices: int, max_tokens: int, num_longest: int, replica: int = 0) -> None:
        """Record a finished HTTP request: its parameters, and the output tokens of its longest choice."""
        self._observe("vllm:request_params_n", num_choices, replica)
        self._observe("vllm:request_params_max_tokens", max_tokens, replica)
        self._observe("vllm:request_max_num_generation_tokens", num_longest, replica)

    def observe_http(self, handler: str, method: str, status: int, elapsed_s: float) -> None:
        """Record an HTTP request, from its arrival to the last byte of the answer. `handler`: template of its path."""
        if handler in UNCOUNTED:
            return
        key = (handler, method if method in METHODS else "other", f"{status // 100}xx")
        if key not in self._http:
            self._http[key] = Histogram(_HTTP_S)
        self._http[key].observe(elapsed_s)

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused because of one of REJECTIONS."""
        self._rejections[reason] += 1

    def count_corrupted(self) -> None:
        """Count a request whose logits were not finite."""
        self._num_corrupted += 1

    def count_response(self, status: int) -> None:
        """Count an HTTP response with `status`."""
        self._responses[status] += 1

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The registry calls this at a scrape."""
        stats = [engine.stats for engine in self._engine.engines]
        for make, table in ((self._gauge, _GAUGES), (self._counter, _COUNTERS)):
            for name, (help_text, value_of) in table.items():
                yield make(name, help_text, map(value_of, stats), _LABELS.get(name, ""))
        yield from self._configured(stats)
        if self._engine.config.num_drafts:
            yield from self._drafts(stats)
        if self._engine.config.cache.tiers:
            stages = [dict(zip(_FETCH_STAGES, each.loading, strict=False)) for each in stats]
            help_text = "Waiting requests whose blocks come from a tier."
            yield self._gauge("vllm:num_requests_kv_fetch_by_stage", help_text, stages, "stage")
        yield from self._tiers([each.tiers for each in stats])
        yield from self._of_server()

    def _of_server(self) -> Iterator[Metric]:
        """Yield what the API process counts: requests by engine, the others for all engines together."""
        yield self._counter("vllm:request_success", "Finished requests.", self._finished, "finished_reason")
        statuses = {str(status): count for status, count in sorted(self._responses.items())}
        for name, help_text, label, values in (
            ("vllm:admission_rejections", "Requests that a full queue refused.", "reason", self._rejections),
            ("vllm:corrupted_requests", "Requests whose logits were not finite.", "", {"": self._num_corrupted}),
            ("pypto:http_responses", "HTTP responses by status.", "status", statuses),
        ):
            counter = CounterMetricFamily(name, help_text, labels=["model_name", *[label] * bool(label)])
            for key, count in values.items():
                counter.add_metric([*self._labels, *[key] * bool(label)], count)
            yield counter
        for name, (help_text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(name, help_text, labels=["model_name", "engine"])
            for index, histogram in enumerate(self._histograms[name]):
                family.add_metric([*self._labels, str(index)], histogram.buckets(), histogram.sum)
            yield family
        yield from self._of_http()

    def _of_http(self) -> Iterator[Metric]:
        """Yield the metrics of HTTP requests, with the names and labels that vLLM's FastAPI has."""
        labels = ("handler", "method", "status")
        counter = CounterMetricFamily("http_requests", "HTTP requests by path, method and status.", labels=labels)
        help_text = "From the arrival of an HTTP request to the last byte of its answer."
        family = HistogramMetricFamily("http_request_duration_seconds", help_text, labels=labels)
        for key, histogram in sorted(self._http.items()):
            counter.add_metric(key, sum(histogram.counts))
            family.add_metric(key, histogram.buckets(), histogram.sum)
        yield counter
        yield family

    def _observe(self, name: str, value: float, replica: int) -> None:
        self._histograms[name][replica].observe(value)

    def _configured(self, stats: Sequence[StepStats]) -> Iterator[Metric]:
        """Yield metrics that need the configuration or the health of engines."""
        healths = [engine.health() for engine in self._engine.engines]
        yield self._gauge("pypto:engine_ok", "1 while the engine makes progress.", [each.ok for each in healths])
        ages = [each.age_s for each in healths]
        yield self._gauge("pypto:last_step_age_seconds", "Age of the last completed step.", ages)
        yield self._cache_config()
        topology, groups = self._engine.config.parallel.topology, self._engine.config.cache.groups
        ranks = {str(host): len(topology.on_host(host)) for host in range(topology.hosts)}
        of_hosts = [{host: count * each.ready for host, count in ranks.items()} for each in stats]
        help_text = "Ranks that compute on each host of a replica; 0 while no worker is ready."
        yield self._gauge("pypto:ranks", help_text, of_hosts, "host")
        shares = [dict(zip([group.name for group in groups], each.kv_usage, strict=False)) for each in stats]
        yield self._gauge("pypto:kv_group_usage_perc", "Share of KV blocks in use.", shares, "group")

    def _cache_config(self) -> Metric:
        """Return a constant metric for routers: block size and number of blocks of the first KV group."""
        config = self._engine.config
        labels = {
            "block_size": str(config.cache.groups[0].block_size),
            "num_gpu_blocks": str(config.cache.num_blocks[0]),
            "cache_dtype": "int8" if config.cache.int8_kv else config.model.dtype,
            "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        }
        help_text = "Always 1; its labels are the configuration of the KV cache."
        gauge = GaugeMetricFamily("vllm:cache_config_info", help_text, labels=["model_name", "engine", *labels])
        for index in range(len(self._engine.engines)):
            gauge.add_metric([*self._labels, str(index), *labels.values()], 1.0)
        return gauge

    def _drafts(self, stats: Sequence[StepStats]) -> Iterator[Metric]:
        """Yield numbers of verified and accepted drafts, in total and by position from 0."""
        for name, (help_text, value_of) in _DRAFT_COUNTERS.items():
            yield self._counter(name, help_text, map(value_of, stats))
        name, count = "vllm:spec_decode_num_accepted_tokens", self._engine.config.num_drafts
        help_text = "Drafts that were accepted, also after the end of the request."
        yield self._counter(name, help_text, [sum(each.accepted_at) for each in stats])
        padded = [(*each.accepted_at, *[0] * count)[:count] for each in stats]
        by_position = [{str(i): accepted for i, accepted in enumerate(each)} for each in padded]
        help_text = "Drafts that were accepted, by position, also after the end of the request."
        yield self._counter(f"{name}_per_pos", help_text, by_position, "position")

    def _tiers(self, tiers: Sequence[Sequence[TierStats]]) -> Iterator[Metric]:
        for field, help_text in (_TIER_GAUGES | _TIER_COUNTERS).items():
            name = "pypto:kv_tier_" + field.removesuffix("_s") + ("_seconds" if field.endswith("_s") else "")
            values = [{str(tier.tier): getattr(tier, field) for tier in each} for each in tiers]
            make = self._gauge if field in _TIER_GAUGES else self._counter
            yield make(name, help_text, values, "tier")

    def _of_engines(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        help_text: str,
        values: Iterable[Values],
        label: str = "",
    ) -> Metric:
        """Return a metric with the values of each engine. `label`: name of an additional label, or ""."""
        metric = family(name, help_text, labels=["model_name", "engine", *[label] * bool(label)])
        for index, of_engine in enumerate(values):
            labelled = of_engine if isinstance(of_engine, Mapping) else {"": of_engine}
            for key, value in labelled.items():
                metric.add_metric([*self._labels, str(index), *[key] * bool(label)], float(value))
        return metric
