"""Run a model in this process's own engine, for commands that need no server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from pypto_serving.setup.options import Options

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM


@contextmanager
def local_model(options: Options) -> Iterator[LLM]:
    """Open an LLM as `options` ask for, and end its engine afterwards."""
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
