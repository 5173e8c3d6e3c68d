"""Cases of the backend's parts on the double: `python -m tests.npu.device_cases CASE,CASE MODEL`."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pypto_serving.backend.npu.backend import NpuBackend
from pypto_serving.backend.npu.program import Device, NpuProgram
from pypto_serving.backend.npu.runtime import Runtime
from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import of_role
from pypto_serving.parallel.topology import Topology
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import Spans
from tests.configs import change_config
from tests.e2e.engines import engine_config
from tests.npu.conformance import children
from tests.npu.forking import run_cases


def config_of(model: str, cache: str = "") -> EngineConfig:
    return engine_config(Path(model), {"cache_dir": cache, "num_blocks": (5,)}, backend="npu")


def prepared(config: EngineConfig) -> tuple[NpuProgram, Device]:
    backend = NpuBackend(config)
    program = backend.prepare(lambda *_: None)
    assert isinstance(program, NpuProgram) and backend._device is not None
    return program, backend._device


def inputs_of(program: NpuProgram, **changes: Any) -> dict[str, Any]:
    """The inputs of a decode of sixteen rows, each with a token in the null block."""
    shapes = {
        each.name: each.resolve({"B": 16, "BM": 64}) for each in of_role(program._contract.stages["decode"], "input")
    }
    values: dict[str, Any] = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
    values["seq_lens"] += 1
    return values | changes


def checks_every_argument(model: str) -> None:
    """What the runtime would take for NaN is refused, and the device still works."""
    program, device = prepared(config_of(model))
    expected = device.run("decode", inputs_of(program))["out"].copy()
    assert np.isfinite(expected).all()
    wrong = {
        "seq_lens": np.ones(15, np.int32),
        "slot_mapping": np.zeros((16, 1), np.int32),
        "block_table": np.zeros(64, np.int64),
        "sampled_ids_in": np.zeros((16, 4), np.int32),
    }
    for name, value in wrong.items():
        refused(device, inputs_of(program, **{name: value}), "must ")
    values = inputs_of(program)
    del values["seq_lens"]
    refused(device, values, "seq_lens is missing")
    refused(device, {name: np.concatenate([each, each]) for name, each in inputs_of(program).items()}, "a buffer of")
    assert (device.run("decode", inputs_of(program))["out"] == expected).all()


def refused(device: Device, values: dict[str, Any], problem: str) -> None:
    """The dispatch is refused, and it is said why."""
    try:
        device.run("decode", values)
    except ValueError as error:
        assert problem in str(error), error
        return
    raise AssertionError(f"{problem}: not refused")


def copies_pages(model: str) -> None:
    """A block that is written is read back, and no other one changes; one outside of the pools is refused."""
    program, device = prepared(config_of(model))
    memory, (size,), rng = program.memory, program.memory.block_bytes, np.random.default_rng(0)
    assert size == program.groups[0].block_bytes
    contents = [rng.integers(0, 256, size, np.uint8) for _ in range(4)]
    memory.write_blocks(0, [1, 2, 3, 4], contents)
    before = memory.read_blocks(0, [0])[0]
    assert not before.any(), "the pools are not zeroed"
    found = memory.read_blocks(0, [4, 3, 2, 1, 0])
    assert all((a == b).all() for a, b in zip(found, [*contents[::-1], before], strict=True))
    outside: Spans = ((0, 1 << 40),)
    try:
        device.read("k_cache", outside, found[0])
    except ValueError:
        return
    raise AssertionError("bytes behind the pool were read")


def keeps_programs(model: str) -> None:
    """The next start compiles nothing, nothing stays of one that was killed; a damaged folder is no program."""
    with tempfile.TemporaryDirectory() as cache:
        unfinished = Path(cache, "npu", "compiling")
        unfinished.mkdir(parents=True)
        prepared(config_of(model, cache))[1].close()  # a process has one device, whose chips it watches
        kept = {path: path.stat().st_mtime_ns for path in Path(cache).glob("npu/*/distributed_meta.json")}
        assert len(kept) == 2 and not unfinished.exists()
        prepared(config_of(model, cache))[1].close()
        assert {path: path.stat().st_mtime_ns for path in Path(cache).glob("npu/*/distributed_meta.json")} == kept
        for path in kept:
            path.write_text(path.read_text().replace('"wq__ssa_v0"', '"wo__ssa_v0"', 1))
        try:
            prepared(config_of(model, cache))
        except ConfigError as error:
            assert "is wo, not wq" in str(error), error
            return
        raise AssertionError("a program with other arguments was taken")


def names_a_mismatch(model: str) -> None:
    """A package of the same name, and one that lacks what is needed, are told in one line."""
    import pypto.ir.distributed_compiled_program as compiled
    import pypto.runtime

    del pypto.runtime.DistributedWorker.copy_from
    for strip in (lambda: None, lambda: delattr(compiled, "DistributedConfig")):
        strip()
        try:
            Runtime("a2a3sim", [0])
        except ConfigError as error:
            assert str(error).startswith("the npu backend needs hw-native-sys/pypto at de48ab415"), error
            assert len(str(error).splitlines()) == 1
            continue
        raise AssertionError("an unknown runtime was taken")


def spreads_over_devices(model: str) -> None:
    """Each device holds its part of a block: both are read and written, and what one device has is not the other's."""
    config = config_of(model)
    config = change_config(config, topology=Topology(tensor=2))
    program, device = prepared(config)
    memory, (size,), rng = program.memory, program.memory.block_bytes, np.random.default_rng(0)
    contents = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
    memory.write_blocks(0, [2, 3], contents)
    assert all((a == b).all() for a, b in zip(memory.read_blocks(0, [2, 3]), contents, strict=True))
    pages = program._contract.pages(5, 2)
    assert list(pages) == ["k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    place = 0
    for name, spans in pages.items():
        found = np.empty(sum(end - begin for begin, end in spans), np.uint8)
        device.read(name, spans, found)
        assert (found == contents[0][place : place + len(found)]).all() and 4 * len(found) == size
        place += len(found)
    assert len(children()) == 2


def is_killed(model: str) -> None:
    """Neither chips and keeper of a killed worker stay, nor the shared memory that chips have for each other."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        prepared(config_of(model))
        window_of(os.getpid()).touch()
        os.write(writer, " ".join(str(each.pid) for each in psutil.Process().children()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    started = [psutil.Process(int(each)) for each in os.read(reader, 1 << 16).split()]
    assert len(started) > 1 and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive and not window_of(pid).exists()


def window_of(leader: int) -> Path:
    return Path(f"/dev/shm/simpler_{leader:08x}_00000001")


if __name__ == "__main__":
    run_cases(globals())
