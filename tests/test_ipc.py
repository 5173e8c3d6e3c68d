"""Channels over a pair of sockets: frames in pieces, frames larger than a socket takes, peers that go away."""

from __future__ import annotations

import select
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.ipc import FRAME_BYTES, SocketChannel


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A message of any size."""

    text: str


Pair = tuple[SocketChannel[Text], SocketChannel[Text]]

LARGE = Text("x" * (8 << 20))


@pytest.fixture
def pair() -> Any:
    near, end = SocketChannel.pair(Text)
    far: SocketChannel[Text] = SocketChannel(end, Text)
    yield near, far
    near.close()
    far.close()


def frame(message: Text) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(FRAME_BYTES, "little") + data


def test_messages_arrive_in_order(pair: Pair) -> None:
    near, far = pair
    for i in range(100):
        near.send(Text(str(i)))
    assert [far.receive() for _ in range(101)] == [*(Text(str(i)) for i in range(100)), None]
    far.send(Text("back"))
    assert near.receive() == Text("back")


@given(st.lists(st.text(max_size=50), max_size=5), st.data())
def test_frames_cut_anywhere(texts: list[str], data: st.DataObject) -> None:
    near, end = SocketChannel.pair(Text)
    stream, found = b"".join(frame(Text(text)) for text in texts), []
    with end:
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            end.sendall(stream[:size])
            stream = stream[size:]
            while (message := near.receive()) is not None:
                found.append(message.text)
    assert found == texts
    near.close()


def test_a_message_larger_than_the_socket_takes(pair: Pair) -> None:
    """It leaves in pieces, with `flush`, while the other end reads; `events` says that there is more."""
    near, far = pair
    near.send(LARGE)
    near.send(Text("behind"))
    assert near.events & select.POLLOUT
    found, rounds = [], 0
    while len(found) < 2:
        rounds += 1
        while (message := far.receive()) is not None:
            found.append(message)
        near.flush()
    assert found == [LARGE, Text("behind")] and rounds > 2
    assert near.events == select.POLLIN


def test_what_was_sent_before_a_death_arrives(pair: Pair) -> None:
    near, far = pair
    near.send(Text("last"))
    near.close()
    assert not far.gone
    assert far.receive() == Text("last")
    assert far.receive() is None and far.gone
    far.send(Text("to nobody"))
    assert far.events == select.POLLIN


def test_a_death_in_the_middle_of_a_message(pair: Pair) -> None:
    near, far = pair
    near.socket.sendall(frame(Text("whole")) + frame(Text("half"))[:-1])
    near.close()
    assert far.receive() == Text("whole")
    assert far.receive() is None and far.gone


def test_a_peer_that_dies_while_much_waits_to_be_sent(pair: Pair) -> None:
    near, far = pair
    near.send(LARGE)
    far.close()
    near.flush()
    assert near.events == select.POLLIN
    near.send(Text("more"))
    assert near.receive() is None and near.gone


def test_lingering_sends_what_waits_or_gives_up(pair: Pair) -> None:
    near, _ = pair
    near.send(LARGE)
    near.close(linger_s=0.01)
    assert near.socket.fileno() == -1


def test_an_end_is_no_descriptor_of_other_children(pair: Pair) -> None:
    near, far = pair
    assert not near.socket.get_inheritable() and not far.socket.get_inheritable()
