"""What commands show on a terminal: completion of values, progress, and tables."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pypto_serving.cli import main, terminal
from pypto_serving.store.disk import DiskStore
from tests.checkpoints import make_checkpoint
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, NUM_SLOTS

ROOT = Path(__file__).resolve().parents[2]


COMPLETED = [
    ("pypto-serving se", ["serve"]),
    ("pypto-serving serve --kernels av", ["avx512_bf16", "avx512_vnni", "avx512", "avx2"]),
    ("pypto-serving check --log-level d", ["debug"]),
    ("pypto-serving serve --kv-store t", ["through"]),
    ("pypto-serving chat --backend nu", ["null"]),
    ("pypto-serving bench serve --dataset-name pre", ["prefix_repetition"]),
]


def completing(words: str) -> dict[str, str]:
    """The variables with which the shell asks for completions."""
    count = len(words.split()) - 1
    return {"_PYPTO_SERVING_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}


@pytest.mark.parametrize(("words", "offered"), COMPLETED)
def test_completion(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in completing(words).items():
        monkeypatch.setenv(name, value)
    with suppress(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == offered


def test_completion_in_a_process() -> None:
    words, offered = COMPLETED[0]
    command = [sys.executable, "-m", "pypto_serving"]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | completing(words), timeout=60
    )
    assert result.stdout.split() == offered


def on_terminal(*command: str, typed: str | None = None) -> str:
    """Run a command with stderr and stdout on a terminal, and return what it shows there."""
    ours, theirs = pty.openpty()
    given = None if typed is None else subprocess.PIPE
    with subprocess.Popen(command, stdin=given, stdout=theirs, stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        if process.stdin is not None:
            process.stdin.write((typed or "").encode())
            process.stdin.close()
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the last process has closed the terminal
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    return shown.decode()


def test_progress_is_in_units_that_people_read() -> None:
    code = "from pypto_serving.cli.progress import LoadProgress as P; p = P(); p('weights', 0, 3 << 20); "
    shown = on_terminal(sys.executable, "-c", code + "p('weights', 3 << 19, 3 << 20); p('warm-up', 1, 2); p.close()")
    assert "1.5 MiB of 3 MiB" in shown and "1 of 2" in shown and str(3 << 20) not in shown


def test_an_llm_is_quiet() -> None:
    code = "from pypto_serving import LLM\nwith LLM(backend='null') as llm: llm.generate([[1, 2, 3]] * 3)"
    assert on_terminal(sys.executable, "-c", code) == ""


def test_lines_break_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from pypto_serving.cli import report\n"
        "from pypto_serving.setup.options import Options\n"
        "from pypto_serving.setup.prepare import model_spec, prepare\n"
        "options = Options(backend='null', model='deepseek_v4')\n"
        "model = model_spec(options)\n"
        "report.show(prepare(options, model), model, None, 'none')"
    )
    monkeypatch.setenv("COLUMNS", "1000")
    words = on_terminal(sys.executable, "-c", code).split()
    monkeypatch.setenv("COLUMNS", "100")
    shown = on_terminal(sys.executable, "-c", code)
    assert max(map(len, shown.splitlines())) <= 100
    static = [word for word in words if not any(map(str.isdigit, word))]
    assert [word for word in shown.split() if not any(map(str.isdigit, word))] == static


def test_kv_stat_breaks_between_words_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "a model with a long name, bfloat16, avx512_bf16, 32 tokens/block"
    DiskStore(tmp_path, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30, model=model).close()
    command = (sys.executable, "-m", "pypto_serving", "kv", "stat", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")
    words = on_terminal(*command).split()
    monkeypatch.setenv("COLUMNS", "80")
    shown = on_terminal(*command)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == words


HOSTILE = "\x1b]0;owned\x07a\x1b[2J\x9b31mb\rc\x7f\x08\td\ud83dé"
"""Changes the title, clears, colours, overwrites; with a tab, half a pair that JSON may hold, and plain letters."""
ESCAPED = "\\x1b]0;owned\\x07a\\x1b[2J\\x9b31mb\\x0dc\\x7f\\x08\td\\ud83dé"


class Hostile(BaseHTTPRequestHandler):
    """Thinks and says HOSTILE, and names its model and its errors so."""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": HOSTILE}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "fail" in str(asked):
            self._answer(400, json.dumps({"error": {"message": HOSTILE}}))
            return
        texts = [{"text": HOSTILE}]
        if self.path.endswith("chat/completions"):
            texts = [{"delta": {"reasoning_content": HOSTILE}}, {"delta": {"content": HOSTILE}}]
        self._answer(200, "".join(f"data: {json.dumps({'choices': [text]})}\n\n" for text in texts))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def hostile() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", ["chat", pytest.param("complete", marks=pytest.mark.soak)])
def test_a_terminal_shows_control_sequences_and_a_pipe_gets_them(hostile: str, command: str) -> None:
    asked = [sys.executable, "-m", "pypto_serving", command, "--url", hostile]
    shown = on_terminal(*asked, typed="hello\n")
    assert shown.replace("\r\n", "\n").count(ESCAPED) == (2 if command == "chat" else 1)
    assert set(re.findall(r"\x1b\[[0-9]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)) <= {"\x1b[2m", "\x1b[0m", "\r"}
    piped = subprocess.run(asked, input=b"hello\n", capture_output=True, check=True)
    assert piped.stdout == (HOSTILE.encode("utf-8", "backslashreplace") + b"\n")
    failed = subprocess.run(asked, input=b"fail\n", capture_output=True)
    assert failed.returncode == 1 and b"error: \x1b]0;owned" in failed.stderr


def test_errors_of_a_server_do_nothing_to_a_terminal(hostile: str) -> None:
    code = f"import sys; from pypto_serving.cli import main; main(['chat', '--url', '{hostile}']); sys.exit()"
    shown = on_terminal(sys.executable, "-c", code, typed="fail\n")
    assert "\\x1b]0;owned\\x07" in shown and "\x1b" not in shown and "\x07" not in shown


@pytest.mark.e2e
def test_generate_writes_what_the_model_said_unchanged_to_pipes_only(tmp_path: Path) -> None:
    """A model of random weights writes any bytes."""
    model = str(make_checkpoint(tmp_path / "model", dtype="bfloat16"))
    asked = [sys.executable, "-m", "pypto_serving", "generate", "--model", model, "--max-model-len", "256"]
    asked += ["--max-tokens", "60", "--temperature", "2", "--seed", "1", "Hello"]
    said = json.loads(subprocess.run([*asked, "--json"], capture_output=True, check=True).stdout)["text"]
    assert terminal.shown(said) != said
    assert subprocess.run(asked, capture_output=True, check=True).stdout.decode() == said + "\n"
    shown = on_terminal(*asked)
    assert terminal.shown(said).replace("\r\n", "\n") in shown.replace("\r\n", "\n") and "\x1b" not in shown
