"""Configure the HTTP server: options, and the sampling defaults of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.api.text.files import eos_token_ids, read_generation_config
from pypto_serving.errors import ConfigError, ModelError, RequestError, UnknownModelError
from pypto_serving.model.fields import Fields
from pypto_serving.types.config import ServerConfig
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.util import brief

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NEUTRAL = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "encoder_repetition_penalty": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling values for requests that leave them out; None means the default of SamplingParams.

    `max_tokens` applies only to chats; None means the rest of the context. `not_applied`: settings of
    generation_config.json that would change outputs but are not supported.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    not_applied: dict[str, Any] = {}

    def describe(self) -> str:
        """Return a line for the log at start."""
        values = ", ".join(f"{name} {value}" for name, value in self.effective().items())
        values += "" if self.max_tokens is None else f", max_tokens {self.max_tokens} in chats"
        lacking = ", ".join(f"{name} {value}" for name, value in self.not_applied.items())
        return f"default sampling: {values}" + (f"; not supported and not applied: {lacking}" if lacking else "")

    def given(self) -> dict[str, Any]:
        """Return the values that are set, by their names in SamplingParams."""
        return {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}

    def effective(self) -> dict[str, Any]:
        """Return the values for a request that leaves all of them out."""
        params = SamplingParams(**self.given())
        return {name: getattr(params, name) for name in SAMPLING_NAMES}


class ServingConfig(ServerConfig, frozen=True, kw_only=True):
    """Options of the HTTP server and of its model. Responses and metrics use the first of `served_model_names`.

    `model_dir` is "" for a model without files. `eos_token_ids` come from the model's files. `chat_template` is the
    path of a Jinja file that replaces the checkpoint's template. Raises ConfigError for an invalid value.
    """

    model_dir: str
    architecture: str = ""
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: DefaultSampling = DefaultSampling()

    @property
    def tokenizer_dir(self) -> str:
        """Return the folder of the tokenizer and the chat template."""
        return self.tokenizer or self.model_dir

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("the served model name is empty; give at least one name")
        if not all(map(str.strip, self.api_keys)):
            raise ConfigError("an API key is empty; give a key or leave the option out")

    def resolve_model(self, name: str | None) -> str:
        """Return the model name for the response. Raises UnknownModelError if `name` is not served."""
        if name is None or (self.any_model_name and name not in self.served_model_names):
            return self.served_model_names[0]
        if name not in self.served_model_names:
            names = ", ".join(repr(n) for n in self.served_model_names)
            raise UnknownModelError(
                f"the model {name[:200]!r} does not exist here; this server has: {names}", param="model"
            )
        return name

    def __repr__(self) -> str:
        return f"ServingConfig({self.model_dir!r}, {self.served_model_names!r})"  # never the keys


def default_sampling(generation: Fields) -> DefaultSampling:
    """Return the sampling defaults in generation_config.json. Raises ModelError if a value is not valid."""
    path = generation.source
    values = {name: value for name in SAMPLING_NAMES if (value := generation.get(name)) is not None}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
            raise ModelError(f"{path}: {name} is {value!r}, which is not a number; correct or remove it")
    max_tokens = generation.get("max_new_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ModelError(f"{path}: max_new_tokens is {brief(max_tokens)}, but must be a positive whole number; mend it")
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; correct or remove it") from error
    lacking = {name: value for name, off in _NEUTRAL.items() if (value := generation.get(name)) not in (None, off)}
    return DefaultSampling(**values, max_tokens=max_tokens, not_applied=lacking)


def serving_config(server: ServerConfig, model: ModelSpec) -> ServingConfig:
    """Make the options of the HTTP server from the resolved configuration and its model."""
    options = msgspec.structs.asdict(server)
    return load_serving_config(model.path, model.eos_token_ids, architecture=model.architecture, **options)


def load_serving_config(model_dir: str | Path, config_eos_ids: tuple[int, ...] = (), **options: Any) -> ServingConfig:
    """Make a ServingConfig with the defaults in the checkpoint's generation_config.json.

    `config_eos_ids` come from its config.json. Without a name in `options`, the folder names it. Raises ModelError.
    """
    options.setdefault("served_model_names", (Path(model_dir).resolve().name,))
    source, changes = options.get("generation_config", "auto"), options.get("override_generation_config") or {}
    generation = read_generation_config(model_dir if source in ("auto", "vllm") else source)
    path = f"{generation.source}{' with override-generation-config' if changes else ''}"
    own = {} if source == "vllm" else dict(generation.values)
    if changes.get("temperature") is not None:
        own.pop("do_sample", None)
    sampling = Fields(own | changes, path)
    generation = Fields({**generation.values, **changes}, path)
    options["eos_token_ids"] = eos_token_ids(generation, config_eos_ids) if str(model_dir) else ()
    options.setdefault("default_sampling", default_sampling(sampling))
    return ServingConfig(model_dir=str(model_dir), **options)
