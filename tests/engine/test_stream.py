"""Who takes the outputs of a request, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from pypto_serving.engine.client import OutputStream, Pause
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.request import RequestOutput


class Consumer:
    """Takes outputs, and waits after each time while its gate is closed."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    def take(self, outputs: list[RequestOutput]) -> Pause:
        self.taken.append([int.from_bytes(output.token_ids, "little") for output in outputs])
        if self.error is not None:
            raise self.error
        return None if self.open.is_set() else self._wait()

    async def _wait(self) -> None:
        await self.open.wait()


def push(stream: OutputStream, *tokens: int, last: bool = False) -> None:
    for token in tokens:
        stream.push(RequestOutput(request_id="q", token_ids=pack_ids([token]), finish_reason="stop" if last else None))
    stream.deliver()


def run(scenario: Callable[[OutputStream, Consumer, asyncio.Task[None]], Awaitable[None]]) -> list[str]:
    """Run a scenario whose consumer waits for outputs; the ids that were aborted."""
    aborted: list[str] = []

    def abort(request_ids: Sequence[str]) -> None:
        aborted.extend(request_ids)

    async def main() -> None:
        stream, consumer = OutputStream(["q"], abort), Consumer()
        task = asyncio.create_task(stream.deliver_to(consumer.take))
        await asyncio.sleep(0)
        await scenario(stream, consumer, task)

    asyncio.run(main())
    return aborted


def test_a_consumer_that_keeps_up_is_called_at_once() -> None:
    async def scenario(stream: OutputStream, consumer: Consumer, task: asyncio.Task[None]) -> None:
        push(stream, 1)
        push(stream, 2, 3)
        assert consumer.taken == [[1], [2, 3]]
        push(stream, 4, last=True)
        assert consumer.taken == [[1], [2, 3], [4]]
        await task

    assert run(scenario) == []


def test_what_comes_while_the_consumer_waits_is_taken_at_once() -> None:
    async def scenario(stream: OutputStream, consumer: Consumer, task: asyncio.Task[None]) -> None:
        consumer.open.clear()
        push(stream, 1)
        for token in (2, 3, 4):
            push(stream, token)
            await asyncio.sleep(0)
        push(stream, 5, last=True)
        assert consumer.taken == [[1]]
        consumer.open.set()
        await task
        assert consumer.taken == [[1], [2, 3, 4, 5]]

    assert run(scenario) == []


def test_what_came_before_the_consumer_is_taken_first() -> None:
    async def main() -> None:
        stream, consumer = OutputStream(["q"], lambda request_ids: None), Consumer()
        push(stream, 1, 2)
        push(stream, 3, last=True)
        await stream.deliver_to(consumer.take)
        assert consumer.taken == [[1, 2, 3]]

    asyncio.run(main())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_cancelled_consumer_aborts_wherever_it_waits(steps: int) -> None:
    async def scenario(stream: OutputStream, consumer: Consumer, task: asyncio.Task[None]) -> None:
        consumer.open.clear()
        push(stream, 1)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        push(stream, 2)
        assert consumer.taken == [[1]]

    assert run(scenario) == ["q"]


def test_an_error_of_the_consumer_is_raised_where_it_came_from() -> None:
    async def scenario(stream: OutputStream, consumer: Consumer, task: asyncio.Task[None]) -> None:
        consumer.error = ZeroDivisionError()
        push(stream, 1)
        with pytest.raises(ZeroDivisionError):
            await task

    assert run(scenario) == ["q"]


def test_a_request_that_was_aborted_ends_the_wait() -> None:
    async def scenario(stream: OutputStream, consumer: Consumer, task: asyncio.Task[None]) -> None:
        stream.forget("q")
        await task

    assert run(scenario) == []
