"""Sampling flags that `generate` and `chat` share. A flag that is not given is the model's own default."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.types.model import ModelSpec
from pypto_serving.types.sampling import SamplingParams

PANEL = "Sampling"

Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature; 0 always takes the most likely token.", rich_help_panel=PANEL),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens whose probabilities sum to this.", rich_help_panel=PANEL),
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from this many of the most likely tokens.", rich_help_panel=PANEL)
]
MinP = Annotated[
    float | None, typer.Option(help="Minimum probability, relative to the most likely token.", rich_help_panel=PANEL)
]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum tokens in the answer.", rich_help_panel=PANEL)]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may repeat.", rich_help_panel=PANEL)]


def given_sampling(**values: Any) -> dict[str, Any]:
    """Check the values that were given; raise ConfigError that names the flag."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    try:
        SamplingParams(**given)
    except RequestError as error:
        name = error.param or ""
        message = str(error).removeprefix(name)
        raise ConfigError(f"--{name.replace('_', '-')}{message}") from None
    return given


def sampling_params(model: ModelSpec, given: dict[str, Any]) -> SamplingParams:
    """Make the parameters: values `given`, then the model's own defaults; without `max_tokens`, up to its own end."""
    from pypto_serving.api.settings import load_default_sampling

    return SamplingParams(**{"max_tokens": None, **load_default_sampling(model.path).given(), **given})
