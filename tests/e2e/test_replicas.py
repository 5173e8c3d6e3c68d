"""Data-parallel replicas as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pypto_serving import LLM, SamplingParams
from tests.e2e.server import Server
from tests.engine.event_reader import EventReader

pytestmark = pytest.mark.e2e


def by_replica(server: Server, name: str) -> dict[str, float]:
    """The value of a metric of each replica."""
    text = server.http.get("/metrics").text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def started_prompts(server: Server, replica: int) -> set[int]:
    """The first tokens of the prompts that KV events of a replica tell of."""
    endpoints = [server.ready[name][replica] for name in ("kv_events", "kv_events_replay")]
    with EventReader(*endpoints, replica=replica) as reader:
        reader.replay(0)
        return {tokens[0] for parent, tokens, _ in reader.index["GPU", 0].values() if parent is None}


def test_two_replicas_share_the_work_and_keep_conversations(tmp_path: Path) -> None:
    """Each has ranks, tiers and KV events of its own."""
    options = ("--kv-memory", "32MiB", "--kv-disk", tmp_path, "--kv-events", "tcp://127.0.0.1:0")
    with Server("--dp", "2", "--tp", "2", "--max-model-len", "1024", *options) as server:
        bodies = [{"prompt": [7 + i, *range(30, 300)], "max_tokens": 4, "temperature": 0} for i in range(4)]
        first = [server.http.post("/v1/completions", json=body).json() for body in bodies]
        assert by_replica(server, "vllm:generation_tokens_total") == {"0": 8, "1": 8}
        assert by_replica(server, "pypto:ranks") == {"0": 2, "1": 2}
        for body, before in zip(bodies, first, strict=True):
            again = server.http.post("/v1/completions", json=body).json()
            assert again["choices"][0]["text"] == before["choices"][0]["text"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
        assert by_replica(server, "pypto:kv_tier_writable") == {"0": 1, "1": 1}
        started = [started_prompts(server, replica) for replica in range(2)]
        assert [len(prompts) for prompts in started] == [2, 2] and set.union(*started) == {7, 8, 9, 10}
    assert (tmp_path / "replica-1").is_dir()


def test_offline() -> None:
    with LLM(data_parallel_size=2, max_model_len=256, kv_memory="16MiB", log_level="warning") as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        questions = [[{"role": "user", "content": f"What is {i}+{i}?"}] for i in range(8)]
        replies = [result.outputs[0].text for result in llm.chat(questions, params)]
    assert replies == [f"{i} + {i} = {2 * i}" for i in range(8)]
