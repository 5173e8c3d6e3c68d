"""The thread of the offline API."""

from __future__ import annotations

import asyncio
import os
import signal

from pypto_serving.errors import EngineDeadError
from pypto_serving.offline.loop_thread import LoopThread, Put

WAIT_S = 20


async def nothing() -> None:
    pass


def test_a_stream_that_goes_on_in_a_copy_of_the_process_ends_with_an_error() -> None:
    async def work(put: Put[int]) -> None:
        put(1)
        await asyncio.Event().wait()

    thread = LoopThread("test")
    try:
        stream = thread.iterate(work)
        assert next(stream) == 1
        child = os.fork()
        if not child:
            signal.alarm(WAIT_S)
            code = 1
            try:
                next(stream)
            except EngineDeadError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        thread.stop(nothing)
