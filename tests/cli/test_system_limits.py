"""Run commands where the system refuses to write or to open files: one line each, and no traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pypto_serving.cli import main

PYPTO = [sys.executable, "-m", "pypto_serving"]
FULL = "error: the output cannot be written: no space left on device\n"
FEW = "error: this process may open 18 files, but needs 64; raise the limit of open files (ulimit -n)\n"
COMMANDS: list[list[str]] = [
    ["--version"],
    ["--help"],
    ["check", "--help"],
    ["check", "--backend", "null", "--json"],
    ["kv", "stat", "."],
    ["kv", "verify", "."],
    ["bench", "trace", "--virtual", "--requests", "2"],
]


def run(argv: list[str], folder: Path, output: str, prepare: Callable[[], None] | None = None) -> tuple[int, str]:
    """Return the exit code and stderr of a command that writes to the file `output`."""
    with Path(output).open("w") as stdout:
        done = subprocess.run(
            [*PYPTO, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            preexec_fn=prepare,
            timeout=60,
        )
    return done.returncode, done.stderr


def test_a_full_output_is_one_line(tmp_path: Path) -> None:
    assert run(["check", "--backend", "null"], tmp_path, "/dev/full") == (1, FULL)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_full_output_of_each_command(
    tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose interpreter does not end after it."""
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = main(argv)
        with suppress(OSError):
            stdout.close()
    assert (code, capsys.readouterr().err) == (1, FULL)


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (18, 18))


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--backend", "null", "--port", "0"],
        ["generate", "--backend", "null", "x"],
        ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"],
        ["bench", "trace", "--base-url", "http://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_too_few_files_are_one_line(tmp_path: Path, argv: list[str]) -> None:
    assert run(argv, tmp_path, "/dev/null", few_files) == (2, FEW)


def test_commands_that_need_few_files_work(tmp_path: Path) -> None:
    assert run(["kv", "stat", "."], tmp_path, "/dev/null", few_files) == (0, "")


def test_a_soft_limit_of_files_is_raised(tmp_path: Path) -> None:
    def low_soft_limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (18, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    assert run(["check", "--backend", "null"], tmp_path, "/dev/null", low_soft_limit) == (0, "")


def close_streams() -> None:
    os.closerange(0, 3)


@pytest.mark.parametrize(
    "argv",
    [
        ["chat", "bundled", "--url", "http://127.0.0.1:1"],
        ["kv", "stat", "."],
        ["generate", "What is 1+1?"],
    ],
    ids=" ".join,
)
def test_closed_streams_are_empty_ones(tmp_path: Path, argv: list[str]) -> None:
    assert run(argv, tmp_path, "/dev/null", close_streams) == (0, "")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*PYPTO, "check", "--backend", "null"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_server_says_that_it_cannot_announce_itself() -> None:
    command = [*PYPTO, "serve", "--backend", "null", "--port", "0"]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        try:
            assert any("the ready line cannot be written to stdout: no space left" in line for line in process.stderr)
        finally:
            process.terminate()
            process.stderr.read()
    assert process.returncode == 0
