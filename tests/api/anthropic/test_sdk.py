"""The official client of the Messages API: answers, streams, counts, loops of tools and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel, TypeAdapter

from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import QueueFullError
from pypto_serving.types.request import RequestFault
from tests.api.anthropic.talking import CALL, COUNT, PATH, SAID, body, create, stream
from tests.api.chat_events import prompt_of
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

HELLO: MessageParam = {"role": "user", "content": "hello"}
WEATHER: ToolParam = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(thinking_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinking_server.url, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_an_answer(thinks: Callable[..., RunningServer], client: anthropic.Anthropic) -> None:
    thinks("good day", cached=5)
    message = client.messages.create(model="tiny", max_tokens=50, messages=[HELLO], system="be brief")
    (block,) = message.content
    assert block.type == "text" and block.text == "good day"
    assert (message.stop_reason, message.role, message.usage.cache_read_input_tokens) == ("end_turn", "assistant", 5)
    counted = client.messages.count_tokens(model="tiny", messages=[HELLO], system="be brief")
    assert counted.input_tokens == message.usage.input_tokens + 5
    assert message._request_id


def test_a_stream(thinks: Callable[..., RunningServer], client: anthropic.Anthropic) -> None:
    """Helpers of the client add the events up to the message that a whole answer is."""
    thinks(SAID, cached=5)
    asked = {"model": "tiny", "max_tokens": 400, "messages": [HELLO], "tools": [WEATHER]}
    thinking = {"type": "enabled", "budget_tokens": 100}
    with client.messages.stream(**asked, thinking=thinking) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    whole = client.messages.create(**asked, thinking=thinking)  # type: ignore[call-overload]
    differs = {"id": True, "content": {"__all__": {"id", "signature"}}}
    assert message.model_dump(exclude=differs) == whole.model_dump(exclude=differs)  # type: ignore[arg-type]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]


def test_a_loop_of_tools(
    thinks: Callable[..., RunningServer], client: anthropic.Anthropic, tokenizer: Tokenizer
) -> None:
    asked = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Its name.
        """
        asked.append(city)
        return f"sun over {city}"

    server = thinks("")
    server.engine.script = lambda request: Script(tokenizer.encode("good day" if asked else CALL), "stop")
    runner = client.beta.messages.tool_runner(model="tiny", max_tokens=400, tools=[get_weather], messages=[HELLO])
    *_, last = runner
    assert asked == ["Paris é"]
    assert [block.text for block in last.content if block.type == "text"] == ["good day"]
    assert "<|im_start|>tool\nsun over Paris é<|im_end|>" in prompt_of(server, tokenizer)


def test_an_answer_of_a_type(thinks: Callable[..., RunningServer], client: anthropic.Anthropic) -> None:
    class City(BaseModel):
        name: str

    server = thinks('{"name": "Rome"}')
    parsed = client.messages.parse(model="tiny", max_tokens=50, messages=[HELLO], output_format=City)
    assert parsed.parsed_output == City(name="Rome")
    assert server.engine.requests[-1].params.guide is not None


def test_errors(thinks: Callable[..., RunningServer], client: anthropic.Anthropic, tokenizer: Tokenizer) -> None:
    server = thinks("x")
    with pytest.raises(anthropic.NotFoundError, match="does not exist here") as lost:
        client.messages.create(model="claude", max_tokens=5, messages=[HELLO])
    assert lost.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="nothing to answer"):
        client.messages.create(model="tiny", max_tokens=5, messages=[])
    server.engine.refusal = QueueFullError("full", 3)
    try:
        with pytest.raises(anthropic.RateLimitError, match="full"):
            client.messages.create(model="tiny", max_tokens=5, messages=[HELLO])
    finally:
        server.engine.refusal = None
    fault = RequestFault(500, "not_finite", "no numbers")
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), fault=fault)
    with (
        pytest.raises(anthropic.APIStatusError, match="no numbers"),
        client.messages.stream(model="tiny", max_tokens=50, messages=[HELLO]) as stream,
    ):
        list(stream)


def test_answers_are_of_the_published_types(thinks: Callable[..., RunningServer]) -> None:
    """The client itself takes any object for an answer."""
    server = thinks(SAID, cached=3)
    asked = {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 100}}
    anthropic.types.Message.model_validate(create(server, **asked), strict=True)
    events: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in stream(server, **asked):
        events.validate_python(event, strict=True)
    response = server.http.post(PATH, json=body(model="claude"))
    anthropic.types.ErrorResponse.model_validate(response.json(), strict=True)
    count = server.http.post(COUNT, json={"messages": [HELLO]}).json()
    anthropic.types.MessageTokensCount.model_validate(count, strict=True)
