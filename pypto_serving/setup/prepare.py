"""Prepare a start: read the model's files and facts about this machine, then resolve the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.model.null_models import NULL_MODELS, null_spec
from pypto_serving.model.registry import CheckpointConfig, Serving, read_config
from pypto_serving.setup.compute import given_speculation
from pypto_serving.setup.host import raise_file_limit, read_host_facts
from pypto_serving.setup.locate import locate_model, locate_tokenizer
from pypto_serving.setup.option_table import DEFAULTS
from pypto_serving.setup.options import Options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.types.model import Contents, ModelSpec

logger = logging.getLogger(__name__)


def prepare(
    options: Options, model: ModelSpec, defaults: Mapping[str, Any] = DEFAULTS, serves: bool = True
) -> Resolved:
    """Resolve the configuration for `model` on this machine, and log the warnings. Increase the limit of open files.

    See `resolve` for `defaults` and `serves`. Raises ConfigError or ModelError.
    """
    raise_file_limit()
    template = options.chat_template
    if template is not None and not _is_file(template):
        raise options.refusal("chat_template", f"is {template}, which is no file; give a Jinja file")
    generation = options.generation_config
    if generation not in (None, "auto", "vllm") and not _is_file(f"{generation}/generation_config.json"):
        allowed = "auto, vllm or a folder with a generation_config.json"
        raise options.refusal("generation_config", f"is {generation}, but must be {allowed}")
    backend = BACKEND_DEFAULTS[options.backend or defaults["backend"]]
    host = read_host_facts(kv_disk=options.kv_disk, cards=backend.cards)
    if not host.kernels and host.torch and not model.needs_torch and backend.cpu_kernels:
        logger.warning(
            "this installation has no CPU kernels, because there was no C++ compiler: torch computes, several times "
            "slower; with a compiler, install again (after `make clean` in a checkout)"
        )
    resolved = resolve(options, model, host, defaults, serves)
    if options.notes:
        logger.warning("options of vLLM: %s", ", ".join(options.notes))
    for warning in resolved.warnings:
        logger.warning(warning)
    return resolved


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # the name is too long, or the folder is inaccessible
        return False


def model_spec(options: Options) -> ModelSpec:
    """Read the facts for the engine about the model that `options` name; fetch its files if necessary."""
    return _spec(options, _checkpoint(options))


def model_contents(options: Options) -> tuple[ModelSpec, Contents | None]:
    """Return the result of `model_spec`, and the contents of the model's files; None for a model without files."""
    config = _checkpoint(options)
    return _spec(options, config), None if config is None else config.contents()


def _checkpoint(options: Options) -> CheckpointConfig | None:
    """Read the model's config.json; None for a null model, which has no files."""
    if options.backend == "null" and options.model in (None, *NULL_MODELS):
        return None
    return read_config(locate_model(options.model, options.revision), options.hf_overrides)


def _spec(options: Options, config: CheckpointConfig | None) -> ModelSpec:
    if config is None:
        name = options.model or NULL_MODELS[0]
        spec = null_spec(name, options.block_size or DEFAULTS["block_size"])
    else:
        name, drafting = config.directory, given_speculation(options)
        given = {field.name: getattr(options, field.name, None) for field in fields(Serving)}
        given["drafts"] = drafting is not None and drafting.method == "mtp"
        spec = config.spec(Serving(**{name: value for name, value in given.items() if value is not None}))
    if spec.own_blocks and options.block_size is not None:
        raise options.refusal("block_size", f"cannot be chosen for {name}, whose groups have their own; drop it")
    tokenizer = "" if options.tokenizer in (None, options.model) else str(locate_tokenizer(options.tokenizer))
    return msgspec.structs.replace(spec, tokenizer=tokenizer, hf_overrides=options.hf_overrides or {})
