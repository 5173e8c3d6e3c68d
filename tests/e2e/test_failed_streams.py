"""Streams of each API whose generation fails for good, as official clients see them."""

from __future__ import annotations

import os
from pathlib import Path

import anthropic
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.checkpoints import make_checkpoint
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
NUM_TOKENS = 30_000
"""More than can be computed before the worker dies."""


def test_clients_are_told_that_an_answer_fails(tmp_path: Path) -> None:
    """The worker dies, and the files of the model are others by then. The next request is answered."""
    model = make_checkpoint(tmp_path / "model", dtype="bfloat16", eos_token_id=319, max_position_embeddings=32768)
    with Server(model, "--served-model-name", "tiny", "--kv-memory", "128MiB") as server:
        worker = server.worker()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        response = client.responses.create(
            model="tiny", input="hello", stream=True, max_output_tokens=NUM_TOKENS, temperature=0
        )
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            max_completion_tokens=NUM_TOKENS,
            temperature=0,
        )
        message = other.messages.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            max_tokens=NUM_TOKENS,
            extra_body={"temperature": 0},
        )
        for stream in (response, chat, message):
            assert next(iter(stream))
        os.utime(model / "model.safetensors", (0, 0))
        worker.kill()
        with pytest.raises(openai.APIError, match="files changed") as refused:
            list(chat)
        assert refused.value.code == "model_changed"
        with pytest.raises(anthropic.APIStatusError, match="files changed"):
            list(message)
        failed = failed_response(list(response))
        answered = client.responses.create(model="tiny", input="hello", max_output_tokens=1)
        assert answered.status == "incomplete"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(failed.id)


def failed_response(events: list[ResponseStreamEvent]) -> Response:
    *_, before, last = events
    assert last.type == "response.failed" and last.sequence_number == before.sequence_number + 1
    failed = last.response
    assert failed.status == "failed" and failed.error is not None and failed.usage is None
    assert failed.error.code == "server_error" and "files changed" in failed.error.message
    (item,) = failed.output
    assert item.type == "message" and item.status == "in_progress"
    return failed
