"""Forced tool calls on a real model that was never taught any: the grammar alone makes them valid."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, Field

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

FORMS = {
    "hermes": '{# <tool_call> "name" arguments #}',
    "qwen3_coder": "{# <tool_call> <function= #}",
    "pythonic": "{# [func_name1( #}",
}
TEMPLATE = (
    "SIGNS{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class GetWeather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome", "Hangzhou"]
    days: int = Field(ge=1, le=9)


class Now(BaseModel):
    zone: Literal["UTC", "CET"]


MODELS: dict[str, type[BaseModel]] = {"GetWeather": GetWeather, "Now": Now}
TOOLS = [openai.pydantic_function_tool(model) for model in MODELS.values()]
LOOSE = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]
MESSAGES: Any = [{"role": "user", "content": "What is 37+45?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--trust-request-chat-template", "--max-num-seqs", "4", "--kv-memory", "64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def body(form: str, seed: int) -> dict[str, Any]:
    template = TEMPLATE.replace("SIGNS", FORMS[form])
    sampling: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 300}
    return {"model": "bundled", "messages": MESSAGES, "extra_body": {"chat_template": template}, **sampling}


def calls(client: openai.OpenAI, form: str, seed: int, **fields: Any) -> list[tuple[str, str]]:
    given: dict[str, Any] = {"tools": LOOSE, "tool_choice": "required", "parallel_tool_calls": False, **fields}
    choice = client.chat.completions.create(**body(form, seed), **given).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.content is None
    made = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or [] if c.type == "function"]
    for name, arguments in made:
        MODELS[name].model_validate_json(arguments)
    return made


@pytest.mark.parametrize("form", FORMS)
def test_forced_calls_are_valid_and_the_same_in_a_crowd(client: openai.OpenAI, form: str) -> None:
    alone = [calls(client, form, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: calls(client, form, seed), range(6)))
    assert together == alone
    named = {"type": "function", "function": {"name": "Now"}}
    assert [name for name, _ in calls(client, form, 0, tool_choice=named)] == ["Now"]


def test_the_official_client_parses_calls_and_formats(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(**body("hermes", 1), tools=TOOLS, tool_choice="required")
    call = (parsed.choices[0].message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, GetWeather | Now)
    either = client.chat.completions.parse(**body("hermes", 2), tools=TOOLS, response_format=Now)
    message = either.choices[0].message
    assert isinstance(message.parsed, Now) or message.tool_calls
    with client.chat.completions.stream(**body("hermes", 3), tools=TOOLS, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance((final.choices[0].message.tool_calls or [])[0].function.parsed_arguments, GetWeather | Now)


def test_a_forced_call_goes_on_after_the_worker_dies(server: Server, client: openai.OpenAI) -> None:
    expected = calls(client, "hermes", 4)
    stream = client.chat.completions.create(
        **body("hermes", 4), tools=LOOSE, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    state = ChatCompletionStreamState()
    for i, chunk in enumerate(stream):
        if i == 3:
            os.kill(server.worker().pid, signal.SIGKILL)
        state.handle_chunk(chunk)
    choice = state.get_final_completion().choices[0]
    made = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or [] if c.type == "function"]
    assert made == expected
