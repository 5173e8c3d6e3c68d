"""Sampling flags that `generate` and `chat` share; what is not given is the model's own default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.sampling import SamplingParams

if TYPE_CHECKING:
    from pypto_serving.api.settings import DefaultSampling

PANEL = "Sampling"

Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.", rich_help_panel=PANEL)]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the likeliest tokens of this mass.", rich_help_panel=PANEL)
]
TopK = Annotated[int | None, typer.Option(help="Sample from this many likeliest tokens.", rich_help_panel=PANEL)]
MinP = Annotated[float | None, typer.Option(help="Least probability, as a share of the best.", rich_help_panel=PANEL)]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer.", rich_help_panel=PANEL)]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may repeat.", rich_help_panel=PANEL)]


def given_sampling(**values: Any) -> dict[str, Any]:
    """The values that were given, checked; raises ConfigError naming the flag."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    try:
        SamplingParams(**given)
    except RequestError as error:
        name = error.param or ""
        message = str(error).removeprefix(name)
        raise ConfigError(f"--{name.replace('_', '-')}{message}") from None
    return given


def default_sampling(model: ModelSpec) -> DefaultSampling:
    """The sampling defaults of the checkpoint's generation_config.json."""
    from pypto_serving.api.settings import DefaultSampling, load_default_sampling

    return load_default_sampling(model.path) if model.path else DefaultSampling()


def sampling_params(model: ModelSpec, given: dict[str, Any]) -> SamplingParams:
    """What was given over the model's own defaults; without a number of tokens, up to the model's own end."""
    return SamplingParams(**{"max_tokens": None, **default_sampling(model).given(), **given})
