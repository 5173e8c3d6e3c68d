"""A wire between two hosts that damages what passes on it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.store.pool import free_port

GREETED, ANSWERED = 21 + 32, 85 + 32
"""Bytes that the serving host says first, and that the joining one says then."""
PURPOSE = slice(21, 37)
CHUNK = 1 << 16

Damage = Callable[[bytes], bytes]


class Wires:
    """Owns a port that leads to another address. Once `break_it`, the connection `name` passes on what `damage` makes.

    `towards` is where damaged bytes go: "serving" or "joining". Only one connection is ever damaged.
    """

    def __init__(self, address: str, name: str, towards: str, damage: Damage) -> None:
        self._address, self._name, self._towards, self._damage = address, name, towards, damage
        self._breaks = threading.Event()
        self.broken = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def break_it(self) -> None:
        self._breaks.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                joining, _ = self._listener.accept()
                host, _, port = self._address.rpartition(":")
                try:
                    serving = socket.create_connection((host, int(port)))
                except OSError:
                    joining.close()
                    continue
                threading.Thread(target=self._carry, args=(joining, serving), daemon=True).start()

    def _carry(self, joining: socket.socket, serving: socket.socket) -> None:
        with contextlib.suppress(OSError):
            joining.sendall(serving.recv(GREETED, socket.MSG_WAITALL))
            serving.sendall(said := joining.recv(ANSWERED, socket.MSG_WAITALL))
            ours = said[PURPOSE].rstrip(b"\0").decode() == self._name
            for source, target, place in ((joining, serving, "serving"), (serving, joining, "joining")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hurts = ours and place == self._towards
                threading.Thread(target=self._pump, args=(source, target, hurts), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, hurts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if hurts and self._breaks.is_set() and not self.broken.is_set():
                    data = self._damage(data)
                    self.broken.set()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def wires(address: str, name: str, towards: str, damage: Damage) -> Iterator[Wires]:
    made = Wires(address, name, towards, damage)
    try:
        yield made
    finally:
        made.close()
