"""Name the option at fault when a backend's programs cannot do what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.types.config import UnmetError


@contextmanager
def options_named(options: Options) -> Iterator[None]:
    """Turn an UnmetError into a ConfigError that names the option as it was given."""
    try:
        yield
    except UnmetError as error:
        raise ConfigError(f"{options.label(error.name)} {error.problem}") from None
