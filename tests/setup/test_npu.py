"""The npu backend's configuration: its platform, pages, rows and longest sequence, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import ModelParts, NumaNode, Topology
from pypto_serving.setup.host import read_host_facts
from pypto_serving.setup.resolver import Resolved
from pypto_serving.util import GIB
from tests.setup.small import HOST, make_model, make_resolved, setting

WITH_RUNTIME = msgspec.structs.replace(HOST, pypto=True)
WITH_DEVICE = msgspec.structs.replace(WITH_RUNTIME, npu=True)


def test_the_simulator_serves_where_there_is_no_device() -> None:
    resolved = make_resolved(make_model(max_position_embeddings=40960), WITH_RUNTIME, backend="npu")
    engine = resolved.engine
    assert engine.worker.backend_options == {"platform": "a2a3sim"}
    assert setting(resolved, "npu-platform") == ("a2a3sim", "there is no Ascend device")
    assert setting(resolved, "max-model-len") == (4096, "the programs' longest sequence")
    assert [group.block_size for group in engine.cache.groups] == [128]
    limits = engine.limits
    assert limits.max_num_seqs == 16 and limits.traits.padded_rows == (16,) and not limits.traits.mixed_steps
    assert engine.limits.max_prompt_logprobs == 0


def on_devices(**options: Any) -> Resolved:
    parts = ModelParts(num_layers=2, num_heads=8, num_kv_heads=4, hidden_size=64, weights=())
    host = msgspec.structs.replace(WITH_RUNTIME, nodes=(NumaNode(0, (0, 1)), NumaNode(1, (2, 3))))
    return make_resolved(make_model(parts=parts), host, backend="npu", **options)


def test_tensor_ranks_are_devices() -> None:
    """They are no processes: none is placed on a NUMA node, and none has a part of the memory plan."""
    resolved = on_devices(tensor_parallel_size=2)
    assert resolved.engine.parallel.topology == Topology(tensor=2)
    assert resolved.engine.parallel.placements == () and resolved.ranks == ()
    auto = on_devices(tensor_parallel_size="auto")
    assert auto.engine.parallel.topology == Topology()
    assert setting(auto, "tensor-parallel-size")[1].endswith("how many devices there are must be given")


def test_devices_have_equally_many_heads() -> None:
    line = "--tensor-parallel-size is 3, but devices have equal shares of the model's 4 KV heads; give 1, 2 or 4"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        on_devices(tensor_parallel_size=3)


def test_a_device_has_memory_of_its_own() -> None:
    """What is free on the host bounds nothing there."""
    model = make_model(weight_bytes=30 * GIB)
    resolved = make_resolved(model, WITH_DEVICE, backend="npu", kv_memory=20 * GIB)
    assert resolved.engine.worker.backend_options == {"platform": "a2a3"}
    assert make_resolved(
        model, WITH_DEVICE, backend="npu", kv_memory=GIB, npu_platform="a5"
    ).engine.worker.backend_options == {"platform": "a5"}


@pytest.mark.parametrize(
    ("host", "model", "options", "line"),
    [
        (HOST, {}, {}, "--backend is npu, but PyPTO's runtime is not installed; docs/npu.md says where to get it"),
        (
            WITH_DEVICE,
            {},
            {},
            "--kv-memory must be given as a size on a2a3, since only its runtime knows the device's memory; give what "
            "is left beside the weights",
        ),
        (
            WITH_RUNTIME,
            {"dtype": "float32"},
            {},
            "--dtype is float32, but the npu programs compute in bfloat16; give --dtype bfloat16",
        ),
        (
            WITH_RUNTIME,
            {"quantization": "int8"},
            {},
            "the weights of models/small are quantised (int8), for which there is no program",
        ),
        (
            WITH_RUNTIME,
            {},
            {"max_num_seqs": 17},
            "--max-num-seqs is 17, but the npu backend computes at most 16 sequences at once; give at most 16",
        ),
        (
            WITH_RUNTIME,
            {"max_position_embeddings": 40960},
            {"max_model_len": 8192},
            "--max-model-len is 8192, but the programs' longest sequence is 4096; give at most 4096",
        ),
        (WITH_RUNTIME, {}, {"block_size": 64}, "--block-size is 64, but this backend has blocks of 128; drop it"),
        (
            WITH_RUNTIME,
            {},
            {"backend": "cpu", "npu_platform": "a2a3sim"},
            "--npu-platform is a2a3sim, which needs --backend npu; give both or neither",
        ),
    ],
)
def test_what_is_refused(host: Any, model: dict[str, Any], options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_resolved(make_model(**model), host, **({"backend": "npu"} | options))
    assert str(error.value) == line


def test_a_device_is_what_the_driver_shows(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci_manager").touch()
    assert not read_host_facts(tmp_path).npu
    (tmp_path / "dev/davinci0").touch()
    assert read_host_facts(tmp_path).npu
