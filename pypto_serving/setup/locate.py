"""Find the folder of a model: the bundled one, a local folder, or one from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from pypto_serving.errors import ModelError

BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "bundled"
WANTED_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "encoding/encoding_*.py"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def locate_model(name: str | None) -> Path:
    """Return the folder of model `name`, fetched from the hub if it is no folder here; None is the bundled model."""
    if name is None:
        if not (BUNDLED / "config.json").exists():
            raise ModelError("this installation has no bundled model; name one: a folder or a hub name")
        return BUNDLED
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"{name} is a file; give the folder that holds config.json")
    if not HUB_NAME.fullmatch(name):
        raise ModelError(f"{name} does not exist; give an existing folder or a hub name such as owner/name")
    return _fetch(name)


def _fetch(name: str) -> Path:
    """Fetch hub model `name` with a progress bar, and return its local copy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    offline = "give the folder of a local copy instead"
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED_FILES))
    except GatedRepoError:
        raise ModelError(f"{name} is gated; ask for access and run `hf auth login`, or {offline}") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{name} is neither a folder here nor a model on the hub; {offline}") from None
    except Exception as error:
        raise ModelError(
            f"{name} is no folder here, is not in the local cache, and cannot be fetched "
            f"({type(error).__name__}); without network, {offline}"
        ) from error
