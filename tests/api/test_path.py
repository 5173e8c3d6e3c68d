"""How far it is through the API process: the files that a plain chat passes, and the releases of uvicorn below it."""

from __future__ import annotations

import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from tests.api.running import CHAT, RunningServer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "pypto_serving")
MAX_FILES = 25
TESTED_UVICORN = ("0.32", "0.55")
"""The first minor release that the connections are tested with, and the first that they are not."""


def test_a_plain_chat_passes_few_files(start: Callable[..., RunningServer]) -> None:
    """Before the engine has it; it is read in this process. Files of several processes' types count, too."""
    passed = defaultdict[int, set[str]](set)
    watching = False

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            passed[threading.get_ident()].add(frame.f_code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(watch)
    try:
        server = start()
    finally:
        threading.setprofile(None)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.post(CHAT, body).status_code == 200  # what happens once has happened
    assert server.http.get("/version").status_code == 200
    server.call(lambda: None)  # and so have the ends of these requests
    submit = server.engine.submit

    def submit_and_stop(requests: Any) -> Any:
        nonlocal watching
        watching = False
        return submit(requests)

    server.engine.submit = submit_and_stop  # type: ignore[method-assign]
    watching = True
    assert server.post(CHAT, body).status_code == 200
    # a thread that only the engine has, such as the one that keeps its figures, may run meanwhile
    files = set().union(*(files for files in passed.values() if any(file.startswith("/api/") for file in files)))
    assert "/api/generation/generation.py" in files and len(files) <= MAX_FILES, "\n".join(sorted(files))
    assert sys.getprofile() is None


def test_the_installed_uvicorn_is_one_of_the_tested() -> None:
    """`api/http/connection.py` builds on its internals, so a new minor release is tested before it is allowed."""
    first, beyond = TESTED_UVICORN
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"uvicorn>={first},<{beyond}" in dependencies
    installed = tuple(map(int, version("uvicorn").split(".")[:2]))
    assert tuple(map(int, first.split("."))) <= installed < tuple(map(int, beyond.split(".")))
