"""docs/metrics.md lists what /metrics shows, with the same words."""

from __future__ import annotations

from pathlib import Path

import msgspec
from prometheus_client.metrics_core import Metric

from pypto_serving.api.http.allowance import Allowance, KeyMetrics
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.types.api_keys import KeyLimits
from pypto_serving.types.request import StepStats, TierStats
from pypto_serving.types.step import BackendTraits
from pypto_serving.types.tier import TierConfig
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
COMMON = {"model_name", "engine", "le"}


def families() -> list[Metric]:
    """Those of a server with drafts and a tier."""
    tier = TierConfig(tier="host", size_bytes=1 << 20, num_slots=(9,))
    engine = ScriptedEngine(
        engine_config(100, num_drafts=2, traits=BackendTraits(max_drafts=2), tiers=(tier,)), lambda request: Script([])
    )
    values = dict.fromkeys(TierStats.__struct_fields__, 1) | {"tier": "host", "writable": True}
    engine.stats = StepStats(tiers=(TierStats(**values),), kv_usage=(0.5,))
    metrics = ServerMetrics(engine, "tiny")
    metrics.count_response(200)
    metrics.observe_http("/v1/models", "GET", 200, 0.5)
    allowance = Allowance("a", KeyLimits(), lambda: 0.0)
    return [*metrics.collect(), *KeyMetrics(lambda: [allowance]).collect()]


def row(family: Metric) -> str:
    name = family.name + "_total" * (family.type == "counter")
    labels = sorted({f"`{label}`" for sample in family.samples for label in sample.labels.keys() - COMMON})
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |".replace("|  |", "| |")


def test_the_page_lists_every_metric() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(("| `vllm:", "| `pypto:", "| `http_"))]
    assert sorted(rows) == sorted(map(row, families()))


def test_metrics_that_need_an_option_say_so() -> None:
    engine = ScriptedEngine(engine_config(100), lambda request: Script([]))
    engine.stats = msgspec.structs.replace(engine.stats, kv_usage=(0.5,))
    always = {family.name for family in ServerMetrics(engine, "tiny").collect() if family.samples}
    optional = {family.name for family in families()} - always
    text = PAGE.read_text()
    section = text[text.index("## With tiers or drafts") :]
    assert optional
    for name in optional - {"pypto:http_responses", "http_requests", "http_request_duration_seconds"}:
        if name.startswith("pypto:key_"):
            continue
        assert f"`{name}" in section, name
