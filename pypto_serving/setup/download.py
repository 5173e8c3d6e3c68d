"""Fetch files of a model from a hub: downloads go on after an interruption, and are checked by size and hash.

Files lie in the hub cache's form: `blobs/HASH`, and `snapshots/COMMIT/PATH`, which are links to these.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pypto_serving.errors import ModelError
from pypto_serving.util import brief, hash128

_PIECE = 1 << 20
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64
_LIST_TIMEOUT_S = 30.0
MODELSCOPE = "modelscope.cn"
UNWANTED = "*consolidated*.safetensors"
"""The same weights again, for Mistral's own tools."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on a hub. hash: its SHA-256, or for small files of git its SHA-1 as a blob of git, in hex digits."""

    path: str
    size: int
    hash: str
    url: str

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(str(self.hash)) or ".." in Path(self.path).parts or Path(self.path).is_absolute():
            raise ModelError(f"the hub lists a file {brief(self.path)} with the hash {brief(self.hash)}")

    def fetch(self, blobs: Path, headers: Mapping[str, str]) -> None:
        """Download into the folder `blobs` what is not there yet. Of several processes, one does.

        Raises ModelError if size or hash are not those that the hub lists, and the errors of the hub's client.
        """
        from huggingface_hub.file_download import http_get

        target = blobs / self.hash
        if target.exists():
            return
        blobs.mkdir(parents=True, exist_ok=True)
        part = blobs / f"{self.hash}.part"
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if target.exists():
                return
            if file.tell() > self.size:
                file.truncate(0)
            if (at := file.seek(0, os.SEEK_END)) < self.size:
                http_get(self.url, file, resume_size=at, headers=dict(headers), displayed_filename=self.path)
            file.flush()
            if (size := file.tell()) != self.size:
                file.truncate(0)
                raise ModelError(f"{self.path} has {size} bytes, but the hub lists {self.size}; try again, or later")
            if (found := self._hash_of(part)) != self.hash:
                file.truncate(0)
                raise ModelError(f"{self.path} was damaged on its way: its hash is {found}, not {self.hash}; try again")
            part.rename(target)

    def _hash_of(self, path: Path) -> str:
        if len(self.hash) == _SHA256_DIGITS:
            total = hashlib.sha256()
        else:
            total = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                total.update(piece)
        return total.hexdigest()


def fetch_hub_files(name: str, revision: str | None, patterns: Sequence[str]) -> None:
    """Put the files of a hub model that fit `patterns` into the hub's cache.

    The hub's own client, which links them into a snapshot, starts a file anew after an interruption, and checks no
    hashes. Where the hub lists no hashes, that is left to its client.
    """
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except Exception:
        return
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    headers = build_hf_headers()
    for file in found:
        path, hash = file.rfilename, file.blob_id if file.lfs is None else file.lfs.sha256
        if hash and file.size is not None and _fits(path, patterns):
            RemoteFile(path, file.size, hash, hf_hub_url(name, path, revision=revision)).fetch(blobs, headers)


def fetch_modelscope(name: str, revision: str | None, patterns: Sequence[str], cache: Path) -> Path:
    """Return a folder in `cache` with the files of a ModelScope model that fit `patterns`; fetch missing ones.

    Without network, the files are those of the last time that the same were asked for. Raises ModelError, and the
    errors of the HTTP client.
    """
    root, revision = cache / MODELSCOPE / name, revision or "master"
    reference = root / "refs" / hash128(repr((revision, *patterns)).encode()).hex()
    try:
        files = [file for file in _list_modelscope(name, revision) if _fits(file.path, patterns)]
    except Exception:
        with suppress(FileNotFoundError):
            return root / "snapshots" / reference.read_text()
        raise
    snapshot = hash128(repr([(file.path, file.hash) for file in files]).encode()).hex()
    for file in files:
        file.fetch(root / "blobs", _modelscope_headers())
        link = root / "snapshots" / snapshot / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(root / "blobs" / file.hash)
    if not files:
        raise ModelError(f"{name} on {MODELSCOPE} has no such files: {', '.join(patterns)}")
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(snapshot)
    return root / "snapshots" / snapshot


def _list_modelscope(name: str, revision: str) -> list[RemoteFile]:
    """List the files of a model; raises ModelError if there is none. See ModelScope's client for the form."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled("no request is sent")
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT", f"https://{MODELSCOPE}").rstrip("/")
    where = f"{endpoint}/api/v1/models/{name}/repo"
    query = urlencode({"Revision": revision, "Recursive": "true"})
    answer = get_session().get(f"{where}/files?{query}", headers=_modelscope_headers(), timeout=_LIST_TIMEOUT_S)
    body: Any = answer.json() if answer.status_code != HTTPStatus.NOT_FOUND else {}
    listed = (body.get("Data") or {}).get("Files")
    if not listed:
        why = body.get("Message") or f"it answered {answer.status_code}"
        raise ModelError(f"{MODELSCOPE} has no files of {name} at the revision {revision}: {why}")
    return [
        RemoteFile(
            file["Path"],
            file["Size"],
            file["Sha256"],
            f"{where}?{urlencode({'Revision': revision, 'FilePath': file['Path']})}",
        )
        for file in listed
        if file["Type"] == "blob"
    ]


def _modelscope_headers() -> dict[str, str]:
    token = os.environ.get("MODELSCOPE_API_TOKEN")
    return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return not fnmatchcase(path, UNWANTED) and any(fnmatchcase(path, pattern) for pattern in patterns)
