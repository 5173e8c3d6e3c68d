"""Children: what they inherit, and how they end; copies of a process that has threads, files and a pipe of its own."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest

from pypto_serving.errors import EXIT_MODEL, EXIT_OK, ModelError
from pypto_serving.processes import Child, ChildFault, ChildProgress, Copy, Parent, start_copy, start_module


class Text(msgspec.Struct, frozen=True, tag="text"):
    """What children are started with."""

    text: str


def test_a_child_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stray.py").write_text("")
    monkeypatch.chdir(tmp_path)
    child = start_module("stray", Text("start"))
    assert child.end(patience_s=30) == 1
    assert "No module named stray" in capfd.readouterr().err


def test_a_child_outlives_terminal_signals_from_its_first_line_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raises = "for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)\n"
    lines = f"import os, signal, sys\n{raises}from pypto_serving.processes import Parent\n"
    end = f"from tests.test_processes import Text\nParent.of_module(Text)\n{raises}sys.exit(7)\n"
    (tmp_path / "raising.py").write_text(lines + end)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    child = start_module("raising", Text("start"))
    assert (child.end(patience_s=30), capfd.readouterr().err) == (7, "")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_child_opens_no_prompt_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ending.py").write_text("import sys\nsys.exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    child = start_module("ending", Text("start"))
    assert (child.end(patience_s=30), capfd.readouterr().err) == (7, "")


@pytest.mark.parametrize("sent", [b"", b'{"text": "x'])
def test_a_child_whose_parent_ends_before_it_starts_ends_in_silence(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(sys, "argv", ["child", str(os.dup(theirs.fileno()))])
        with pytest.raises(SystemExit) as ended:
            Parent.of_module(Text)
    assert ended.value.code is None


def await_end(child: Child) -> list[ChildProgress | ChildFault]:
    """Return all that a child says."""
    said = []
    while not child.gone:
        select.select([child.pipe], [], [])
        said += child.messages()
    return said


def test_a_copy_has_the_start_a_name_and_only_the_descriptors_that_it_is_to_share() -> None:
    def run(parent: Parent[Text]) -> None:
        listed = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
        there = [fd for fd in listed if Path(f"/proc/self/fd/{fd}").exists()]  # not the one of the list
        parent.progress(parent.start.text, there.count(read), len(there))
        parent.progress(Path("/proc/self/comm").read_text().strip(), 0, os.getppid())

    (read, write), own = os.pipe(), socket.socketpair()
    child = start_copy(run, Text("begin"), (read,), "rank 7")
    assert await_end(child) == [ChildProgress("begin", 1, 5), ChildProgress("rank 7", 0, os.getpid())]
    assert child.end(patience_s=30) == EXIT_OK
    for end in own:
        end.close()
    os.close(read)
    os.close(write)


def test_a_copy_outlives_terminal_signals_from_its_first_moment_on() -> None:
    """Although its parent does not ignore them."""
    for _ in range(20):
        child = start_copy(lambda parent: parent.progress("lives", 1, 1), Text(""), (), "copy")
        os.kill(child.pid, signal.SIGTERM)
        assert await_end(child) == [ChildProgress("lives", 1, 1)]
        assert child.end(patience_s=30) == EXIT_OK


def test_garbage_of_its_parent_closes_no_file_of_a_copy() -> None:
    def run(parent: Parent[Text]) -> None:
        ends = [end for _ in range(50) for end in os.pipe()]  # the numbers of the garbage are among them
        gc.collect()
        parent.progress("open", sum(Path(f"/proc/self/fd/{end}").exists() for end in ends), len(ends))

    gc.disable()
    cycle: list[object] = [*socket.socketpair(), *socket.socketpair()]
    cycle.append(cycle)
    del cycle
    child = start_copy(run, Text(""), (), "copy")
    assert await_end(child) == [ChildProgress("open", 100, 100)]
    assert child.end(patience_s=30) == EXIT_OK
    gc.enable()
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def test_a_copy_reports_the_error_that_ends_it() -> None:
    def run(parent: Parent[Text]) -> None:
        raise ModelError("no weights")

    child = start_copy(run, Text(""), (), "copy")
    assert await_end(child) == [ChildFault("no weights", EXIT_MODEL)]
    assert child.end(patience_s=30) == EXIT_MODEL


def test_a_copy_that_fails_unexpectedly_says_where() -> None:
    program = """
