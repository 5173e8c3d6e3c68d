"""KVEventPublisher: publish this replica's KV events over ZeroMQ, with replay, as vLLM does."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from pypto_serving.engine.kv_event_wire import KVEventWriter, encode_batch
from pypto_serving.errors import ConfigError
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.tier import KVEvent

log = logging.getLogger(__name__)

HISTORY_BATCHES = 10_000
HISTORY_BYTES = 64 << 20
UNSENT_BATCHES = 1_000
"""Batches queued for a slow reader. Beyond this it misses batches, and may ask for a replay."""
TOPIC = b""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
STOP_PATIENCE_S = 1.0


class KVEventPublisher:
    """Owns a PUB socket, a ROUTER socket for replays, their thread, and the history of batches.

    | socket | frames                                                    |
    |--------|-----------------------------------------------------------|
    | PUB    | topic "", number (8 bytes, big-endian), batch             |
    | ROUTER | asked "" and a number; answers "", topic, number, batch for every batch in the history from that number |
    |        | on, then "", "", -1, "" |

    Numbers rise by one. They begin with the microseconds since the epoch at start, so a reader that stays connected
    sees the batches of a later life as newer. Batches older than the history cannot be replayed.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroupSpec],
        endpoint: str,
        replay_endpoint: str,
        replica: int = 0,
        first_number: int | None = None,
    ) -> None:
        """Bind both sockets and start the thread. Raises ConfigError if an endpoint cannot be bound."""
        self._writer = KVEventWriter(groups)
        self._replica = replica
        self._number = time.time_ns() // 1000 if first_number is None else first_number
        self._epoch_s = time.time() - time.monotonic()
        self._history: deque[tuple[int, bytes]] = deque()
        self._history_bytes = 0
        self._handed: deque[tuple[float, Sequence[KVEvent]]] = deque()
        self._stopping = False
        self._context = zmq.Context()
        try:
            self._pub, self.endpoint = self._bind(zmq.PUB, endpoint, UNSENT_BATCHES, "kv-events")
            self._router, self.replay_endpoint = self._bind(
                zmq.ROUTER, replay_endpoint, HISTORY_BATCHES + 1, "kv-events-replay"
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake_sender, self._wake_receiver = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_sender.bind("inproc://wake")
        self._wake_receiver.connect("inproc://wake")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        log.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    def _bind(self, kind: int, endpoint: str, unsent: int, option: str) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, unsent)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise ConfigError(
                f"the option {option} is {endpoint}, which cannot be used: {reason}; give another"
            ) from None
        return socket, socket.get_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[KVEvent], now_s: float) -> None:
        """Hand a batch to the thread without waiting. `now_s` is of the host's monotonic clock."""
        if self._thread.is_alive():
            self._handed.append((self._epoch_s + now_s, events))
            self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(zmq.Again):  # the queue is full of rings, so the thread will wake anyway
            self._wake_sender.send(b"", zmq.NOBLOCK)

    def stop(self) -> None:
        """End the thread and drop batches that readers have not taken."""
        self._stopping = True
        self._wake_thread()
        self._thread.join(STOP_PATIENCE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("publishing KV events failed; no further events are sent")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            while self._wake_receiver.poll(0):
                self._wake_receiver.recv()
            while self._handed:
                self._send(*self._handed.popleft())
            if self._router in ready:
                self._replay()

    def _send(self, time_s: float, events: Sequence[KVEvent]) -> None:
        maps = self._writer.write(events)
        if not maps:
            return
        batch = encode_batch(maps, time_s, self._replica)
        self._pub.send_multipart((TOPIC, self._number.to_bytes(8, "big"), batch))
        self._history.append((self._number, batch))
        self._history_bytes += len(batch)
        while len(self._history) > HISTORY_BATCHES or self._history_bytes > HISTORY_BYTES:
            self._history_bytes -= len(self._history.popleft()[1])
        self._number += 1

    def _replay(self) -> None:
        """Answer one replay request. A reader that does not read loses batches beyond its queue."""
        reader, *request = self._router.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.warning("a request for a replay of KV events has other frames than an empty one and a number")
            return
        start = int.from_bytes(request[1], "big")
        for number, batch in self._history:
            if number >= start:
                self._router.send_multipart((reader, b"", TOPIC, number.to_bytes(8, "big"), batch))
        self._router.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))
