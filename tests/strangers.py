"""Strangers at a port: a process of connections that are opened again as soon as they end.

`python -m tests.strangers PORT KIND COUNT`: they are silent, or say noise, half a greeting or large lengths.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

from pypto_serving.processes import die_with_parent

SAYINGS: dict[str, Callable[[], bytes]] = {
    "silent": lambda: b"",
    "noise": lambda: os.urandom(4096),
    "half": lambda: b"pypto-serving hosts 1control",
    "lengths": lambda: b"\xff\xff\xff\x7f" * 64,
}


@contextlib.contextmanager
def strangers(address: str, kind: str, count: int) -> Iterator[None]:
    """Have so many strangers at an address of this machine, from before to after."""
    command = [sys.executable, "-m", "tests.strangers", address.rpartition(":")[2], kind, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # when all have come
            yield
            assert process.poll() is None, "the strangers have gone"
        finally:
            process.kill()


class Strangers:
    """Owns the connections."""

    def __init__(self, port: int, say: Callable[[], bytes]) -> None:
        self._port, self._say = port, say
        self._poller, self._ends = select.poll(), dict[int, socket.socket]()

    def come(self, count: int) -> None:
        """Open those that are missing."""
        while len(self._ends) < count:
            end = socket.socket()
            end.setblocking(False)
            end.connect_ex(("127.0.0.1", self._port))
            self._ends[end.fileno()] = end
            self._poller.register(end, select.POLLOUT)

    def go_on(self) -> None:
        """Let those speak that can, and go that are refused."""
        for fd, event in self._poller.poll():
            try:
                if event & select.POLLOUT:
                    self._ends[fd].sendall(self._say())
                    self._poller.modify(fd, select.POLLIN)
                elif not self._ends[fd].recv(4096):
                    raise ConnectionError
            except OSError:
                self._poller.unregister(fd)
                self._ends.pop(fd).close()


def main() -> None:
    die_with_parent()
    crowd, count = Strangers(int(sys.argv[1]), SAYINGS[sys.argv[2]]), int(sys.argv[3])
    crowd.come(count)
    print(flush=True)
    while True:
        crowd.come(count)
        crowd.go_on()


if __name__ == "__main__":
    main()
