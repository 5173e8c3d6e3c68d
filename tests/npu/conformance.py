"""What an engine relies on of PyPTO's runtime, case by case: `python -m tests.npu.conformance CASE,CASE`.

Each case runs in a fork of its own. One that is expected to hang prints "calling" before the call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pypto.ir.distributed_compiled_program import DistributedCompiledProgram, DistributedConfig
from pypto.runtime import DeviceTensor, RunConfig

from tests.npu.forking import run_cases
from tests.npu.small_programs import SIZE, hosts, two_device_host

PLATFORM = os.environ.get("PYPTO_TEST_PLATFORM", "a2a3sim")
FOLDERS = tuple(Path(name) for name in ("fill", "read"))
"""Where the compiled programs are kept, below the current folder."""


def compiled() -> tuple[Any, Any]:
    """The two programs, loaded from their folders, or compiled to there."""
    config = RunConfig(platform=PLATFORM, distributed_config=DistributedConfig(device_ids=[0]))
    for folder, host, count in zip(FOLDERS, hosts(), (2, 3), strict=True):
        if not folder.exists():
            samples = [torch.zeros(SIZE, SIZE) for _ in range(count)]
            Path(host.compile(*samples, config=config).output_dir).rename(folder)
    fill, read = (DistributedCompiledProgram.from_dir(folder) for folder in FOLDERS)
    return fill, read


def shared(value: float = 0.0) -> torch.Tensor:
    return torch.full((SIZE, SIZE), value).share_memory_()


class Setting:
    """Programs and shared tensors; `prepare` forks."""

    def __init__(self) -> None:
        self.fill, self.read = compiled()
        self.given, self.out, self.staging = shared(2.0), shared(), shared()
        self.before = children()

    @contextmanager
    def prepared(self) -> Iterator[Any]:
        worker = self.fill.prepare(extra_compiled=[self.read])
        self.pids = children() - self.before
        self.kept = worker.alloc_tensor((SIZE, SIZE), torch.float32)
        yield worker
        worker.close()


class TwoDevices:
    """A program over two devices, with a resident tensor on each: 10.0 on the first, 20.0 on the second."""

    def __init__(self) -> None:
        config = RunConfig(platform=PLATFORM, distributed_config=DistributedConfig(device_ids=[0, 1]))
        samples = [torch.zeros(SIZE, SIZE) for _ in range(5)]
        self.program = two_device_host().compile(*samples, config=config)
        self.given, self.outs, self.staging = shared(1.0), [shared(), shared()], [shared(10.0), shared(20.0)]
        self.before = children()

    @contextmanager
    def prepared(self) -> Iterator[Any]:
        worker = self.program.prepare()
        self.pids = children() - self.before
        self.kept = [resident(worker, self.staging[i], i) for i in range(2)]
        yield worker
        worker.close()

    def run(self, worker: Any) -> list[torch.Tensor]:
        (first, second), (out, other) = self.kept, self.outs
        worker.run(self.program, self.given, first, out, second, other)
        return self.outs


def resident(worker: Any, init: torch.Tensor, device: int) -> Any:
    """Return a resident tensor of a device; June's `alloc_tensor` serves the first one only."""
    later = "block_dim" not in DistributedConfig.__dataclass_fields__
    try:
        tensor = worker.alloc_tensor((SIZE, SIZE), torch.float32, init=init, worker_id=device)
    except ValueError:
        assert device and not later
        tensor = DeviceTensor(worker.malloc(init.nbytes, worker_id=device), (SIZE, SIZE), torch.float32)
        worker.copy_to(tensor.data_ptr, init.data_ptr(), init.nbytes, worker_id=device)
        return tensor
    assert later or not device
    return tensor


