"""A model in this process's own engine, for commands that need no server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from pypto_serving.setup.options import Options
from pypto_serving.setup.rules import RULES
from pypto_serving.types.model import ModelSpec

if TYPE_CHECKING:
    from pypto_serving.api.offline import LLM


@contextmanager
def local_model(options: Options) -> Iterator[tuple[LLM, ModelSpec]]:
    """An LLM as `options` ask for, and what is known about its model; ends the engine afterwards."""
    from pypto_serving.api.offline import LLM
    from pypto_serving.cli.serve import configure_logging
    from pypto_serving.setup.prepare import model_spec

    quiet = {} if options.log_level else {"log_level": "warning"}
    given = {name: getattr(options, name) for name in RULES if getattr(options, name) is not None}
    spec = model_spec(options)
    configure_logging(options.log_level or "warning")
    if sys.stderr.isatty():
        typer.echo(f"loading {spec.path or 'the null model'}", err=True)
    with LLM(**{**given, **quiet}) as llm:
        yield llm, spec
