"""The Messages API of a real server, with the official clients for Python and Node."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest
from anthropic.types import MessageParam

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
QUESTION: MessageParam = {"role": "user", "content": "What is 3+4?"}
SCRIPT = Path(__file__).parent / "messages.mjs"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def test_answers_are_cached_and_counted(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    system = "Add numbers. " * 30
    counted = client.messages.count_tokens(model="bundled", system=system, messages=[QUESTION]).input_tokens
    filled = client.messages.create(model="bundled", max_tokens=0, system=system, messages=[QUESTION])
    assert (filled.content, filled.stop_reason, filled.usage.input_tokens) == ([], "max_tokens", counted)
    answer = client.messages.create(model="bundled", max_tokens=30, system=system, messages=[QUESTION])
    cached = answer.usage.cache_read_input_tokens or 0
    assert cached > counted // 2 and cached + answer.usage.input_tokens == counted
    with client.messages.stream(model="bundled", max_tokens=30, system=system, messages=[QUESTION]) as stream:
        text = stream.get_final_text()
    assert text == "".join(block.text for block in answer.content if block.type == "text")


@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node: install Debian's packages nodejs and npm")
def test_the_client_for_node(server: Server, tmp_path: Path) -> None:
    install = [
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--prefix",
        str(tmp_path),
        "@anthropic-ai/sdk@1",
    ]
    if subprocess.run(install, capture_output=True, timeout=120).returncode:
        pytest.skip(
            "npm cannot fetch @anthropic-ai/sdk: it needs a registry, npm's own or one of `npm config set registry`"
        )
    script = shutil.copy(SCRIPT, tmp_path)
    done = subprocess.run(["node", script, server.url], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr
