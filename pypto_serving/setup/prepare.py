"""From options to a resolved configuration: read the model's files and this machine, then decide."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.kernels.library import runnable
from pypto_serving.setup.host import read_cache_dir, read_disk_facts, read_host_facts
from pypto_serving.setup.locate import locate_model
from pypto_serving.setup.options import Options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.types.model import ModelSpec

logger = logging.getLogger(__name__)

NULL_MODELS = ("plain", "deepseek_v4")


def prepare(options: Options, model: ModelSpec) -> Resolved:
    """Everything decided from the model's files and this machine."""
    template = options.chat_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"{options.label('chat_template')} is {template}, which is no file; give a Jinja file")
    kernels, torch = runnable(), importlib.util.find_spec("torch") is not None
    if not kernels and torch and not model.needs_torch and options.backend in (None, "cpu"):
        logger.warning(
            "this installation has no CPU kernels, because there was no C++ compiler: torch computes, several times "
            "slower; with a compiler, install again (after `make clean` in a checkout)"
        )
    kv_disk = read_disk_facts(Path(options.kv_disk)) if options.kv_disk else None
    facts = {"kernels": kernels, "torch": torch, "cache_dir": read_cache_dir(), "kv_disk": kv_disk}
    host = msgspec.structs.replace(read_host_facts(), **facts)
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
    from pypto_serving.model.null.spec import null_spec, plain_groups

    name = options.model or "plain"
    if options.block_size is None:
        return null_spec(name)
    if name != "plain":
        raise _no_block_size(options, name)
    return msgspec.structs.replace(null_spec(name), kv_groups=plain_groups(options.block_size))


def _no_block_size(options: Options, name: str) -> ConfigError:
    return ConfigError(f"{options.label('block_size')} cannot be chosen for {name}, whose groups have their own")
