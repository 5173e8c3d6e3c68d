"""Replicas: their shares of the machine, and what each has of its own."""

from __future__ import annotations

import msgspec
import pytest

from pypto_serving.cli.report import show
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import NumaNode
from pypto_serving.util import format_size
from tests.setup.small import HOST, WITH_KERNELS, make_model, make_resolved, setting

FOUR_CPUS = msgspec.structs.replace(HOST, num_cpus=4, nodes=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))))


def test_one_replica_by_default() -> None:
    resolved = make_resolved()
    assert resolved.engines == (resolved.engine,) and resolved.engine.parallel.replica == 0
    assert setting(resolved, "data-parallel-size") == (1, "default")


def test_replicas_share_cpus_and_memory() -> None:
    model = make_model(weight_bytes=1 << 30, max_position_embeddings=1 << 20)
    one, resolved = make_resolved(model, FOUR_CPUS), make_resolved(model, FOUR_CPUS, data_parallel_size=2)
    assert [engine.parallel.placement(0).cpus for engine in resolved.engines] == [(0, 1), (2, 3)]
    assert [engine.parallel.placement(0).num_threads for engine in resolved.engines] == [2, 2]
    assert [engine.parallel.replica for engine in resolved.engines] == [0, 1]
    assert resolved.memory.kv_bytes < one.memory.kv_bytes / 2


def test_sizes_that_are_given_are_those_of_each() -> None:
    resolved = make_resolved(None, FOUR_CPUS, data_parallel_size=2, kv_memory="64MiB", max_num_seqs=7)
    assert len({engine.cache.num_blocks for engine in resolved.engines}) == 1
    assert resolved.engine.cache.num_blocks == make_resolved(kv_memory="64MiB", max_num_seqs=7).engine.cache.num_blocks
    assert resolved.engine.limits.max_num_seqs == 7


def test_the_plan_says_that_it_is_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    resolved = make_resolved(None, FOUR_CPUS, data_parallel_size=2)
    assert " free for each of 2 replicas" in setting(resolved, "kv-memory")[1]
    show(resolved, make_model(), None, "none")
    out = capsys.readouterr().out
    total, free = (format_size(2 * size) for size in (resolved.memory.total_bytes, resolved.memory.available_bytes))
    assert "Memory plan for each of 2 replicas\n" in out and f"  all 2 replicas: {total} of {free} free\n" in out
    show(make_resolved(None, FOUR_CPUS), make_model(), None, "none")
    assert "replicas" not in capsys.readouterr().out


def test_too_little_memory_is_of_each() -> None:
    model, little = make_model(weight_bytes=3 << 30), msgspec.structs.replace(FOUR_CPUS, available_bytes=6 << 30)
    make_resolved(model, little)
    with pytest.raises(ConfigError) as caught:
        make_resolved(model, little, data_parallel_size=2)
    said = str(caught.value)
    assert said.startswith("too little memory: weights take 3 GiB and the workspace ")
    assert said.endswith(" of 3 GiB free for each of 2 replicas; lower --data-parallel-size, or free memory")
    small = msgspec.structs.replace(FOUR_CPUS, available_bytes=64 << 30)
    with pytest.raises(ConfigError, match="--kv-memory is 1 KiB for each of 2 replicas, too little for one sequence"):
        make_resolved(None, small, data_parallel_size=2, kv_memory="1KiB")


def test_more_replicas_than_cpus_are_warned_of() -> None:
    (warning,) = make_resolved(None, FOUR_CPUS, data_parallel_size=5).warnings
    assert warning.startswith("5 ranks have 4 CPUs")


def test_each_replica_has_its_own_folder_and_ports() -> None:
    resolved = make_resolved(
        None, WITH_KERNELS, data_parallel_size=3, kv_disk="/kv", kv_disk_size="1GiB", kv_events="tcp://127.0.0.1:5557"
    )
    assert [engine.cache.tiers[0].place for engine in resolved.engines] == ["/kv", "/kv/replica-1", "/kv/replica-2"]
    assert [engine.cache.kv_events for engine in resolved.engines] == [
        f"tcp://127.0.0.1:{port}" for port in (5557, 5558, 5559)
    ]
    assert [engine.cache.kv_events_replay[-4:] for engine in resolved.engines] == ["5560", "5561", "5562"]


def test_local_endpoints_are_numbered() -> None:
    resolved = make_resolved(data_parallel_size=2, kv_events="ipc:///run/kv")
    assert [engine.cache.kv_events for engine in resolved.engines] == ["ipc:///run/kv", "ipc:///run/kv.1"]
    assert [engine.cache.kv_events_replay for engine in resolved.engines] == [
        "ipc:///run/kv.replay",
        "ipc:///run/kv.replay.1",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "--kv-events-replay is tcp://127.0.0.1:5558, where --kv-events"),
        ({"port": 5558}, "--kv-events is tcp://127.0.0.1:5558, where --port"),
    ],
)
def test_ports_of_replicas_that_clash_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_resolved(data_parallel_size=2, kv_events="tcp://127.0.0.1:5557", **options)
