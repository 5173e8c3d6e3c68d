"""Run the command `generate`: continue prompts without a server."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import to_builtins

from pypto_serving.cli import terminal
from pypto_serving.cli.options import ENGINE_PANELS, sampling_params, takes_options, takes_sampling
from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM, GenerationOutput


DEFAULT_MAX_TOKENS = 128


@takes_options(*ENGINE_PANELS, model_argument=False)
@takes_sampling
def generate(
    options: Options,
    sampling: dict[str, Any],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="Prompts to continue; by default the lines of stdin."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Answer each prompt as a user's message.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
) -> None:
    """Continue prompts with --model, by default the bundled one, and print the outputs in order."""
    texts = prompts or _read_prompts()
    if options.seed is not None:
        sampling["seed"] = options.seed
    with local_model(options) as llm:
        params = sampling_params(llm, {"max_tokens": None if chat else DEFAULT_MAX_TOKENS, **sampling})
        if chat:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params)
        else:
            outputs = llm.generate(texts, params)
        for text, output in zip(texts, outputs, strict=True):
            terminal.write(jsonlib.dumps(_as_json(text, output)) if json else _as_text(output), newline=True)


@contextmanager
def local_model(options: Options) -> Iterator[LLM]:
    """Open an LLM with `options`, and stop its engine at the end of the block."""
    from pypto_serving.cli.serve import configure_logging
    from pypto_serving.offline.llm import LLM
    from pypto_serving.setup.option_table import QUIET_DEFAULTS
    from pypto_serving.setup.prepare import model_spec

    spec = model_spec(options)
    configure_logging(options, QUIET_DEFAULTS)
    if sys.stderr.isatty():
        typer.echo(f"loading {spec.path or 'the null model'}", err=True)
    with LLM.from_options(options, spec) as llm:
        yield llm


def _read_prompts() -> list[str]:
    """Read one prompt per line of a pipe. Raises ConfigError if there is none."""
    texts = [] if sys.stdin.isatty() else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise ConfigError("there is no prompt; give PROMPT... or pipe one prompt per line")
    return texts


def _as_text(output: GenerationOutput) -> str:
    """Return the answer; print its reasoning to stderr, so that it does not enter a pipe."""
    choice = output.outputs[0]
    if choice.reasoning:
        terminal.write(choice.reasoning, to_stderr=True, dim=True, newline=True)
    return choice.text


def _as_json(text: str, output: GenerationOutput) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "prompt": text,
        "text": choice.text,
        **({"reasoning": choice.reasoning} if choice.reasoning else {}),
        **({"tool_calls": [to_builtins(call) for call in choice.tool_calls]} if choice.tool_calls else {}),
        "finish_reason": choice.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(choice.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
