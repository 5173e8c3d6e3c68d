"""The Dockerfile, without Docker: what it runs, copies and checks works on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.setup.option_table import DEFAULTS
from tests.deploy.commands import check_command
from tests.deploy.files import DEPLOY, ROOT, instructions, only
from tests.e2e.server import Server

CONTEXT = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
"""The files and folders that a build sees."""


def test_stages_and_files_exist() -> None:
    stages = [rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"]
    assert stages == ["build", ""]
    assert [rest for name, rest in instructions() if name == "COPY"] == [
        ". /src",
        "--from=build /opt/pypto-serving /opt/pypto-serving",
    ]
    assert all((ROOT / name).exists() for name in CONTEXT)


def test_it_serves_beyond_the_container_as_nobody_special() -> None:
    entry, command = json.loads(only("ENTRYPOINT")), json.loads(only("CMD"))
    assert entry == ["pypto-serving"]
    check_command(command)
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert only("EXPOSE") == str(DEFAULTS["port"])
    assert int(only("USER")) > 0


@pytest.mark.e2e
def test_the_health_check_tells_a_server_that_serves() -> None:
    program, flag, code = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert program == "python"

    def is_healthy(port: int) -> bool:
        asked = code.replace(f":{DEFAULTS['port']}/", f":{port}/")
        assert asked != code
        return subprocess.run([sys.executable, flag, asked], capture_output=True, timeout=60).returncode == 0

    with Server("--backend", "null") as server:
        port = server.ready["port"]
        assert is_healthy(port)
    assert not is_healthy(port)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_its_commands_make_an_installation_that_serves(tmp_path: Path) -> None:
    """All commands of the first stage but the system's packages, in other folders."""
    for name in CONTEXT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / "src").mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / "src" / name)
    places = {
        "/src": str(tmp_path / "src"),
        "/opt/pypto-serving": str(tmp_path / "venv"),
        "python -m": f"{sys.executable} -m",
    }
    ran = 0
    for name, command in instructions():
        if name == "FROM" and ran:
            break
        if name == "RUN" and "apt-get" not in command:
            for there, here in places.items():
                command = command.replace(there, here)
            done = subprocess.run(
                ["bash", "-c", command], capture_output=True, text=True, env=os.environ | {"EXTRAS": ""}
            )
            assert done.returncode == 0, done.stderr
            ran += 1
    assert ran == 2
    with Server(program=[str(tmp_path / "venv" / "bin" / "pypto-serving")]) as server:
        body = {"messages": [{"role": "user", "content": "What is 37+45?"}]}
        answer = server.http.post("/v1/chat/completions", json=body).json()
        assert "82" in answer["choices"][0]["message"]["content"]
