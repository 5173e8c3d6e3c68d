"""The official clients of OpenAI and Anthropic, Vercel's AI SDK, and an agent's loop, all on one real server."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_tool
from anthropic.types import MessageParam
from bundled_model.tools import TOOLS

from tests.e2e.agent import Agent
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
QUESTION: MessageParam = {"role": "user", "content": "What is 3+4?"}
SCRIPTS = Path(__file__).parent
PACKAGES = ("@anthropic-ai/sdk@1", "ai@7", "@ai-sdk/openai@4", "@ai-sdk/anthropic@4")
AI_SDK_ENDPOINTS = ("chat", "messages", "responses")
"""The keys of `model` in ai_sdk.mjs that this server has."""


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clients for Node."""
    if shutil.which("npm") is None:
        pytest.skip("no Node: install Debian's packages nodejs and npm")
    folder = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES]
    if subprocess.run(install, capture_output=True, timeout=120).returncode:
        names = " ".join(PACKAGES)
        pytest.skip(f"npm cannot fetch {names}: it needs a registry, npm's own or one of `npm config set registry`")
    return folder


def run_script(node: Path, name: str, *arguments: str) -> None:
    script = shutil.copy(SCRIPTS / name, node)
    done = subprocess.run(["node", script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ok\n", done.stderr


def test_anthropic_for_node(server: Server, node: Path) -> None:
    run_script(node, "anthropic_client.mjs", server.url, json.dumps(TOOLS))


@pytest.mark.parametrize("endpoint", AI_SDK_ENDPOINTS)
def test_the_ai_sdk(server: Server, node: Path, endpoint: str) -> None:
    run_script(node, "ai_sdk.mjs", server.url, endpoint, json.dumps(TOOLS))


def test_answers_are_cached_and_counted(client: anthropic.Anthropic) -> None:
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


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner(client: anthropic.Anthropic, streamed: bool) -> None:
    cities = []

    def get_time(city: str) -> str:
        cities.append(city)
        return "14:05"

    described = {tool["function"]["name"]: tool["function"] for tool in TOOLS}["get_time"]
    tool = beta_tool(get_time, description=described["description"], input_schema=described["parameters"])
    asked: Any = {"model": "bundled", "max_tokens": 100, "tools": [tool], "max_iterations": 3}
    asked |= {"messages": [{"role": "user", "content": "What time is it in Paris?"}], "stream": streamed}
    turns = [turn.get_final_message() if streamed else turn for turn in client.beta.messages.tool_runner(**asked)]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"] and cities == ["Paris"]
    assert turns[-1].content[0].text == "It is 14:05 in Paris."


def test_the_streaming_helper_tells_texts_and_inputs(client: anthropic.Anthropic) -> None:
    function = {tool["function"]["name"]: tool["function"] for tool in TOOLS}["calculate"]
    tool: Any = {**{key: function[key] for key in ("name", "description")}, "input_schema": function["parameters"]}
    asked: Any = {"model": "bundled", "max_tokens": 100, "tools": [tool], "tool_choice": {"type": "any"}}
    with client.messages.stream(**asked, messages=[{"role": "user", "content": "What is 1234 * 99?"}]) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use" and json.loads("".join(pieces)) == block.input == {"expression": "1234 * 99"}
    with client.messages.stream(model="bundled", max_tokens=30, messages=[QUESTION]) as stream:
        assert "".join(stream.text_stream) == "3 + 4 = 7"


def test_an_agent_in_a_terminal(client: anthropic.Anthropic) -> None:
    """Its prompt grows from turn to turn, and only what is new is computed."""
    agent = Agent(client)
    first = agent.turn("What time is it in Paris?", {"type": "tool", "name": "get_time"})
    assert first.stop_reason == "tool_use" and [block.type for block in first.content] == ["tool_use"]
    second = agent.turn(agent.results(first, "14:05"), {"type": "any"})
    third = agent.turn(agent.results(second, "no such file", failed=True), {"type": "auto"})
    assert third.stop_reason in ("end_turn", "max_tokens", "tool_use") and third.content
    for before, turn in zip((first, second), (second, third), strict=True):
        known = before.usage.input_tokens + (before.usage.cache_read_input_tokens or 0)
        assert (turn.usage.cache_read_input_tokens or 0) > known - 64, (
            "but for the last block, and the call as rendered"
        )
    assert agent.counted == [
        turn.usage.input_tokens + (turn.usage.cache_read_input_tokens or 0) for turn in (first, second, third)
    ]


def test_decisions_are_what_the_model_would_say(server: Server) -> None:
    """The probabilities of a chat's own log-probabilities, of one token and of two, and one prompt for the input."""
    url, text = f"{server.url}/v1", "3 + 4 = 7. " * 20
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    choices = [{"value": f"c{i}"} for i in range(27)]
    questions: Any = [
        {"type": "predicate", "instructions": "The sum is 7."},
        {"type": "choice", "instructions": "Which?", "choices": choices},
    ]
    found = client.decisions.create(model="bundled", input=text, questions=questions)
    predicate, choice = found.answers
    head = f"<input>\n{text}\n</input>\n\n"
    task = "Statement: The sum is 7.\nIs the statement true of the input? Answer with Yes or No only."
    yes, no = (math.exp(logprob_of(server, head + task, label)) for label in ("Yes", "No"))
    assert predicate.type == "predicate" and predicate.probability == pytest.approx(yes / (yes + no), rel=1e-3)
    labels = [a + b for a in "AB" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:27]
    lines = "\n".join(f"{label}: {option['value']}" for label, option in zip(labels, choices, strict=True))
    task = f"Question: Which?\n{lines}\nAnswer with the letters before one option only."
    best = max(range(27), key=lambda i: choice.probabilities[i].probability)
    ratios = [logprob_of(server, head + task, labels[i]) for i in (best, 0)]
    assert choice.type == "choice" and choice.choice == f"c{best}"
    said = math.log(choice.probabilities[best].probability / choice.probabilities[0].probability)
    assert said == pytest.approx(ratios[0] - ratios[1], abs=1e-3)
    assert found.usage.input_tokens_details.cached_tokens > found.usage.input_tokens // 3


def logprob_of(server: Server, question: str, answer: str) -> float:
    """Of a reply's beginning, as a prompt that ends with it scores it."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    chat = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    asked = {**chat, "prompt_logprobs": 0, "max_tokens": 1}
    scores = server.http.post("/v1/chat/completions", json=asked).json()["prompt_logprobs"]
    count = server.http.post("/tokenize", json={"prompt": answer}).json()["count"]
    return sum(next(iter(score.values()))["logprob"] for score in scores[-count:])


def test_a_conversation_is_kept_and_cached(server: Server) -> None:
    """Turns of the Responses API, by OpenAI's client."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    first = client.responses.create(model="bundled", input="What is 37+45?", instructions="Add numbers. " * 20)
    assert first.output_text == "37 + 45 = 82"
    again = {"instructions": first.instructions, "previous_response_id": first.id}
    second = client.responses.create(model="bundled", input="What is 1+1?", **again)
    assert second.output_text == "1 + 1 = 2"
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 64
    asked = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in asked] == ["message"] * 3
