"""What the bundled model is taught about functions and JSON: as the template writes it, and right."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from bundled_model import json_answers, tool_questions
from bundled_model.arithmetic import PROBLEMS
from bundled_model.evaluation import call_turns, plain_turns
from bundled_model.practice import Practice
from bundled_model.tokenizer import CHAT_TEMPLATE
from bundled_model.tool_chats import SIGNATURES, ToolChat
from bundled_model.tools import TOOLS, Call, calculate, calls_text, get_time, responses_text, system_text

from pypto_serving.api.chat.parsers.families import choose_family
from pypto_serving.api.prompting.template import TemplateEncoder

START, END = "<|im_start|>", "<|im_end|>\n"


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    template = TemplateEncoder(CHAT_TEMPLATE, {})
    return str(template.encode(messages, {"tools": tools, "add_generation_prompt": True}).prompt)


def called(call: Call) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}


def test_the_template_writes_a_chat_with_functions_as_it_is_trained() -> None:
    calls = [calculate("1234 * 99"), get_time("São Paulo"), get_time()]
    messages = [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "What is 1234 * 99?"},
        {"role": "assistant", "content": None, "tool_calls": [called(call) for call in calls]},
        {"role": "tool", "tool_call_id": "1", "content": "122166"},
        {"role": "tool", "tool_call_id": "1", "content": "14:05"},
        {"role": "assistant", "content": "1234 * 99 = 122166"},
        {"role": "tool", "tool_call_id": "1", "content": "alone"},
    ]
    expected = [
        ("system", system_text("Be polite.", SIGNATURES.values())),
        ("user", "What is 1234 * 99?"),
        ("assistant", calls_text(calls)),
        ("user", responses_text(["122166", "14:05"])),
        ("assistant", "1234 * 99 = 122166"),
        ("user", responses_text(["alone"])),
    ]
    chat = "".join(f"{START}{role}\n{text}{END}" for role, text in expected)
    assert rendered(messages, TOOLS) == f"{chat}{START}assistant\n"


def test_the_server_reads_calls_from_the_template_as_hermes() -> None:
    assert choose_family(CHAT_TEMPLATE, True)[0] == "hermes"


def test_functions_need_no_system_message_and_no_parameters() -> None:
    bare = {"type": "function", "function": {"name": "get_user"}}
    offer = f"{START}system\n<tools>\nget_user()\n</tools>{END}"
    assert rendered([{"role": "user", "content": "Hi"}], [bare]) == f"{offer}{START}user\nHi{END}{START}assistant\n"


def test_text_before_a_call_and_arguments_as_text_are_kept() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    said = {"role": "assistant", "content": "Well.", "tool_calls": [{"type": "function", "function": function}]}
    assert 'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in rendered([said])


@pytest.mark.parametrize("kind", tool_questions.KINDS)
def test_calls_say_what_was_asked(kind: str) -> None:
    for question, reply in call_turns(kind, 300, seed=1):
        for line in reply.split("\n")[1::3]:
            call = json.loads(line)
            signature = f"{call['name']}({', '.join(call['arguments']) or 'city'})"
            assert signature in SIGNATURES.values()
            for word in " ".join(call["arguments"].values()).replace("(", " ").replace(")", " ").split():
                said = word.lower() in question.lower() or not word.isalnum() or kind != "get_time"
                assert said, (question, call)


def test_held_out_calls_and_answers_are_not_practised() -> None:
    rng = random.Random(0)
    held_out = {reply for kind in tool_questions.KINDS for _, reply in call_turns(kind, 500, seed=1)}
    chats = [ToolChat(rng, Practice(PROBLEMS), 0.2) for _ in range(150)]
    practised = {chat.next_turn().reply for chat in chats for _ in range(10)}
    assert len(practised) > 500 and not held_out & practised
    unseen = {json_answers.json_answer(rng, unseen=True)[1] for _ in range(500)}
    assert not unseen & {json_answers.json_answer(rng)[1] for _ in range(1500)}


def test_answers_in_json_are_json() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        question, reply = json_answers.json_answer(rng)
        answer = json.loads(reply)
        assert isinstance(answer, dict) and ("JSON" in question)


def test_what_needs_no_call_is_answered_as_without_functions() -> None:
    for question, reply in plain_turns(500, seed=2):
        assert "<tool_call>" not in reply and "what time" not in question.lower()
