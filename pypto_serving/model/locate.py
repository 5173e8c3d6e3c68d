"""From what the user calls a model to a folder, and from there to a resolved configuration."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec

from pypto_serving.config import Resolved, resolve
from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.host import read_cache_dir, read_disk_facts, read_host_facts
from pypto_serving.kernels.library import runnable
from pypto_serving.options import Options
from pypto_serving.types.model import ModelSpec

logger = logging.getLogger(__name__)

BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "bundled"
NULL_MODELS = ("plain", "deepseek_v4")
WANTED_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "encoding/encoding_*.py"]
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def prepare(options: Options, model: ModelSpec) -> Resolved:
    """Everything decided from the model's files and this machine."""
    template = options.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"{options.label('chat_template')} is {template}, which is no file; give a Jinja file")
    kernels = runnable()
    if not kernels and not model.needs_torch and options.backend in (None, "cpu"):
        logger.warning(
            "this installation has no CPU kernels, because there was no C++ compiler: torch computes, several times "
            "slower; with a compiler, install again (after `make clean` in a checkout)"
        )
    kv_disk = read_disk_facts(Path(options.kv_disk)) if options.kv_disk else None
    host = msgspec.structs.replace(read_host_facts(), kernels=kernels, cache_dir=read_cache_dir(), kv_disk=kv_disk)
    resolved = resolve(options, model, host)
    for warning in resolved.warnings:
        logger.warning(warning)
    return resolved


def model_spec(options: Options) -> ModelSpec:
    """What is known about the model that `options` name; fetches its files if need be."""
    if options.backend == "null" and options.model in (None, *NULL_MODELS):
        return _null_spec(options)
    from pypto_serving.model.registry import DEFAULT_BLOCK_SIZE, load_spec

    path = locate_model(options.model)
    spec = load_spec(path, dtype=options.dtype or "auto", block_size=options.block_size or DEFAULT_BLOCK_SIZE)
    if spec.own_blocks and options.block_size is not None:
        raise _no_block_size(options, str(path))
    return spec


def _null_spec(options: Options) -> ModelSpec:
    from pypto_serving.backend.null import null_spec, plain_groups

    name = options.model or "plain"
    if options.block_size is None:
        return null_spec(name)
    if name != "plain":
        raise _no_block_size(options, name)
    return msgspec.structs.replace(null_spec(name), kv_groups=plain_groups(options.block_size))


def _no_block_size(options: Options, name: str) -> ConfigError:
    return ConfigError(f"{options.label('block_size')} cannot be chosen for {name}, whose groups have their own")


def locate_model(name: str | None) -> Path:
    """The folder of a model: the bundled one for None, a folder here, or one fetched from the hub by name."""
    if name is None:
        if not (BUNDLED / "config.json").exists():
            raise ModelError("this installation has no bundled model; give MODEL, a folder or a hub name")
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
    """The local copy of hub model `name`; shows a progress bar while files are fetched."""
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
