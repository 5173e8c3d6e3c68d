"""Servers of these tests keep what they cache in a folder of their own; one server and one LLM serve several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pypto_serving import LLM
from tests.e2e.server import Server


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package")
def bundled_server(own_cache: None) -> Iterator[Server]:
    """The bundled model with default options, as `make serve` runs it; tests leave it running and idle."""
    with Server() as running:
        yield running


@pytest.fixture(scope="package")
def bundled_llm(own_cache: None) -> Iterator[LLM]:
    """The bundled model offline, with room for long chats."""
    with LLM(max_model_len=4096, log_level="warning") as model:
        yield model
