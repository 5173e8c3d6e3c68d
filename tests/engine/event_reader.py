"""A reader of KV events as routers are: a subscriber, a client of the replay, and an index made of what they say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8
PATIENCE_MS = 60_000


class EventReader:
    """Connected to both endpoints; `index[medium, group]` maps block hashes to (parent, token ids, block size).

    All events are of data-parallel rank `replica`.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, unread: int = 1000, replica: int = 0) -> None:
        self.replica = replica
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVHWM, unread)
        self.live.connect(endpoint)
        self.live.subscribe(b"")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.setsockopt(zmq.RCVHWM, 0)
        self.asking.connect(replay_endpoint)
        self.numbers: list[int] = []
        self.types: list[str] = []
        self.index: dict[tuple[str, int], dict[int, tuple[int | None, list[int], int]]] = defaultdict(dict)

    def receive(self, timeout_ms: int = PATIENCE_MS) -> bool:
        """Take in one live batch; False when none comes."""
        if not self.live.poll(timeout_ms):
            return False
        topic, number, batch = self.live.recv_multipart()
        assert topic == b""
        self._take(int.from_bytes(number, "big"), batch)
        return True

    def receive_until(self, condition: Callable[[EventReader], bool]) -> None:
        while not condition(self):
            assert self.receive(), f"nothing more came; the index is {dict(self.index)}"

    def replay(self, start: int) -> list[int]:
        """Take in all batches from `start` on; returns their numbers."""
        self.asking.send_multipart((b"", start.to_bytes(8, "big")))
        numbers: list[int] = []
        while True:
            assert self.asking.poll(PATIENCE_MS), "the replay stopped"
            empty, topic, number, batch = self.asking.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                assert batch == b""
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            self._take(numbers[-1], batch)

    def _take(self, number: int, batch: bytes) -> None:
        time_s, events, rank = msgspec.msgpack.decode(batch)
        assert isinstance(time_s, float) and rank == self.replica
        self.numbers.append(number)
        for event in events:
            self.types.append(event["type"])
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.index.clear()
            return
        held = self.index[event["medium"], event["group_idx"]]
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                del held[block]
            return
        size, parent, tokens = event["block_size"], event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        for i, block in enumerate(event["block_hashes"]):
            held[block] = (parent, tokens[i * size : (i + 1) * size], size)
            parent = block

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