def children() -> set[int]:
    """The processes that this one forked, without those that it started, such as the tracker of shared memory."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = [pid for task in tasks for pid in task.read_text().split()]
    own = Path("/proc/self/cmdline").read_bytes()
    return {int(pid) for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes() == own}


def shares_a_resident_tensor() -> None:
    setting = Setting()
    with setting.prepared() as worker:
        worker.run(setting.fill, setting.given, setting.kept)
        for step in range(3):
            setting.given.fill_(float(step))
            worker.run(setting.read, setting.given, setting.kept, setting.out)
            assert (setting.out == step + 4.0).all()


def takes_views_of_shared_tensors() -> None:
    setting = Setting()
    setting.given = torch.full((3 * SIZE * SIZE,), 3.0).share_memory_()[: SIZE * SIZE].view(SIZE, SIZE)
    with setting.prepared() as worker:
        worker.run(setting.fill, setting.given, setting.kept)
        worker.run(setting.read, setting.given, setting.kept, setting.out)
        assert (setting.out == 9.0).all()


def loads_a_moved_program() -> None:
    compiled()
    for folder in FOLDERS:
        folder.rename(f"{folder}-moved")
        DistributedCompiledProgram.from_dir(f"{folder}-moved")
    try:
        DistributedCompiledProgram.from_dir("nowhere")
    except FileNotFoundError:
        return
    raise AssertionError("a folder without a program was loaded")


def refuses_other_tensors() -> None:
    setting = Setting()
    with setting.prepared() as worker:
        for wrong in (torch.zeros(SIZE, SIZE), 3, worker.alloc_tensor((SIZE, 2), torch.float32)):
            try:
                worker.run(setting.fill, wrong, setting.kept)
            except TypeError:
                continue
            raise AssertionError(f"{wrong} was taken")
        refused = {(setting.given,): TypeError, (shared()[:, :2], setting.kept): ValueError}
        for arguments, error in refused.items():
            try:
                worker.run(setting.fill, *arguments)
            except error:
                continue
            raise AssertionError("one argument was taken for two, or a tensor with gaps")


def copies_parts() -> None:
    """June's runtime copies any part; the later one refuses an address within an allocation."""
    setting = Setting()
    later = "block_dim" not in DistributedConfig.__dataclass_fields__
    with setting.prepared() as worker:
        worker.run(setting.fill, setting.given, setting.kept)
        inside, size = setting.kept.data_ptr + 4 * SIZE, 4 * SIZE
        try:
            worker.copy_from(setting.staging.data_ptr(), inside, size)
        except ValueError:
            assert later, "an address within an allocation was refused"
            return
        assert not later and setting.staging.sum() == 4.0 * SIZE
        setting.staging.fill_(7.0)
        worker.copy_to(inside, setting.staging.data_ptr(), size)
        worker.run(setting.read, setting.given, setting.kept, setting.out)
        assert (setting.out[1] == 9.0).all() and (setting.out[2] == 6.0).all()


def uploads_whole_tensors() -> None:
    """Both take shared memory older than the fork; only the later one takes other memory."""
    setting = Setting()
    later = "block_dim" not in DistributedConfig.__dataclass_fields__
    with setting.prepared() as worker:
        kept = worker.alloc_tensor((SIZE, SIZE), torch.float32, init=setting.given)
        worker.run(setting.read, setting.given, kept, setting.out)
        assert (setting.out == 4.0).all()
        try:
            kept = worker.alloc_tensor((SIZE, SIZE), torch.float32, init=torch.ones(SIZE, SIZE))
        except ValueError:
            assert not later
            return
        worker.run(setting.read, setting.given, kept, setting.out)
        assert later and (setting.out == 3.0).all()


def forks_in_prepare() -> None:
    setting = Setting()
    with setting.prepared():
        assert len(setting.pids) >= 1 and setting.pids <= children()
    assert not setting.pids & children(), "a normal close left a process behind"


def adds_up_over_two_devices() -> None:
    """Each device has a process, arguments and memory of its own, and gets the other's tensor."""
    setting = TwoDevices()
    with setting.prepared() as worker:
        assert len(setting.pids) == 2
        for step in range(3):
            setting.given.fill_(float(step))
            assert all((out == step + 30.0).all() for out in setting.run(worker))
        setting.staging[0].fill_(200.0)
        second, size = setting.kept[1], 4 * SIZE * SIZE
        worker.copy_to(second.data_ptr, setting.staging[0].data_ptr(), size, worker_id=1)
        assert all((out == 212.0).all() for out in setting.run(worker))
        for i, value in enumerate((10.0, 200.0)):
            worker.copy_from(setting.staging[1].data_ptr(), setting.kept[i].data_ptr, size, worker_id=i)
            assert (setting.staging[1] == value).all()
    assert not setting.pids & children()


def does_not_check_shapes() -> None:
    """A tensor that is too wide gives other values than its first columns would."""
    setting = Setting()
    wrong = torch.arange(2 * SIZE * SIZE).float().view(SIZE, 2 * SIZE).share_memory_()
    with setting.prepared() as worker:
        worker.run(setting.fill, setting.given, setting.kept)
        worker.run(setting.read, wrong, setting.kept, setting.out)
        assert not (setting.out == wrong[:, :SIZE] + 4.0).all(), "a tensor of another shape gave what it should"


def hangs_when_its_child_is_dead() -> None:
    setting = Setting()
    with setting.prepared() as worker:
        for pid in setting.pids:
            os.kill(pid, signal.SIGKILL)
        print("calling", flush=True)
        worker.run(setting.fill, setting.given, setting.kept)


def hangs_when_one_of_two_children_is_dead() -> None:
    setting = TwoDevices()
    with setting.prepared() as worker:
        os.kill(max(setting.pids), signal.SIGKILL)
        print("calling", flush=True)
        setting.run(worker)


def hangs_for_tensors_shared_too_late() -> None:
    setting = Setting()
    with setting.prepared() as worker:
        late = torch.full((1 << 26,), 1.0).share_memory_()[: SIZE * SIZE].view(SIZE, SIZE)
        print("calling", flush=True)
        worker.run(setting.fill, late, setting.kept)


def outlives_its_parent() -> None:
    """Children of a process that ends without a close, as a worker that is killed does."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        setting = Setting()
        with setting.prepared():
            os.write(writer, " ".join(map(str, setting.pids)).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    pids = [int(pid) for pid in os.read(reader, 1 << 16).split()]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert pids and all(Path(f"/proc/{pid}").exists() for pid in pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    run_cases(globals())
