"""A pool of Mooncake Store on this machine: its master, and a process that lends memory."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pypto_serving.util import install_extra

PATIENCE_S = 60.0
PACKAGES = "on Debian and Ubuntu it needs the packages libibverbs1 libnl-3-200 libnl-route-3-200"


def missing() -> str | None:
    """Why no pool can be started here, if none can."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed; {install_extra('mooncake')}; {PACKAGES}"
    folder = Path(next(iter(importlib.util.find_spec("mooncake").submodule_search_locations or ())))  # type: ignore[union-attr]
    result = subprocess.run([folder / "mooncake_master", "--version"], capture_output=True, text=True)
    if result.returncode == 0:
        return None
    return f"Mooncake does not run here: {result.stderr.strip().splitlines()[-1]}; {PACKAGES}"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pool:
    """Owns both processes; everything listens on loopback."""

    def __init__(self, size: str = "256MB") -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        self._folder = Path(next(iter(spec.submodule_search_locations or ())))
        self.port = free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self._size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    def start(self) -> None:
        self._spawn("mooncake_master", self.port, rpc_port=self.port, rpc_address="127.0.0.1", metrics_port=free_port())
        port = free_port()
        self._spawn(
            "mooncake_client",
            port,
            host="127.0.0.1",
            port=port,
            global_segment_size=self._size,
            master_server_address=f"127.0.0.1:{self.port}",
            metadata_server="P2PHANDSHAKE",
            protocol="tcp",
        )

    def _spawn(self, name: str, listens: int, **flags: object) -> None:
        if name == "mooncake_master":
            flags["metrics_host"] = "127.0.0.1"
        command = [str(self._folder / name), *(f"--{flag}={value}" for flag, value in flags.items())]
        environment = {**os.environ, "GLOG_minloglevel": "3"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes.append(process)

        def listening() -> bool:
            assert process.poll() is None, f"{name} ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", listens)) == 0

        wait_until(listening)

    def pause_master(self) -> None:
        master = self._processes[0]
        master.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{master.pid}/task")
        wait_until(lambda: all(b") T " in (t / "stat").read_bytes() for t in threads.iterdir()))

    def resume_master(self) -> None:
        self._processes[0].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
