"""Models by hub name: a hub that refuses, a mirror with token and revisions, the cache without network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pypto_serving.cli import main
from pypto_serving.setup.locate import BUNDLED

ROOT = Path(__file__).resolve().parents[2]
CONFIG = json.loads((BUNDLED / "config.json").read_text())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint's configuration without its weights."""
    folder = tmp_path / "owner-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_hub_name_without_network_names_the_way_out(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pypto_serving", "check", "owner/name"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert result.returncode == 3
    assert result.stderr == (
        "error: owner/name is no folder here, is not in the local cache, and cannot be fetched: HF_HUB_OFFLINE is set; "
        "give the folder of a local copy instead\n"
    )


class Hub(BaseHTTPRequestHandler):
    """Refuses everything, with the status and the code that the owner in the path asks for."""

    def do_GET(self) -> None:
        owner = self.path.split("/")[3]
        status, code = {"gone": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "closed": (403, "")}[owner]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ("gone", "neither a folder here nor a model on the hub, unless a private one; correct the name, run `hf auth"),
        ("gated", "gated; ask for access and run `hf auth login`"),
        ("closed", "cannot be fetched: it is not permitted (the hub answered 403)"),
        ("nobody", "cannot be fetched: there is no network, or the hub cannot be reached"),
    ],
)
def test_a_hub_that_refuses_is_explained_in_one_line(tmp_path: Path, owner: str, reason: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        port = 1 if owner == "nobody" else hub.server_port
        environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "pypto_serving", "check", f"{owner}/name"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
        hub.shutdown()
        thread.join()
    assert result.returncode == 3
    assert result.stderr.startswith(f"error: {owner}/name is ") and reason in result.stderr
    assert "give the folder of a local copy instead" in result.stderr and "Error" not in result.stderr
    assert result.stderr.count("\n") == 1


COMMIT = "0123456789012345678901234567890123456789"


class Mirror(BaseHTTPRequestHandler):
    """Serves the file config.json of one private model, at its revisions `main` and `v2`."""

    def do_GET(self) -> None:
        """Answer as the hub does: the list of files of a revision, and a file with its commit and hash."""
        path = self.path.partition("?")[0]
        body, status, code = b"", 404, "RevisionNotFound"
        if self.headers["Authorization"] != "Bearer secret":
            status, code = 401, "RepoNotFound"
        elif path.startswith("/api/models/owner/name/revision/") and path.split("/")[-1] in ("main", "v2", COMMIT):
            body = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}).encode()
        elif path == f"/api/models/owner/name/tree/{COMMIT}":
            size = len(json.dumps(CONFIG))
            body = json.dumps([{"type": "file", "path": "config.json", "size": size, "oid": "1" * 40}]).encode()
        elif path in (f"/owner/name/resolve/{revision}/config.json" for revision in ("v2", COMMIT)):
            body = json.dumps(CONFIG).encode()
        self.send_response(200 if body else status)
        if not body:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def test_a_mirror_a_token_a_revision_and_the_cache(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {"HF_HOME": str(tmp_path)}

    def check(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pypto_serving", "check", "owner/name", *options]
        env = environment | variables
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)

    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{hub.server_port}"
        refused = check()
        missing = check("--revision", "v3", HF_TOKEN="secret")
        found = check("--revision", "v2", HF_TOKEN="secret")
        hub.shutdown()
        thread.join()
    assert refused.returncode == 3 and "run `hf auth login` if it is private" in refused.stderr
    assert missing.stderr == "error: owner/name has no revision v3; give a branch, a tag or a commit of it\n"
    assert found.returncode == 0, found.stderr
    assert "revision                      v2 " in found.stdout
    assert check("--revision", "v2", HF_HUB_OFFLINE="1").returncode == 0
    assert "HF_HUB_OFFLINE is set" in check(HF_HUB_OFFLINE="1").stderr


def test_a_folder_has_no_revision(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = main(["check", str(checkpoint), "--revision", "v2"]), capsys.readouterr().err
    assert code == 3 and f"revision is v2, but {checkpoint} is a folder" in err


def test_hub_name_comes_from_the_local_cache(tmp_path: Path, checkpoint: Path) -> None:
    cached = tmp_path / "hub/models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    (cached / "snapshots").mkdir()
    checkpoint.rename(cached / "snapshots/0123")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pypto_serving", "check", "owner/name"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "served-model-name             owner/name" in result.stdout
