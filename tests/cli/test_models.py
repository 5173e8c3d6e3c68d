"""Models by name: files from a hub and from ModelScope, interruptions, damage, the list of names, the caches."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from pypto_serving.cli import main
from pypto_serving.errors import ModelError
from pypto_serving.setup.catalog import catalog
from pypto_serving.setup.download import RemoteFile
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.locate import locate_model
from tests.checkpoints import random_model
from tests.model.gguf.files import write_model

COMMIT = "0123456789012345678901234567890123456789"
CONFIG = b'{"a": 1}'


class Files(BaseHTTPRequestHandler):
    """Serves `server.files` of every model as Hugging Face's hub does, and as ModelScope does.

    `server.faults` are taken one by one for files of LFS: cut the connection in the middle, refuse, damage a byte, or
    send another number of bytes than is listed.
    """

    server: Any

    def do_GET(self) -> None:
        """Answer a list of files, or a file, from the byte on that is asked for."""
        where, query = urlsplit(self.path).path.split("/"), parse_qs(urlsplit(self.path).query)
        files: dict[str, bytes] = self.server.files
        self.server.asked.append((self.path, self.headers["Range"], self.headers["Authorization"]))
        if where[-2:] == ["repo", "files"]:
            listed = [
                {"Path": path, "Size": len(data), "Sha256": hashlib.sha256(data).hexdigest(), "Type": "blob"}
                for path, data in files.items()
            ]
            self.answer(json.dumps({"Code": 200, "Data": {"Files": [*listed, {"Path": "d", "Type": "tree"}]}}).encode())
        elif "FilePath" in query:
            self.send_file(query["FilePath"][0])
        elif where[1] == "api" and "tree" in where:
            self.answer(json.dumps([self.entry(path, data) for path, data in files.items()]).encode())
        elif where[1] == "api":
            found = [self.entry(path, data) for path, data in files.items()]
            siblings = [{"rfilename": f["path"], "blobId": f["oid"], **f, "lfs": self.lfs(f)} for f in found]
            self.answer(json.dumps({"id": "o/n", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            self.send_file("/".join(where[5:]))

    do_HEAD = do_GET

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        more = {} if path.endswith(".json") else {"lfs": lfs}
        return {"type": "file", "path": path, "size": len(data), "oid": blob, **more}

    def lfs(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        return {"sha256": entry["lfs"]["oid"], **entry["lfs"]} if "lfs" in entry else None

    def send_file(self, path: str) -> None:
        data = self.server.files[path]
        entry = self.entry(path, data)
        tag = {"ETag": f'"{entry.get("lfs", {}).get("oid", entry["oid"])}"'}
        begin = int((self.headers["Range"] or "bytes=0-")[6:].partition("-")[0])
        fault = self.server.faults.pop(0) if self.server.faults and path.endswith(".gguf") and self.is_get() else ""
        if fault == "refuse":
            self.answer(b"", 500)
        elif fault == "damage":
            self.answer(b"?" + data[1:], **tag)
        elif fault in ("shorter", "longer"):
            self.answer(data[:-1] if fault == "shorter" else data + b"?", **tag)
        else:
            span = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
            self.answer(data[begin:], 206 if begin else 200, cut=fault == "cut", **tag, **span)

    def is_get(self) -> bool:
        return self.command == "GET"

    def answer(self, body: bytes, status: int = 200, cut: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.is_get():
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


class Place:
    """A user's caches, and the hubs that `locate` asks."""

    def __init__(self, home: Path, server: ThreadingHTTPServer) -> None:
        self.server: Any = server
        self.environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        endpoint = f"http://127.0.0.1:{server.server_port}"
        self.environment |= {"HF_ENDPOINT": endpoint, "MODELSCOPE_ENDPOINT": endpoint, "HF_HOME": str(home / "hf")}
        self.environment |= {"XDG_CACHE_HOME": str(home / "cache"), "MODELSCOPE_API_TOKEN": "ms-secret"}

    def locate(self, name: str, **more: str) -> tuple[str, str]:
        code = (
            "import sys\nfrom pypto_serving.setup.locate import ModelError, locate_model\n"
            "try: print(locate_model(sys.argv[1]))\nexcept ModelError as error: print('error:', error)"
        )
        command = [sys.executable, "-c", code, name]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment | more, timeout=60)
        return done.stdout.strip(), done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3", num_hidden_layers=1))
        held: Any = server
        held.files = {"config.json": CONFIG, "sub/m-q4_k_m.gguf": path.read_bytes(), "README.md": b"read"}
        held.faults, held.asked = [], []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Place(tmp_path, server)
        server.shutdown()
        thread.join()


def starts(place: Place) -> list[int]:
    """The bytes from which the GGUF file was asked for."""
    found = [range for path, range, _ in place.server.asked if "FilePath=sub" in path or "/resolve/" in path]
    return [int((range or "bytes=0-")[6:].partition("-")[0]) for range in found]


@pytest.mark.parametrize("name", ["hf.co/o/n-GGUF", "modelscope.cn/o/n-GGUF:q4_k_m"])
def test_an_interrupted_download_goes_on(place: Place, name: str) -> None:
    chunk = constants.DOWNLOAD_CHUNK_SIZE
    place.server.files["sub/m-q4_k_m.gguf"] += bytes(2 * chunk)
    place.server.faults = ["cut", "refuse"]
    out, _ = place.locate(name)
    assert "the hub answered 500" in out
    place.server.asked.clear()
    out, err = place.locate(name, TQDM_POSITION="-1")  # a bar even without a terminal
    assert Path(out, "config.json").exists(), out + err
    assert chunk in starts(place)
    assert "m-q4_k_m.gguf: 100%" in err
    place.server.asked.clear()
    assert place.locate(name, HF_HUB_OFFLINE="1")[0] == out
    assert not place.server.asked


