"""KVEventPublisher: publish this replica's KV events over ZeroMQ, with replay, in vLLM's format."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec
import zmq

from pypto_serving.errors import ConfigError
from pypto_serving.threads import start_thread
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.kv import CompressedSpec, FullSpec, KVCacheGroupSpec, StateSpec, WindowSpec
from pypto_serving.types.tier import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier

MEDIUMS: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "DISK", "remote": "EXTERNAL"}
"""Names of tiers in events. Every device is called GPU, since readers drop names that they do not know."""


class StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """A chain of stored blocks, each the parent of the next. `token_ids` has `block_size` ids per block.

    Readers count only blocks of full attention; for groups above 0, `kv_cache_spec_kind` gives the kind.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str
    group_idx: int


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


EventMap = StoredMap | RemovedMap | ClearedMap


def block_hash(key: bytes) -> int:
    """Return the low 64 bits of a key read as a big-endian number (its last 8 bytes), as vLLM shortens its hashes."""
    return int.from_bytes(key[-8:], "big")


class KVEventWriter:
    """Owns the record of announced blocks, by tier and group. Converts events to vLLM's maps.

    - Salted blocks are not announced, since readers would count them for requests of other tenants.
    - AllBlocksCleared has no medium in vLLM's format, and readers disagree on what it clears besides the device. So it
      is written only if no other tier holds any block. Otherwise the tier's blocks are removed one by one.
    """

    def __init__(self, groups: Sequence[KVCacheGroupSpec]) -> None:
        self._groups = groups
        self._kinds = [spec_kind(groups, g) for g in range(len(groups))]
        self._held: dict[tuple[Tier, int], set[int]] = {}

    def write(self, events: Iterable[KVEvent]) -> list[EventMap]:
        """Convert `events` to maps, in order. Join neighbouring events of the same kind, group and medium."""
        maps: list[EventMap] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, maps)
            elif isinstance(event, BlockRemoved):
                self._remove(event, maps)
            else:
                self._clear(event, maps)
        return maps

    def _store(self, event: BlockStored, maps: list[EventMap]) -> None:
        if event.salted:
            return
        key_hash, parent = block_hash(event.key), block_hash(event.parent) if event.parent else None
        self._held.setdefault((event.tier, event.group), set()).add(key_hash)
        token_ids, medium = unpack_ids(event.token_ids).tolist(), MEDIUMS[event.tier]
        last, place = maps[-1] if maps else None, (parent, event.group, medium)
        if isinstance(last, StoredMap) and (last.block_hashes[-1], last.group_idx, last.medium) == place:
            last.block_hashes.append(key_hash)
            last.token_ids += token_ids
            return
        group = self._groups[event.group]
        maps.append(
            StoredMap(
                [key_hash],
                parent,
                token_ids,
                group.block_size,
                None,
                medium,
                None,
                event.group,
                self._kinds[event.group],
                group.window if isinstance(group, WindowSpec) else None,
            )
        )

    def _remove(self, event: BlockRemoved, maps: list[EventMap]) -> None:
        held, key_hash = self._held.get((event.tier, event.group)), block_hash(event.key)
        if held is None or key_hash not in held:
            return
        held.discard(key_hash)
        medium, last = MEDIUMS[event.tier], maps[-1] if maps else None
        if isinstance(last, RemovedMap) and (last.group_idx, last.medium) == (event.group, medium):
            last.block_hashes.append(key_hash)
        else:
            maps.append(RemovedMap([key_hash], medium, event.group))

    def _clear(self, event: AllBlocksCleared, maps: list[EventMap]) -> None:
        gone = {group: held for (tier, group), held in self._held.items() if tier == event.tier and held}
        self._held = {place: held for place, held in self._held.items() if held and place[0] != event.tier}
        if not self._held:
            maps.append(ClearedMap())
            return
        maps += [RemovedMap(list(held), MEDIUMS[event.tier], group) for group, held in gone.items()]


_VLLM_KINDS = {
    FullSpec: "full_attention",
    CompressedSpec: "mla_attention",
    WindowSpec: "sliding_window",
    StateSpec: "mamba",
}