import msgspec
from pypto_serving.processes import start_copy

def run(parent):
    raise ValueError("on purpose")

print(start_copy(run, msgspec.Struct(), (), "copy").end(patience_s=30))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n" and "ValueError: on purpose" in done.stderr


def test_without_stderr_a_copy_that_fails_says_nothing_on_stdout() -> None:
    program = "from pypto_serving.processes import Copy; print(Copy(lambda: 1 // 0).wait())"
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout == "1\n"


def test_the_end_of_a_copy_is_seen_without_a_free_descriptor() -> None:
    program = """
import resource
from pypto_serving.processes import Copy

copy = Copy(lambda: 7)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(copy.wait(30))
"""
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True).stdout == "7\n"


@pytest.mark.parametrize("left", ["signal.signal(number, signal.SIG_IGN)", "signal.pthread_sigmask(0, [number])"])
def test_what_a_parent_left_is_undone(left: str) -> None:
    """But for what shells, nohup and Python itself ignore."""
    program = f"""
import os, signal, sys
for number in signal.valid_signals() - {{signal.SIGKILL, signal.SIGSTOP}}:
    signal.signal(number, signal.SIG_DFL)  # whatever this run's own parent ignored
    {left}
code = "from pypto_serving.processes import reset_inherited; reset_inherited(); import signal; print("
code += "[each.name for each in signal.Signals if signal.getsignal(each) is signal.SIG_IGN],"
code += "signal.pthread_sigmask(0, []))"
os.execv(sys.executable, [sys.executable, "-c", code])
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    kept = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGPIPE", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGXFSZ"]
    assert said == (f"{kept} set()\n" if "IGN" in left else "['SIGPIPE', 'SIGXFSZ'] set()\n")


def test_the_end_of_a_copy_that_somebody_else_waited_for_is_an_error() -> None:
    program = """
import os, signal
from pypto_serving.processes import Copy

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
copy = Copy(lambda: 7)
print(copy.wait(30), copy.poll())
copy.kill()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1 1\n", "")


def test_a_copy_ends_when_its_pipe_closes_although_its_parent_goes_on() -> None:
    child = start_copy(lambda parent: threading.Event().wait() and None, Text(""), (), "copy")
    child.pipe.close()
    assert child.process.wait(30) == EXIT_OK


def test_the_end_of_a_copy_is_told_once_it_ended_and_again() -> None:
    read, write = os.pipe()
    copy = Copy(lambda: os.read(read, 1)[0])
    assert copy.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        copy.wait(0.01)
    os.write(write, b"\x07")
    assert (copy.wait(), copy.wait(0), copy.poll()) == (7, 7, 7)
    copy.kill()  # there may be another process of this id
    os.close(read)
    os.close(write)


def test_a_copy_is_killed_where_it_does_not_end() -> None:
    child = start_copy(lambda parent: threading.Event().wait() and None, Text(""), (), "copy")
    assert child.end(patience_s=0) == -signal.SIGKILL


def test_threads_of_the_parent_may_hold_locks_meanwhile() -> None:
    """Those of standard streams are free in a copy, and it can start threads of its own."""
    program = """
import sys, threading
import msgspec
from pypto_serving.processes import start_copy

def run(parent):
    print("copied", file=sys.stderr, flush=True)
    thread = threading.Thread(target=print, args=("from a thread",), kwargs={"file": sys.stderr, "flush": True})
    thread.start()
    thread.join()

def write():
    while not ended.is_set():
        print(".", end="", file=sys.stderr, flush=True)

ended = threading.Event()
writer = threading.Thread(target=write)
writer.start()
print([start_copy(run, msgspec.Struct(), (), "copy").end(patience_s=30) for _ in range(20)])
ended.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{[0] * 20}\n"
    assert (done.stderr.count("copied"), done.stderr.count("from a thread")) == (20, 20)
