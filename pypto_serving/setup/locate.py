"""Find the folder of a model: the bundled one, a local folder, or one from the hub."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from http import HTTPStatus
from pathlib import Path

from pypto_serving.errors import ModelError

BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "bundled"
WANTED_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "encoding/encoding_*.py"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def locate_model(name: str | None, revision: str | None = None) -> Path:
    """Return the folder of model `name`; if it is not a folder here, fetch it from the hub, at `revision`.

    The bundled model is None, or "bundled" unless a folder has that name.
    """
    if name is None or (name == BUNDLED.name and not Path(name).exists()):
        if not (BUNDLED / "config.json").exists():
            raise ModelError("this installation has no bundled model; name one: a folder or a hub name")
        return BUNDLED
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # ~NAME without a user NAME
        path = path.expanduser()
    try:
        if path.is_dir():
            if revision is not None:
                raise ModelError(f"revision is {revision}, but {name} is a folder, not a model of the hub; drop it")
            return path.resolve()
        if path.exists():
            raise ModelError(f"{name} is a file; give the folder that holds config.json")
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ModelError(f"{name} cannot be opened: {reason}; give an existing folder or a hub name") from None
    if not HUB_NAME.fullmatch(name):
        raise ModelError(f"{name} does not exist; give an existing folder or a hub name such as owner/name")
    return _fetch(name, revision)


def _fetch(name: str, revision: str | None) -> Path:
    """Fetch hub model `name` with a progress bar, and return its local copy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    offline = "give the folder of a local copy instead"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED_FILES))
    except GatedRepoError:
        raise ModelError(f"{name} is gated; ask for access and run `hf auth login`, or {offline}") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{name} is neither a folder here nor a model on the hub, unless a private one; correct the name, run "
            f"`hf auth login` if it is private, or {offline}"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision}; give a branch, a tag or a commit of it") from None
    except HFValidationError:
        raise ModelError(f"{name} is no folder here, and no name that the hub allows; {offline}") from None
    except Exception as error:
        raise ModelError(
            f"{name} is no folder here, is not in the local cache, and cannot be fetched: {_why_not(error)}; {offline}"
        ) from error


def _why_not(error: BaseException) -> str:
    """Return why fetching failed: the hub's answer, the system's error, or the network."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__
    for each in chain:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"it is not permitted (the hub answered {status})"
        if status == HTTPStatus.NOT_FOUND:
            return "the hub does not have it"
        if status is not None:
            return f"the hub answered {status}"
        if isinstance(each, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set"
        if isinstance(each, OSError) and each.strerror and (each.filename is not None or each.errno == errno.ENOSPC):
            place = "" if each.filename is None else f"{each.filename}: "
            return place + each.strerror.lower()
    return "there is no network, or the hub cannot be reached"