@pytest.mark.parametrize("name", ["o/n-GGUF", "modelscope.cn/o/n-GGUF"])
def test_a_damaged_download_is_refused_and_fetched_anew(place: Place, name: str) -> None:
    place.server.faults = ["damage"]
    assert "was damaged on its way: its hash is" in place.locate(name)[0]
    assert Path(place.locate(name)[0], "config.json").exists()


@pytest.mark.parametrize("name", ["o/n-GGUF", "modelscope.cn/o/n-GGUF"])
@pytest.mark.parametrize("fault", ["shorter", "longer"])
def test_another_size_than_the_hub_lists(place: Place, name: str, fault: str) -> None:
    place.server.faults, size = [fault], len(place.server.files["sub/m-q4_k_m.gguf"])
    found = size + (1 if fault == "longer" else -1)
    out, _ = place.locate(name)
    assert f"m-q4_k_m.gguf has {found} bytes, but the hub lists {size}" in out and "network" not in out
    assert Path(place.locate(name)[0], "config.json").exists()


def test_modelscope_gets_its_token_and_chooses_files(place: Place) -> None:
    place.server.files = {"config.json": CONFIG, "README.md": b"read", "consolidated.safetensors": b"twice"}
    folder = Path(place.locate("modelscope.cn/o/n")[0])
    for each in (folder, Path(place.locate("o/n")[0])):
        assert [path.name for path in each.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_bytes() == CONFIG
    assert {token for path, _, token in place.server.asked if "/v1/" in path} == {"Bearer ms-secret"}
    place.server.files = {"config.json": b"[]"}
    folder = Path(place.locate("modelscope.cn/o/n")[0])
    assert (folder / "config.json").read_bytes() == b"[]"
    place.server.files["sub/m-q4_k_m.gguf"] = b"none"
    assert "m-q4_k_m.gguf" in place.locate("modelscope.cn/o/n:Q4_K_M")[0]
    assert place.locate("modelscope.cn/o/n", HF_HUB_OFFLINE="1")[0] == str(folder)


@pytest.mark.parametrize("path", ["../../out.json", "/out.json"])
def test_a_hub_that_lists_paths_elsewhere(place: Place, path: str) -> None:
    place.server.files = {path: b"bad"}
    assert "the hub lists a file" in place.locate("modelscope.cn/o/n")[0]


def test_a_hub_without_a_hash() -> None:
    nothing: Any = None
    with pytest.raises(ModelError, match=r"the hub lists a file .a. with the hash None"):
        RemoteFile("a", 1, nothing, "")


def test_an_error_of_another_kind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> None:
        raise KeyError("Path")

    monkeypatch.setattr("pypto_serving.setup.locate.fetch_modelscope", fetch)
    with pytest.raises(ModelError, match=r"cannot be fetched: .*KeyError.*Path"):
        locate_model("modelscope.cn/o/n")


@pytest.mark.parametrize("name", [None, "bundled", "smollm2"])
def test_what_has_no_revisions_refuses_one(name: str | None) -> None:
    with pytest.raises(ModelError, match=r"revision is v2, but \w+ is .*, not a model of the hub; drop it"):
        locate_model(name, "v2")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_download_without_room(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fetch(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pypto_serving.setup.locate.fetch_modelscope", fetch)
    with pytest.raises(ModelError, match=f"cannot be fetched: {os.strerror(number).lower()}"):
        locate_model("modelscope.cn/o/n")


def test_names_of_the_list(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog()["qwen3"].name == "qwen3:8b" and catalog()["smollm2"].package
    place.locate("qwen3:0.6b")
    assert any("/Qwen/Qwen3-0.6B-GGUF/" in path for path, *_ in place.server.asked)
    place.server.files = {"m-q8_0.gguf": b"other"}
    assert "there is none with Q4_K_M in its name" in place.locate("o/n-GGUF")[0]
    assert "does not exist; give an existing folder" in place.locate("qwen3:nine")[0]
    for known in catalog().values():
        assert known.licence and (known.package or known.repo.count("/") == 1)
        assert 0.2 < known.file_bytes / known.parameters < 1.2


def test_models_lists_and_deletes(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hub's file counts together with what it was unpacked to."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    free = HostFacts(available_bytes=4 << 30, num_cpus=1)
    monkeypatch.setattr("pypto_serving.setup.host.read_host_facts", lambda: free)
    names = ("o/n-GGUF", "modelscope.cn/o/n-GGUF", str(tmp_path / "model.gguf"))
    unpacked = [Path(place.locate(name)[0]) for name in names]
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert sorted(model["name"] for model in listed["cached"]) == sorted(names)
    size = len(place.server.files["sub/m-q4_k_m.gguf"])
    assert all(size / 2 < model["num_bytes"] < 4 * size for model in listed["cached"]), (size, listed)
    fits = {model["name"]: model["fits"] for model in listed["known"]}
    assert fits["qwen3:0.6b"] and not fits["qwen3:8b"]
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "o/n-GGUF " in out and "qwen3:0.6b" in out and "4 GiB of memory is free" in out
    linked = tmp_path / "elsewhere"  # a user may have moved a model to another disk
    next((tmp_path / "hf/hub").glob("models--*")).rename(linked)
    (tmp_path / "hf/hub/models--o--n-GGUF").symlink_to(linked)
    for name, folder in zip(("hf.co/o/n-GGUF:Q4_K_M", *names[1:]), unpacked, strict=True):
        assert folder.exists() and main(["models", "rm", name]) == 0
        assert not folder.parent.exists()
    assert "deleted o/n-GGUF: " in capsys.readouterr().out
    assert main(["models", "rm", "o/n-GGUF"]) == 3 and "is not in the cache" in capsys.readouterr().err
