"""What `bench serve` says of drafts: as in vLLM, from the server's metrics before and after."""

from __future__ import annotations

from pypto_serving.bench.metrics import parse_draft_counters, summarize_drafts
from pypto_serving.bench.report import _draft_lines
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.types.request import StepStats
from pypto_serving.types.step import BackendTraits
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config
from tests.configs import change_config


def rendered(num_drafts: int, *stats: StepStats) -> list[str]:
    """/metrics of an engine with these snapshots, one after the other."""
    config = engine_config(100, max_model_len=300)
    config = change_config(config, traits=BackendTraits(max_drafts=4), num_drafts=num_drafts)
    engine = ScriptedEngine(config, lambda request: Script([]))
    metrics, found = ServerMetrics(engine, "tiny"), []
    for each in stats:
        engine.stats = each
        found.append(metrics.render().decode())
    return found


def test_drafts_of_a_run() -> None:
    before = StepStats(num_draft_rounds=10, num_drafts=20, accepted_at=(5, 2))
    after = StepStats(num_draft_rounds=30, num_drafts=80, accepted_at=(20, 12, 3))
    result = summarize_drafts(*map(parse_draft_counters, rendered(3, before, after)))
    assert result == {
        "spec_decode_acceptance_rate": 100 * 28 / 60,
        "spec_decode_acceptance_length": 1 + 28 / 20,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 28,
        "spec_decode_per_position_acceptance_rates": [15 / 20, 10 / 20, 3 / 20],
    }
    lines = [line.split() for line in _draft_lines(result)]
    assert ["Acceptance", "length:", "2.40"] in lines and ["Position", "1:", "50.00"] in lines


def test_a_server_that_drafted_nothing_yet() -> None:
    result = summarize_drafts(*map(parse_draft_counters, rendered(2, StepStats(), StepStats())))
    assert result["spec_decode_num_drafts"] == 0 and result["spec_decode_acceptance_length"] is None
    assert _draft_lines(result) == []


def test_a_server_without_drafts_has_no_metrics_of_them() -> None:
    (text,) = rendered(0, StepStats())
    assert "spec_decode" not in text and parse_draft_counters(text) is None
    assert summarize_drafts(None, None) == {}


def test_totals_go_on_when_a_core_is_replaced() -> None:
    past = StepStats(num_draft_rounds=10, num_drafts=20, accepted_at=(5, 2)).ended()
    now = StepStats(num_draft_rounds=1, num_drafts=3, accepted_at=(1, 1, 1)).after(past)
    assert (now.num_draft_rounds, now.num_drafts, now.accepted_at) == (11, 23, (6, 3, 1))
