"""How tests upload files, make batches, and wait for their answers."""

from __future__ import annotations

import io
import json
from typing import Any

import openai

from pypto_serving.api.batch import store
from tests.api.running import COMPLETIONS, RunningServer


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "hello", "max_tokens": 5, **body}}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    text = "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in lines)
    return client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS) -> str:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    ).id


def store_of(server: RunningServer, key: bytes = b"") -> store.KeyStore:
    found: store.KeyStore = server.app.state.batches.store(server.app.state.clients.name(key))
    return found


def wait(server: RunningServer, batch_id: str, *status: str, key: bytes = b"") -> None:
    kept = store_of(server, key)
    server.wait_for(lambda: kept.batch(batch_id).status in status)


def answers(client: openai.OpenAI, batch_id: str) -> dict[str, Any]:
    file_id = client.batches.retrieve(batch_id).output_file_id
    assert file_id is not None
    lines = client.files.content(file_id).text.splitlines()
    found = {entry["custom_id"]: entry for entry in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found
