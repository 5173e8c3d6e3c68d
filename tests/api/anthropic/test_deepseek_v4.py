"""Messages for a model with an encoding of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.settings import load_serving_config
from pypto_serving.api.text.tokenizer import Tokenizer
from tests.api.anthropic.talking import HELLO, PATH, THINKS, WEATHER
from tests.api.chat_events import prompt_of
from tests.api.checkpoint import write_deepseek_v4
from tests.api.conftest import new_engine
from tests.api.running import RunningServer

CALLED = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sun"}]}


@pytest.fixture
def v4_server(tmp_path: Path) -> Iterator[RunningServer]:
    folder = write_deepseek_v4(tmp_path)
    serving = load_serving_config(folder, architecture="DeepseekV4ForCausalLM", served_model_names=("v4",))
    server = RunningServer(new_engine(Tokenizer.load(folder), max_model_len=8192), serving)
    yield server
    server.stop()


def test_thinking_tools_and_schemas(v4_server: RunningServer) -> None:
    server, tokenizer = v4_server, v4_server.service.tokenizer

    def prompt(**fields: Any) -> str:
        asked = {"max_tokens": 400, "messages": [HELLO], **fields}
        response = server.http.post(PATH, json=asked)
        assert response.status_code == 200, response.text
        return prompt_of(server, tokenizer)

    assert prompt().endswith("<｜User｜>hello<｜Assistant｜></think>")
    assert prompt(thinking=THINKS).endswith("<｜User｜>hello<｜Assistant｜><think>")
    thorough = prompt(thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert thorough.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum")
    turns = [HELLO, {"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [RESULT]}]
    said = prompt(messages=turns, tools=[WEATHER], system="brief")
    assert said.index("brief") < said.index('"get_weather"') < said.index("<tool_result>sun</tool_result>")
    shown = prompt(output_config={"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}})
    assert "## Response Format" in shown and '"city"' in shown
