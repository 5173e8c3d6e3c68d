"""To whom files, batches and responses belong: one identity for requests over HTTP and those of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.batch.asking import answers, create, line, upload, wait
from tests.api.running import RunningServer

Start = Callable[..., RunningServer]


def test_keys_see_their_own_alone(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path), api_keys=("sesame", "two"))
    file_id = upload(server.openai("sesame"), [line("a")])
    assert server.openai("sesame").files.retrieve(file_id).id == file_id
    with pytest.raises(openai.NotFoundError):
        server.openai("two").files.retrieve(file_id)
    assert "sesame" not in "".join(str(path) for path in tmp_path.rglob("*"))


def test_responses_of_batches_belong_to_their_key(start: Start, tmp_path: Path) -> None:
    """They can be fetched and continued outside of batches, and the other way round."""
    server = start(batch_dir=str(tmp_path), api_keys=("sesame", "two"))
    mine, other = server.openai("sesame").responses, server.openai("two").responses

    def answer(key: str, **body: Any) -> dict[str, Any]:
        client = server.openai(key)
        entry = {"custom_id": "a", "url": "/v1/responses", "body": {"input": "hello", "max_output_tokens": 2, **body}}
        batch_id = create(client, [entry], "/v1/responses")
        wait(server, batch_id, "completed", key=key.encode())
        found: dict[str, Any] = answers(client, batch_id)["a"]["response"]
        return found

    first = answer("sesame")["body"]["id"]
    assert answer("sesame", previous_response_id=first)["status_code"] == 200
    assert answer("two", previous_response_id=first)["status_code"] == 404
    assert mine.retrieve(first).id == first
    made = mine.create(model="tiny", input="hello", previous_response_id=first)
    second, reference = made.id, {"type": "item_reference", "id": made.output[0].id}
    asked: Any = [reference, {"role": "user", "content": "more"}]
    assert mine.create(model="tiny", input=asked).output
    assert answer("sesame", previous_response_id=second)["status_code"] == 200
    with pytest.raises(openai.NotFoundError):
        other.retrieve(second)
    with pytest.raises(openai.NotFoundError):
        other.create(model="tiny", input=asked)


def test_without_keys_all_clients_are_one(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client, body = server.openai("whatever"), {"input": "hello", "max_output_tokens": 2}
    batch_id = create(client, [{"custom_id": "a", "url": "/v1/responses", "body": body}], "/v1/responses")
    wait(server, batch_id, "completed")
    name = answers(server.openai(), batch_id)["a"]["response"]["body"]["id"]
    assert client.responses.create(model="tiny", input="more", previous_response_id=name).output
    assert server.http.get(f"/v1/responses/{name}").status_code == 200
