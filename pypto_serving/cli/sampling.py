"""Sampling flags that `generate` and `chat` share. A flag that is not given is the model's own default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.types.sampling import SamplingParams

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM

PANEL = "Sampling"


def _flag(kind: Any, help_text: str) -> Any:
    return Annotated[kind, typer.Option(help=help_text, rich_help_panel=PANEL)]


FLAGS = {
    "temperature": _flag(float | None, "Sampling temperature; 0 always takes the most likely token."),
    "top_p": _flag(float | None, "Sample from the most likely tokens whose probabilities sum to this."),
    "top_k": _flag(int | None, "Sample from this many of the most likely tokens."),
    "min_p": _flag(float | None, "Minimum probability, relative to the most likely token."),
    "frequency_penalty": _flag(float | None, "Penalty of a token for each time that the answer has it, from -2 to 2."),
    "presence_penalty": _flag(float | None, "Penalty of a token that the answer has, from -2 to 2."),
    "repetition_penalty": _flag(float | None, "Divides the logits of tokens of prompt and answer; 1 turns it off."),
    "max_tokens": _flag(int | None, "Maximum tokens in the answer."),
    "stop": _flag(list[str] | None, "Text that ends the answer; may repeat."),
}


def takes_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling flags; it receives the values that were given as `sampling: dict[str, Any]`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(sampling=_checked({name: values.pop(name) for name in FLAGS}), **values)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "sampling"]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in FLAGS.items()
    ]
    run.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
    return run


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were given; raise ConfigError that names the flag of a wrong one."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    try:
        SamplingParams(**given)
    except RequestError as error:
        name = error.param or ""
        message = str(error).removeprefix(name)
        raise ConfigError(f"--{name.replace('_', '-')}{message}") from None
    return given


def read_value(name: str, text: str) -> Any:
    """Read the value of the option `name`; raise ConfigError for a wrong one."""
    kinds: dict[str, Callable[[str], Any]] = {"top_k": int, "max_tokens": int, "stop": lambda text: [text]}
    try:
        value = kinds.get(name, float)(text)
        SamplingParams(**{name: value})
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, but must be a number") from None
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return value


def sampling_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """Make the parameters: values `given`, then the model's own defaults; without `max_tokens`, up to its own end."""
    return msgspec.structs.replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
