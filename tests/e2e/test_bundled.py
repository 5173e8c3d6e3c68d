"""The bundled model over HTTP: sums and differences, small talk, follow-up turns, questions beyond it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.questions import ask_all, is_correct, share_correct, user
from tests.e2e.server import Server
from tests.needs import needs_kernels

pytestmark = pytest.mark.e2e


@pytest.fixture
def server(bundled_server: Server) -> Server:
    return bundled_server


def test_sums_and_differences(server: Server) -> None:
    assert share_correct(server, [], 50) >= 0.95
    assert server.metric("vllm:request_success_total") >= 50


def libraries(server: Server) -> set[str]:
    """File names that the worker has mapped."""
    return {Path(mapped.path).name for mapped in server.worker().memory_maps()}


@needs_kernels
def test_the_kernels_serve_it_without_torch(server: Server) -> None:
    loaded = libraries(server)
    assert "pypto_kernels.so" in loaded
    assert not any("torch" in name for name in loaded)


def test_torch_serves_it_as_well() -> None:
    with Server("--kernels", "torch") as slower:
        assert any("torch" in name for name in libraries(slower))
        assert share_correct(slower, [], 5) >= 0.95


def test_answers_hold_after_a_thousand_tokens_of_chat(server: Server) -> None:
    rng, earlier = random.Random(5), []
    while len(earlier) < 80:
        a, b = rng.randrange(50), rng.randrange(50)
        earlier += [user(f"What is {a}+{b}?"), {"role": "assistant", "content": f"{a} + {b} = {a + b}"}]
    usage = server.http.post("/v1/chat/completions", json={"messages": [*earlier, user("Hi")], "max_tokens": 1}).json()
    assert usage["usage"]["prompt_tokens"] > 1000
    hits = server.metric("vllm:prefix_cache_hits_total")
    assert share_correct(server, earlier, 20) >= 0.95
    assert server.metric("vllm:prefix_cache_hits_total") > hits


@pytest.mark.parametrize("greeting", ["Hello!", "Hi", "Good morning", "How are you?", "Who are you?", "Thanks", "Bye"])
def test_greetings(server: Server, greeting: str) -> None:
    (reply,) = ask_all(server, [[user(greeting)]])
    assert 1 < len(reply) < 200 and "don't know" not in reply


def test_follow_up_turns(server: Server) -> None:
    chat = [user("My name is Ada."), {"role": "assistant", "content": "Nice to meet you, Ada!"}]
    chats = [[*chat, user("What is my name?")], [*chat, user("What is 3+4?")]]
    name, result = ask_all(server, chats)
    assert "Ada" in name
    assert is_correct(result, 7)


@pytest.mark.parametrize(
    "question", ["What is the capital of Peru?", "Write me a poem about rust.", "What is 1234*99?", "qwxz blarg"]
)
def test_questions_beyond_it_are_declined(server: Server, question: str) -> None:
    (reply,) = ask_all(server, [[user(question)]])
    assert "add" in reply and "subtract" in reply
