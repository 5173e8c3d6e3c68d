"""What a client sends costs the server no more than it should: bounds of fields, and work that is done once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pypto_serving.api.common.body import MAX_IGNORED, MAX_NAME_CHARS
from pypto_serving.api.openai.bodies import parse_body
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody, GenerationBody
from pypto_serving.api.service import MAX_REMEMBERED_FIELDS
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.sampling import MAX_STOP_CHARS, MAX_STOPS
from tests.api.running import RunningServer

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatBody, {"messages": [0] * 1000}),
        (ChatBody, {"messages": [{"role": 1}] * 1000}),
        (CompletionBody, {"stop_token_ids": ["a"] * 1000}),
    ],
)
def test_a_list_of_wrong_items_costs_its_first_one(schema: type[GenerationBody], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 2, "an error object was made for every item"


def test_choices_share_the_tables_of_their_stop_strings(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("pypto_serving.api.generation.choice._failure_table", lambda stop: made.append(stop) or [])
    stops = [f"{i:x}" * MAX_STOP_CHARS for i in range(MAX_STOPS)]
    assert server.post(PATH, {"prompt": "hello", "max_tokens": 1, "n": 64, "stop": stops}).status_code == 200
    assert sorted(made) == sorted(stops)


def test_names_of_unknown_fields_are_remembered_in_part(server: RunningServer) -> None:
    remembered = server.service._warned_fields
    for first in range(MAX_REMEMBERED_FIELDS // MAX_IGNORED + 2):
        body = {f"{first}-{i}" + "x" * 100: 1 for i in range(MAX_IGNORED + 1)}
        assert server.post(PATH, {"prompt": "hello", "max_tokens": 1, **body}).status_code == 200
    assert len(remembered) == MAX_REMEMBERED_FIELDS
    assert max(map(len, remembered)) == MAX_NAME_CHARS


def test_names_of_unknown_fields_are_cut_where_a_body_is_parsed() -> None:
    """A reader sends a few of them, and their number."""
    fields = {f"{i}" + "x" * 1000: 1 for i in range(1000)} | {"stream": True, "stream_options": {"y" * 1000: 1}}
    serving = ServingConfig(model_dir="", served_model_names=("m",))
    ignored = parse_body(json.dumps(fields).encode(), CompletionBody, serving)[1]["ignored"]
    assert ignored.names == [f"{i}" + "x" * (MAX_NAME_CHARS - len(f"{i}")) for i in range(MAX_IGNORED)]
    assert ignored.num_more == 1001 - MAX_IGNORED
    assert ignored.header()["x-ignored-fields"].endswith(f", and {1001 - MAX_IGNORED} more")
