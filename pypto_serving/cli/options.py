"""Flags shared by several commands: flags of options, whose values become `Options`, and flags of sampling."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pypto_serving.errors import ConfigError, RequestError
from pypto_serving.setup.option_table import BATCHING, DEVICE, KV, MODEL, SERVER, TABLE
from pypto_serving.setup.options import KEY_FILE, flag, make_options, read_keys
from pypto_serving.setup.rules import Option
from pypto_serving.setup.vllm_options import SHORT_FLAGS, VLLM_ONLY
from pypto_serving.types.sampling import SamplingParams

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM


ENGINE_PANELS = (MODEL, BATCHING, KV, DEVICE)
ALL_PANELS = (MODEL, SERVER, BATCHING, KV, DEVICE)

CHECKPOINT = "Folder or hub name of a checkpoint."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{CHECKPOINT} (default: the bundled one)")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML or JSON with these options; flags win.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with an API key on each line; SIGHUP reads it again.", rich_help_panel=SERVER
    ),
]


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def takes_options(*panels: str, also: Sequence[str] = (), model_argument: bool = True) -> Decorator:
    """Give a command the flags of `panels` and the options `also`; it receives their values as `options: Options`."""
    return _giving("options", list(_parameters(panels, also, model_argument)), _make)


def _giving(name: str, parameters: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]) -> Decorator:
    """Replace a command's parameter `name` by `parameters`, from whose values `make` computes it."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = make({p.name: values.pop(p.name) for p in parameters})
            command(**{name: made}, **values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != name]
        run.__signature__ = inspect.Signature([*parameters, *kept])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, *kept)}
        return run

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameters(panels: Iterable[str], also: Sequence[str], model_argument: bool) -> Iterable[inspect.Parameter]:
    if model_argument:
        yield _parameter("model_argument", ModelArgument)
    yield _parameter("config", ConfigFile)
    for row in TABLE:
        if row.panel in panels or row.name in also:
            alone = row.name == "model" and not model_argument
            yield _parameter(row.name, _annotation(row._replace(help=CHECKPOINT) if alone else row))
            if row.vllm:
                yield _hidden(row.vllm, row.rule.is_switch)
            if row.alias in SHORT_FLAGS:
                yield _parameter(row.alias, Annotated[str | None, typer.Option(SHORT_FLAGS[row.alias], hidden=True)])
    yield from itertools.starmap(_hidden, VLLM_ONLY.items())
    if SERVER in panels:
        yield _parameter(KEY_FILE, KeyFile)


def _hidden(name: str, is_switch: bool) -> inspect.Parameter:
    """Return the parameter of an option of vLLM, which help does not show."""
    names = [f"--{flag(name)}/--no-{flag(name)}" if is_switch else f"--{flag(name)}"]
    short = [SHORT_FLAGS[name]] if name in SHORT_FLAGS else []
    return _parameter(
        name, Annotated[bool | None if is_switch else str | None, typer.Option(*names, *short, hidden=True)]
    )


def _annotation(row: Option) -> Any:
    names = ["--" + flag(row.name), *(["--" + flag(row.alias)] if row.alias else [])]
    shown: dict[str, Any] = {"help": row.help_text, "rich_help_panel": row.panel}
    if row.rule.is_switch:
        if row.rule.kind == "switch":
            names[0] += f"/--no-{flag(row.name)}"
        return Annotated[bool | None, typer.Option(*names, **shown)]
    if names_of_rule := row.rule.names:
        shown["autocompletion"] = lambda incomplete: [each for each in names_of_rule if each.startswith(incomplete)]
    kind = list[str] | None if row.rule.kind == "texts" else str | None
    return Annotated[kind, typer.Option(*names, metavar=row.metavar, **shown)]


def _make(values: dict[str, Any]) -> Any:
    argument = values.pop("model_argument", None)
    config, key_file = values.pop("config", None), values.pop(KEY_FILE, None)
    if argument is not None:
        if values.get("model") not in (None, argument):
            raise ConfigError(f"MODEL is {argument}, but --model is {values['model']}; give one of them")
        values["model"] = argument
    given = {name: value for name, value in values.items() if value is not None and value != []}
    if key_file is not None:
        if "api_key" in given:
            raise ConfigError("--api-key and --api-key-file are both given; drop one")
        given |= {"api_key": read_keys(key_file, "--api-key-file"), KEY_FILE: str(key_file)}
    environment = os.environ if "api_key" in values else None  # only commands that start a server need a key
    if config is None:
        return make_options(given, environment=environment)
    from pypto_serving.cli.config_file import read_config  # yaml takes time to import

    return make_options(given, read_config(config), config.name, environment=environment)


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
    flags = [_parameter(name, annotation) for name, annotation in FLAGS.items()]
    return _giving("sampling", flags, _checked)(command)


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were given. Raises ConfigError that names the flag of an invalid value."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    try:
        SamplingParams(**given)
    except RequestError as error:
        name = error.param or ""
        message = str(error).removeprefix(name)
        raise ConfigError(f"--{name.replace('_', '-')}{message}") from None
    return given


def read_value(name: str, text: str) -> Any:
    """Parse a value of the option `name`. Raises ConfigError if it is invalid."""
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
    """Make parameters: `given` values, else the model's defaults. Without `max_tokens`, answers have no limit."""
    return msgspec.structs.replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
