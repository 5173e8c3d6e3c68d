"""Children: processes that report over a control pipe, and end with the process that started them.

A child is a module of its own, or a copy of its parent. Its control pipe closes at once when the other side is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec

from pypto_serving.errors import EXIT_CRASH, EXIT_OK, PyptoError
from pypto_serving.threads import start_thread

T = TypeVar("T")

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Terminals and service managers send these to whole groups of processes; children leave them to their parent."""
LEFT_SIGNALS = frozenset(
    {
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGPIPE, signal.SIGXFSZ),
    }
)
"""Who ignores these means it: nohup, shells for what they start in the background, and Python itself."""
STDERR = 2
LOOK_S = 0.005
"""Time between two looks whether a copy has ended, once it is about to."""
COPY_NUMBER = struct.Struct("<q")
"""The number of a new copy. It is sent with the socket of the copy, before its purpose."""
COPY_END = struct.Struct("<qid")
"""How a copy ended: its number, its exit code, NO_COPY or NOT_PREPARED, and the CPU time that it took."""
NO_COPY, NOT_PREPARED = 1 << 16, 1 << 17
"""Codes of copies that did not start: no process or file was left for it; what its work needs cannot be loaded."""
MAX_PURPOSE_BYTES = 1 << 12
logger = logging.getLogger("pypto_serving")


class ChildProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A child has done `done` of `total` units of a phase of its start."""

    phase: str
    done: int
    total: int


class ChildFault(msgspec.Struct, frozen=True, tag="fault"):
    """A child is about to end, because of an error."""

    message: str
    exit_code: int


_CHILD_MESSAGES = msgspec.json.Decoder(ChildProgress | ChildFault)


class Child:
    """A process, and our end of its control pipe: `start_module` and `start_copy` make them.

    The child reports progress and faults over the pipe, and ends when the pipe closes. When the child is gone, our end
    closes at once. Terminal signals never end it.
    """

    def __init__(self, process: subprocess.Popen[bytes] | Copy, pipe: socket.socket) -> None:
        self.process, self.pipe = process, pipe
        self.pipe.setblocking(False)
        self._buffer = b""
        self.gone = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def messages(self) -> list[ChildProgress | ChildFault]:
        """Return the messages since the last call; set `gone` at the end of the stream."""
        while not self.gone:
            try:
                data = self.pipe.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.gone = not data
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [_CHILD_MESSAGES.decode(line) for line in lines if line]

    def end(self, patience_s: float) -> int:
        """Wait `patience_s` for the child to end, then kill it; return its exit code."""
        try:
            code = self.process.wait(patience_s) if patience_s > 0 else None
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            self.process.kill()
            code = self.process.wait()
        self.pipe.close()
        return code


def start_module(
    module: str,
    start: msgspec.Struct,
    *ends: socket.socket,
    shared: tuple[int, ...] = (),
    variables: Mapping[str, str] | None = None,
    leads: bool = False,
) -> Child:
    """Start `python -P -m module`, never from the current folder; it reads `start` from its control pipe.

    It inherits `ends` and the file descriptors `shared` under the same numbers; `ends` are closed here. Its environment
    is that of this process with `variables` added, without PYTHONINSPECT, which opens a prompt at the end. Terminal
    signals wait until `Parent` ignores them. With `leads`, it leads a process group, which its own children join unless
    they lead others. Raises OSError if it cannot be started.
    """
    pipe, theirs = socket.socketpair()
    try:
        with terminal_signals_held():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *(end.fileno() for end in ends), *shared],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONINSPECT": "", **(variables or {})},
                process_group=0 if leads else None,
            )
    except OSError:
        pipe.close()
        raise
    finally:
        for end in (theirs, *ends):
            end.close()
    with contextlib.suppress(OSError):
        pipe.sendall(msgspec.json.encode(start) + b"\n")
    return Child(process, pipe)


def start_copy(run: Callable[[Parent[T]], None], start: T, shared: tuple[int, ...], name: str) -> Child:
    """Start a copy of this process, named `name`, that does `run`. It has all modules that this process imported.

    Its only file descriptors are the standard ones and `shared`. It has none of this process's threads, so it must not
    use what needs them. Raises OSError if it cannot be started.
    """
    pipe, theirs = socket.socketpair()

    def work() -> int:
        gc.freeze()  # garbage of this process might close numbers that are the copy's own files by then
        name_process(name)
        close_all_but({theirs.fileno(), *shared})
        sys.stderr = sys.__stderr__  # a test runner's is a file of its own
        return report_end(run, Parent(theirs, start))

    try:
        with terminal_signals_held():
            return Child(Copy(work), pipe)
    except OSError:
        pipe.close()
        raise
    finally:
        theirs.close()


class Copy:
    """Owns a copy of this process (fork) that does `work`. Its exit code is what `work` returns, EXIT_OK for None.

    Use it from one thread.
    """

    def __init__(self, work: Callable[[], int | None]) -> None:
        """Raises OSError if it cannot be started."""
        parent = os.getpid()
        self.pid = _fork() or _run_copy(parent, work)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit code. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + (timeout or 0.0)
        while self._code is None:
            try:
                ended, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            except ChildProcessError:  # a library in this process ignores SIGCHLD, or waits for all children
                self._code = EXIT_CRASH
                break
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif timeout is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired("a copy", timeout)
            else:
                time.sleep(LOOK_S)
        return self._code

    def kill(self) -> None:
        """End it at once."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def serve_copies(
    control: socket.socket,
    prepare: Callable[[bytes], Callable[[socket.socket], None]],
    ends_idle: bool = False,
) -> None:
    """Start the copies that are asked for on `control`, until the other side closes it; report there how each ended.

    `prepare` loads what a purpose needs, and returns what a copy does with its socket. This process must have no
    threads. With `ends_idle` it ends when a copy ended by itself, without an error, and no other is left.
    """
    poller, copies = select.poll(), dict[int, tuple[socket.socket, int, Copy]]()
    poller.register(control, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd != control.fileno():
                ended, number, copy = copies.pop(fd)
                poller.unregister(fd)
                ended.close()
                before_s = _used_by_copies_s()
                code = copy.wait()
                control.send(COPY_END.pack(number, code, _used_by_copies_s() - before_s))
                if ends_idle and code == EXIT_OK and not copies:
                    return
                continue
            head, fds, _, _ = socket.recv_fds(control, COPY_NUMBER.size + MAX_PURPOSE_BYTES, 1)
            if not head:
                return
            (number,), purpose = COPY_NUMBER.unpack_from(head), head[COPY_NUMBER.size :]
            try:
                ended, copy = _start_served_copy(fds, partial(prepare, purpose))
            except OSError:
                control.send(COPY_END.pack(number, NO_COPY, 0.0))
            except Exception:
                logger.exception("what a copy of this process needs cannot be loaded")
                control.send(COPY_END.pack(number, NOT_PREPARED, 0.0))
            else:
                copies[ended.fileno()] = ended, number, copy
                poller.register(ended, select.POLLHUP)


def _start_served_copy(
    fds: list[int], prepare: Callable[[], Callable[[socket.socket], None]]
) -> tuple[socket.socket, Copy]:
    """Start a copy that works on a socket. Return a socket that hangs up when the copy ends, and the copy.

    Raises OSError.
    """
    if not fds:
        raise OSError("the socket of the copy did not arrive: there are too many files")
    with socket.socket(fileno=fds[0]) as end:
        serve = prepare()
        ours, theirs = socket.socketpair()

        def work() -> None:
            gc.freeze()  # else a collection would copy all pages of this process
            close_all_but({end.fileno(), theirs.fileno()})
            serve(end)

        with theirs:
            try:
                return ours, Copy(work)
            except OSError:
                ours.close()
                raise


def _used_by_copies_s() -> float:
    """Return the CPU time of all copies that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def close_all_but(kept: Collection[int]) -> None:
    """Close all file descriptors of this process but the standard ones and these."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if (fd := int(path.name)) > STDERR and fd not in kept:
            with contextlib.suppress(OSError):  # the one by which they were listed
                os.close(fd)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        return os.fork()


def _run_copy(parent: int, work: Callable[[], int | None]) -> NoReturn:
    """Do `work` in a process that `parent` forked just now."""
    try:
        die_with_parent()
        if os.getppid() == parent:  # else the parent ended before the kernel was told
            os._exit(work() or EXIT_OK)
    except BaseException:
        if sys.stderr is not None:  # else it would go to stdout
            traceback.print_exc()
    finally:
        os._exit(1)


class Descendants:
    """Tells when a child, and all processes that it started, have ended.

    They inherit `end`, which only has to be open. `ours` becomes readable once all have ended.
    """

    def __init__(self) -> None:
        self.ours, self.end = socket.socketpair()

    def ended(self) -> bool:
        """Return True once all of them have ended."""
        poller = select.poll()
        poller.register(self.ours, select.POLLIN)
        return bool(poller.poll(0))

    def kill(self, group: int) -> None:
        """Kill the remaining ones, which are in the process group `group`."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching."""
        self.ours.close()


class Parent(Generic[T]):
    """The child's end of its control pipe. Ends this process when the parent does.

    A thread watches the pipe; on Linux the kernel ends this process as well. A process that makes copies while it
    serves must not have the thread: `watches` is then False.
    """

    def __init__(self, pipe: socket.socket, start: T, watches: bool = True) -> None:
        self._pipe, self.start = pipe, start
        ignore_terminal_signals()
        die_with_parent()
        if watches:
            start_thread("parent-watch", self._watch)

    @classmethod
    def of_module(cls, start_type: type[T], watches: bool = True) -> Parent[T]:
        """Return the parent of a process that `start_module` started; `sys.argv` names the pipe.

        Tools such as `top` then show the process by the name of its `start_type`: pypto-worker for WorkerStart.
        """
        name_process(f"pypto-{start_type.__name__.removesuffix('Start').lower()}")
        pipe = socket.socket(fileno=int(sys.argv[1]))
        with pipe.makefile("rb") as stream:
            if not (line := stream.readline()).endswith(b"\n"):
                sys.exit()  # the parent ended meanwhile
        return cls(pipe, msgspec.json.decode(line, type=start_type), watches)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._pipe.recv(1):
                pass
        os._exit(0)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a phase are done."""
        self._say(ChildProgress(phase, done, total))

    def fault(self, message: str, exit_code: int) -> None:
        """Report the error that ends this process."""
        self._say(ChildFault(message, exit_code))

    def _say(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):
            self._pipe.sendall(msgspec.json.encode(message) + b"\n")


def run_child(run: Callable[[Parent[T]], None], start_type: type[T]) -> int:
    """Run a process that `start_module` started; return its exit code. Report the error that ends it."""
    return report_end(run, Parent.of_module(start_type))


def report_end(run: Callable[[Parent[T]], None], parent: Parent[T]) -> int:
    """Run a child; return its exit code. Report the error that ends it."""
    try:
        run(parent)
    except PyptoError as error:
        parent.fault(str(error), error.exit_code)
        return error.exit_code
    return EXIT_OK


@contextlib.contextmanager
def terminal_signals_held() -> Iterator[None]:
    """Let terminal signals wait, in this thread and in processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """Begin a child: ignore terminal signals, pending ones too, and undo what else its parent left.

    It may then write while its group is in the background.
    """
    for number in (*TERMINAL_SIGNALS, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    reset_inherited(kept=TERMINAL_SIGNALS)


def reset_inherited(kept: Collection[signal.Signals] = ()) -> None:
    """Undo what a parent may have left: signals that are ignored, but for those `kept`, or blocked; closed streams.

    With SIGCHLD ignored, the ends of children could not be told; with SIGPROF, limits of CPU time would end nothing.
    """
    for number in signal.valid_signals() - LEFT_SIGNALS - set(kept):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    open_standard_files()


def open_standard_files() -> None:
    """Open stdin, stdout and stderr where they are closed, else a pipe or socket would get the number of one."""
    for fd in range(STDERR + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def die_with_parent() -> None:
    """On Linux, let the kernel kill this process, even if stopped or stuck, when its parent's thread ends."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def name_process(name: str) -> None:
    """On Linux, let tools show this process by a name of at most 15 bytes."""
    _prctl(15, name.encode())  # PR_SET_NAME


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
