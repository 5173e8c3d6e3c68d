"""Templates that requests bring hold up no chat without one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.api.bad_bodies import HELLO
from tests.api.running import CHAT, RunningServer

LONG = "{% for i in range(20000) %}{% for j in range(10) %}{% endfor %}{% endfor %}Hello"


@pytest.mark.parametrize("name", ["chat_template", "chat_templat\\u0065"])
def test_a_slow_template_of_a_request_holds_up_no_other_chat(chat_server: RunningServer, name: str) -> None:
    body = json.dumps({"messages": [HELLO], "FIELD": LONG}).replace("FIELD", name)
    answered = 0
    with ThreadPoolExecutor(1) as other:
        slow = other.submit(chat_server.http.post, CHAT, content=body)
        while not slow.done():
            assert chat_server.post(CHAT, {"messages": [HELLO]}).status_code == 200
            answered += not slow.done()
    assert slow.result().status_code == 200
    assert answered > 2


def test_a_text_of_a_template_is_not_repeated_beyond_all_bounds(chat_server: RunningServer) -> None:
    for template in ("{{ 'x' * 10 ** 9 }}", "{{ 10 ** 9 * 'x' }}", "{{ [0] * 10 ** 9 }}"):
        answer = chat_server.post(CHAT, {"messages": [HELLO], "chat_template": template})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "repeats" in answer.json()["error"]["message"]
    answer = chat_server.post(CHAT, {"messages": [HELLO], "chat_template": "{{ '-' * 3 }}{{ 2 * 3.5 }}{{ 3 * [1] }}"})
    assert answer.status_code == 200
