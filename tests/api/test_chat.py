"""POST /v1/chat/completions over real HTTP, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.prompting.template import TemplateEncoder, find_template
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.types.arrays import unpack_ids
from tests.api.bad_bodies import BAD_CHATS, names_of
from tests.api.checkpoint import TEXT, write_checkpoint
from tests.api.running import RunningServer
from tests.api.scripted_engine import Script

PATH = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def prompt_ids(server: RunningServer) -> list[int]:
    return list(unpack_ids(server.engine.requests[-1].token_ids).tolist())


def test_the_official_client(server: RunningServer, tokenizer: Tokenizer) -> None:
    result = server.openai().chat.completions.create(model="tiny", messages=[HELLO])  # type: ignore[list-item]
    message = result.choices[0].message
    assert (message.role, message.content, result.choices[0].finish_reason) == ("assistant", TEXT, "length")
    assert prompt_ids(server) == tokenizer.encode(PROMPT)
    assert result.usage is not None
    assert result.usage.prompt_tokens_details is not None
    assert result.usage.prompt_tokens_details.cached_tokens == 0
    assert server.engine.requests[-1].params.max_tokens == 512 - len(tokenizer.encode(PROMPT))


def test_the_official_client_streams(server: RunningServer) -> None:
    stream = server.openai().chat.completions.create(
        model="tiny",
        messages=[HELLO],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 0


@pytest.mark.parametrize("seed", range(8))
def test_streams_equal_whole_answers_for_any_portions(server: RunningServer, seed: int) -> None:
    body = {"messages": [HELLO], "n": 3, "logprobs": True, "top_logprobs": 2, "stop": "once"}
    server.engine.seed = seed
    whole = server.post(PATH, body).json()
    server.engine.seed = seed + 1000
    events = server.events(PATH, body)
    for choice in whole["choices"]:
        mine = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        streamed = [entry for c in mine[1:] for entry in c["logprobs"]["content"]]
        assert streamed == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "stop"


def test_logprobs(server: RunningServer, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda request: Script(tokenizer.encode("the 中fox"))
    body = {"messages": [HELLO], "logprobs": True, "top_logprobs": 3}
    content = server.post(PATH, body).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "the 中fox"
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}


@pytest.mark.parametrize("skip", [True, False])
def test_logprobs_are_those_of_the_content(server: RunningServer, tokenizer: Tokenizer, skip: bool) -> None:
    """The end token is among them only where it is shown."""
    ids = [*tokenizer.encode("the fox"), tokenizer.eos_token_id or 0]
    server.engine.script = lambda request: Script(ids, finish="stop")
    body = {"messages": [HELLO], "logprobs": True, "skip_special_tokens": skip}
    reply = server.post(PATH, body).json()
    choice = reply["choices"][0]
    said = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
    assert said == choice["message"]["content"] == ("the fox" if skip else "the fox<|end|>")
    assert reply["usage"]["completion_tokens"] == len(ids)
    events = server.events(PATH, body)
    streamed = [
        entry for event in events for c in event["choices"] for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == choice["logprobs"]["content"]


def test_content_parts_and_template_arguments(server: RunningServer, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"shout": True}}
    server.post(PATH, {**body, "add_generation_prompt": False})
    assert tokenizer.decode(prompt_ids(server), False) == "<|im_start|>user\nhel\nlo<|im_end|>\nLOUD"


def test_the_checkpoint_says_how_many_tokens_a_chat_gets_by_default(
    tmp_path: Path, start: Callable[..., RunningServer]
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    server = start(tmp_path)
    for fields, expected in (({}, 7), ({"max_tokens": 9}, 9), ({"max_completion_tokens": 3}, 3)):
        assert server.post(PATH, {"messages": [HELLO], **fields}).status_code == 200
        assert server.engine.requests[-1].params.max_tokens == expected
    long = {"role": "user", "content": "a" * 509}
    assert server.post(PATH, {"messages": [long], "truncate_prompt_tokens": 509}).status_code == 200
    assert server.engine.requests[-1].params.max_tokens == 3


def test_max_completion_tokens(server: RunningServer) -> None:
    result = server.post(PATH, {"messages": [HELLO], "max_completion_tokens": 3, "max_tokens": 9}).json()
    assert result["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("body", "param", "words"), BAD_CHATS, ids=names_of(BAD_CHATS))
def test_what_cannot_be_served_is_named(server: RunningServer, body: dict[str, Any], param: str, words: str) -> None:
    response = server.post(PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]


def test_neutral_values_are_accepted(server: RunningServer) -> None:
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    response = server.post(PATH, {"messages": [HELLO], "functions": None, **neutral})
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


def test_a_model_without_a_template_or_tokenizer_says_so(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = start(write_checkpoint(tmp_path / "a", template=None))
    response = plain.post(PATH, {"messages": [HELLO]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == ("chat is off: this model has no chat template; use /v1/completions")
    for body in ({"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"temperature": "hot"}):
        error = plain.post(PATH, {"messages": [HELLO], **body}).json()["error"]
        assert (error["param"], error["code"]) == ("messages", "chat_unavailable")
    assert plain.post("/v1/completions", {"prompt": "hello"}).status_code == 200
    bare = start(write_checkpoint(tmp_path / "b", tokenizer=False))
    assert "no tokenizer.json" in bare.post(PATH, {"messages": [HELLO]}).json()["error"]["message"]
    refused = bare.post("/v1/completions", {"prompt": "hello"})
    assert refused.status_code == 400
    assert "list of token ids" in refused.json()["error"]["message"]
    served = bare.post("/v1/completions", {"prompt": [5, 6], "logprobs": 1}).json()
    assert served["choices"][0]["text"] == ""
    assert served["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def test_the_templates_own_refusal_is_a_400(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start(write_checkpoint(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    response = server.post(PATH, {"messages": [HELLO]})
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def render(source: str, **kwargs: Any) -> str:
    return TemplateEncoder(source, {"bos_token": "<s>"}).encode([HELLO], kwargs).prompt


def test_template_helpers() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hello"
    assert render("{{ v | tojson }}", v={"ü": "<&>"}) == '{"ü": "<&>"}'
    assert render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert render("{% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 + 'a' }}", "{{ 1 // 0 }}", "{{ x.y.z }}"],
)
def test_templates_fail_in_their_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_a_damaged_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        TemplateEncoder("{% if %}", {})


@pytest.mark.parametrize("source", ["{{ 9 ** 9 ** 9 }}", "{{ 'x' * 99999999999 }}", "{{ 'x' | center(9999999999) }}"])
def test_compiling_a_template_computes_nothing(source: str) -> None:
    TemplateEncoder("{% if false %}" + source + "{% set x = " + source[2:-2] + "%}{% endif %}", {})
    with pytest.raises(ModelError, match="autoescape is not supported"):
        TemplateEncoder("{% autoescape " + source[2:-2] + "%}{% endautoescape %}", {})


def test_a_template_too_deep_to_compile_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        TemplateEncoder("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})


def test_where_templates_are_found(tmp_path: Path) -> None:
    def write(name: str, template: object) -> None:
        (tmp_path / name).write_text(json.dumps({"chat_template": template}))

    with pytest.raises(ModelError, match="no chat template"):
        find_template(tmp_path)
    write("tokenizer_config.json", [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}])
    assert find_template(tmp_path)[0] == "D"
    assert find_template(tmp_path, name="tool_use")[0] == "D"
    write("tokenizer_config.json", [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "U"}])
    assert find_template(tmp_path)[0] == "R" and find_template(tmp_path, name="tool_use")[0] == "U"
    write("tokenizer_config.json", "T")
    assert find_template(tmp_path)[0] == "T"
    write("chat_template.json", "J")
    assert find_template(tmp_path)[0] == "J"
    (tmp_path / "chat_template.jinja").write_text("X")
    assert find_template(tmp_path)[0] == "X"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("V")
    assert find_template(tmp_path)[0] == "X" and find_template(tmp_path, name="tool_use")[0] == "V"
    (tmp_path / "own.jinja").write_text("O")
    assert find_template(tmp_path, str(tmp_path / "own.jinja"))[0] == "O"
    with pytest.raises(ModelError, match="cannot be read"):
        find_template(tmp_path, str(tmp_path / "nowhere.jinja"))
