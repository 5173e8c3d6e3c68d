"""Threads and tasks on which others rely: how they end, and that slow work holds up no quick work."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from pypto_serving.errors import EXIT_MODEL, ModelError
from pypto_serving.threads import DaemonThreads, in_quick_thread, in_slow_thread, start_task, start_thread


def test_an_error_that_nobody_foresaw_ends_the_process_and_is_said() -> None:
    program = """
import threading
from pypto_serving.threads import start_thread

start_thread("the watch", lambda: 1 // 0)
threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the watch ended unexpectedly" in done.stderr and "ZeroDivisionError" in done.stderr


def test_an_error_of_ours_ends_the_process_with_its_code_in_one_line() -> None:
    program = """
import threading
from pypto_serving.errors import ModelError
from pypto_serving.threads import ending_loudly

with ending_loudly("a transfer"):
    raise ModelError("no weights")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (EXIT_MODEL, "no weights\n")


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(), ModelError("y")], ids=repr)
def test_a_part_that_relies_on_a_thread_is_told(error: BaseException) -> None:
    def fail() -> None:
        raise error

    told: list[BaseException] = []
    start_thread("part", fail, told.append).join(30)
    assert told == [error]


def test_a_part_that_relies_on_a_task_is_told_unless_it_is_cancelled() -> None:
    async def scenario() -> list[str]:
        async def fail() -> None:
            raise ValueError("x")

        told: list[str] = []
        tasks = [start_task("a", fail(), lambda error: told.append(f"{error!r}"))]
        tasks.append(start_task("b", asyncio.sleep(60), lambda error: told.append(f"{error!r}")))
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        return told

    assert asyncio.run(scenario()) == ["ValueError('x')"]


def test_slow_work_holds_up_neither_quick_work_nor_the_end_of_the_loop() -> None:
    release = threading.Event()

    async def scenario() -> None:
        slow = [asyncio.ensure_future(in_slow_thread(release.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(in_quick_thread(lambda: 7), 30) == 7
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    started_s = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - started_s < 30
    release.set()


def test_threads_start_as_they_are_needed_and_results_and_errors_come_back() -> None:
    threads, names = DaemonThreads("some", 2), set[int]()
    barrier = threading.Barrier(2)
    for future in [threads.submit(barrier.wait, 30) for _ in range(2)]:
        assert future.result(30) in (0, 1)
    for _ in range(10):
        names.add(threads.submit(threading.get_ident).result(30))
    assert 1 <= len(names) <= 2
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(30)


def test_a_process_ends_although_slow_work_does_not() -> None:
    program = """
import asyncio, threading
from pypto_serving.threads import in_slow_thread

async def main():
    try:
        await asyncio.wait_for(in_slow_thread(threading.Event().wait), 0.1)
    except TimeoutError:
        print("late")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


def test_a_copy_of_the_process_has_threads_of_its_own() -> None:
    threads = DaemonThreads("some", 1)
    threads.submit(int).result(30)
    if (pid := os.fork()) == 0:
        os._exit(threads.submit(lambda: 7).result(30))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
