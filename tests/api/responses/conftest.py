"""A server whose model says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.anthropic.talking import TEMPLATE
from tests.api.checkpoint import write_checkpoint
from tests.api.conftest import NAMES, new_engine
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

MAX_MODEL_LEN = 1 << 15


@pytest.fixture(scope="package")
def thinking_server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("thinking"), template=TEMPLATE)
    serving = load_serving_config(folder, served_model_names=NAMES)
    server = RunningServer(new_engine(tokenizer, max_model_len=MAX_MODEL_LEN), serving)
    yield server
    server.stop()


@pytest.fixture
def thinks(thinking_server: RunningServer, tokenizer: Tokenizer) -> Iterator[Callable[..., RunningServer]]:
    """The server, whose model says `text`."""

    def think(text: str, finish: str = "stop", cached: int = 0) -> RunningServer:
        thinking_server.engine.script = lambda request: Script(tokenizer.encode(text), finish, cached=cached)
        return thinking_server

    yield think
    thinking_server.wait_idle()
    thinking_server.engine.requests.clear()
    thinking_server.engine.aborted.clear()