def spec_kind(groups: Sequence[KVCacheGroupSpec], g: int) -> str | None:
    """Return vLLM's name for the kind of group g. Only the first group of full history has a kind that readers count.

    Readers index one prefix per replica; a second such group would count the same prefix again.
    """
    group = groups[g]
    if group.keeps_history and any(other.keeps_history for other in groups[:g]):
        return None
    return _VLLM_KINDS[type(group)]


log = logging.getLogger(__name__)

HISTORY_BATCHES = 10_000
HISTORY_BYTES = 64 << 20
UNSENT_BATCHES = 1_000
"""Batches queued for a slow reader. Beyond this it misses batches, and may ask for a replay."""
WAITING_REPLAYS = 16
"""Requests of one reader that wait for a replay. Beyond this they are dropped."""
REPLAY_BATCHES = 256
"""Batches replayed to a reader before new events are sent, and other readers have their turn."""
MAX_REQUEST_BYTES = 1024
"""Of each frame that a reader sends; more of them end its connection."""
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

    A reader may send WAITING_REPLAYS requests before the first is answered; readers take turns. Numbers rise by one.
    They begin with the microseconds since the epoch at start, so a reader that stays connected
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
        self._replays: dict[bytes, deque[int]] = {}
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
        self._thread = start_thread("kv-events", self._serve, lambda error: log.error("no further KV events are sent"))
        log.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    def _bind(self, kind: int, endpoint: str, unsent: int, option: str) -> tuple[zmq.Socket[bytes], str]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, unsent)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
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
        """Hand a batch to the thread without waiting. `now_s` is a time of the host's monotonic clock."""
        if self._thread.is_alive():
            self._handed.append((self._epoch_s + now_s, events))
            self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(zmq.Again):  # the queue is full of wake-ups, so the thread will wake anyway
            self._wake_sender.send(b"", zmq.NOBLOCK)

    def stop(self) -> None:
        """End the thread and drop batches that readers have not taken."""
        self._stopping = True
        self._wake_thread()
        self._thread.join(STOP_PATIENCE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)

    # The thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(0 if self._replays else None))
            while self._wake_receiver.poll(0):
                self._wake_receiver.recv()
            while self._handed:
                self._send(*self._handed.popleft())
            if self._router in ready:
                self._take_request()
            if self._replays:
                self._replay()

    def _send(self, time_s: float, events: Sequence[KVEvent]) -> None:
        maps = self._writer.write(events)
        if not maps:
            return
        batch = msgspec.msgpack.encode((time_s, maps, self._replica))
        self._pub.send_multipart((TOPIC, self._number.to_bytes(8, "big"), batch))
        self._history.append((self._number, batch))
        self._history_bytes += len(batch)
        while len(self._history) > HISTORY_BATCHES or self._history_bytes > HISTORY_BYTES:
            self._history_bytes -= len(self._history.popleft()[1])
        self._number += 1

    def _take_request(self) -> None:
        """Take one request for a replay, unless too many of its reader wait."""
        reader, *request = self._router.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            log.warning("a request for a replay of KV events has other frames than an empty one and a number")
            return
        waiting = self._replays.setdefault(reader, deque())
        if len(waiting) < WAITING_REPLAYS:
            waiting.append(int.from_bytes(request[1], "big"))
        else:
            log.debug("a request for a replay of KV events is dropped: %d of its reader wait", WAITING_REPLAYS)

    def _replay(self) -> None:
        """Answer a part of one request. A reader that does not read loses batches beyond its queue."""
        reader, waiting = next(iter(self._replays.items()))
        del self._replays[reader]
        skipped = max(0, waiting[0] - self._history[0][0]) if self._history else 0
        part = list(islice(self._history, skipped, skipped + REPLAY_BATCHES))
        for number, batch in part:
            self._router.send_multipart((reader, b"", TOPIC, number.to_bytes(8, "big"), batch))
        if len(part) == REPLAY_BATCHES:
            waiting[0] = part[-1][0] + 1
        else:
            self._router.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))
            waiting.popleft()
        if waiting:
            self._replays[reader] = waiting
