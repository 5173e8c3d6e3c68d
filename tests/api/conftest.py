"""One shared server per module, whose script each test sets, and a factory for special ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.checkpoint import TEXT, write_checkpoint
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script, ScriptedEngine, engine_config

NAMES = ("tiny", "tiny-alias")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def new_engine(tokenizer: Tokenizer, **config: Any) -> ScriptedEngine:
    tokens = tokenizer.encode(TEXT)
    return ScriptedEngine(engine_config(tokenizer.raw.get_vocab_size(), **config), lambda request: Script(tokens))


@pytest.fixture(scope="module")
def shared_server(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    serving = load_serving_config(checkpoint, served_model_names=NAMES, max_body_bytes=100_000)
    server = RunningServer(new_engine(tokenizer), serving)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: RunningServer, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    """The shared server with a fresh script and empty records."""
    engine, fresh = shared_server.engine, new_engine(tokenizer)
    engine.script, engine.refusal, engine.state, engine.seed = fresh.script, None, fresh.state, 0
    engine.requests.clear()
    engine.aborted.clear()
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def start(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[Callable[..., RunningServer]]:
    """Start a server with its own options; `config` changes the engine's configuration."""
    servers = []

    def start_one(
        folder: Path = checkpoint,
        config: dict[str, Any] | None = None,
        drain_timeout_s: float = 5.0,
        listening: dict[str, Any] | None = None,
        **options: Any,
    ) -> RunningServer:
        options.setdefault("served_model_names", NAMES)
        engine = new_engine(tokenizer, **(config or {}))
        servers.append(
            RunningServer(engine, load_serving_config(folder, **options), drain_timeout_s, **(listening or {}))
        )
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def chat_server(checkpoint: Path, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    serving = load_serving_config(checkpoint, served_model_names=NAMES, trust_request_chat_template=True)
    server = RunningServer(new_engine(tokenizer, max_model_len=8192), serving)
    yield server
    server.stop()


@pytest.fixture
def says(chat_server: RunningServer, tokenizer: Tokenizer) -> Callable[..., RunningServer]:
    """A server whose model says `text` and stops."""

    def say(text: str, finish: str = "stop") -> RunningServer:
        chat_server.engine.script = lambda request: Script(tokenizer.encode(text), finish)
        return chat_server

    return say
