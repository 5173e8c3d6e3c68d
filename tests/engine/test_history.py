"""What the history keeps, and for how long."""

from __future__ import annotations

import msgspec

from pypto_serving.engine.history import INTERVAL_S, MAX_FINISHED, MAX_SAMPLES, Finished, History
from pypto_serving.engine.metrics import ServerMetrics
from pypto_serving.types.request import StepStats, TierStats, Timeline
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config


def new_history() -> tuple[ScriptedEngine, ServerMetrics, History]:
    engine = ScriptedEngine(engine_config(100), lambda request: Script([]))
    metrics = ServerMetrics(engine, "tiny")
    return engine, metrics, History(engine, metrics)


def tier(name: str, hits: int) -> TierStats:
    values = dict.fromkeys(TierStats.__struct_fields__, 0)
    return TierStats(**values | {"tier": name, "writable": True, "hit_tokens": hits})


def finished(number: int) -> Finished:
    times = Timeline(0.0, 1.0, 2.0, 3.0)
    return Finished(id=str(number), reason="stop", prompt_tokens=1, output_tokens=1, cached_tokens=0, timeline=times)


def test_there_is_one_sample_for_each_interval() -> None:
    _, _, history = new_history()
    for tenth in range(25):
        history.observe(tenth * INTERVAL_S / 10)
    assert [sample.at_s for sample in history.samples_since(0)] == [0.0, INTERVAL_S, 2 * INTERVAL_S]
    assert [sample.at_s for sample in history.samples_since(2)] == [2 * INTERVAL_S]
    assert history.samples_since(3) == []


def test_the_oldest_leave() -> None:
    _, _, history = new_history()
    for i in range(MAX_SAMPLES + 5):
        history.observe(i * INTERVAL_S)
    for number in range(MAX_FINISHED + 5):
        history.finish(finished(number))
    kept = history.samples_since(0)
    assert (len(kept), kept[0].at_s, history.num_samples) == (MAX_SAMPLES, 5 * INTERVAL_S, MAX_SAMPLES + 5)
    assert [each.id for each in history.finished_since(MAX_FINISHED + 3)] == ["203", "204"]
    assert len(history.finished_since(0)) == MAX_FINISHED


def test_a_sample_adds_up_the_engines() -> None:
    engine, metrics, history = new_history()
    engine.stats = StepStats(
        num_running=2, num_waiting=1, prefix_queries=100, prefix_hits=60, kv_usage=(0.25, 0.5), accepted_at=(5, 2),
        packing_s=0.5, computing_s=2.0, tiers=(tier("host", 20), tier("disk", 5)),
    )  # fmt: skip
    other = ScriptedEngine(engine.config, engine.script)
    other.stats = StepStats(
        num_running=3,
        num_respawns=2,
        num_core_respawns=1,
        prefix_hits=10,
        kv_usage=(0.75, 0.25),
        accepted_at=(1,),
        core_s=0.25,
    )
    engine.engines = (engine, other)
    metrics.first_token[0].observe(0.02)
    history.observe(0.0)
    metrics.first_token[0].observe(0.02)
    metrics.first_token[0].observe(9999.0)
    history.observe(INTERVAL_S)
    first, second = history.samples_since(0)
    assert (first.running, first.waiting, first.kv_usage, first.accepted_at) == (5, 1, (0.75, 0.5), (6, 2))
    assert first.respawns == 3 and history.life != new_history()[2].life
    assert (first.hit_tokens, first.step_s) == ((45, 20, 5, 0), (0.25, 0.5, 2.0, 0.0))
    assert (sum(first.first_token), sum(second.first_token), second.first_token[-1]) == (1, 2, 1)
    same = msgspec.structs.replace(second, at_s=0.0, first_token=first.first_token)
    assert same == first
