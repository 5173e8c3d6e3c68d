"""POST /v1/decisions from the client's side: questions, the prompts that they become, probabilities, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.decision_create_params import DecisionCreateParams
from pydantic import TypeAdapter

from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.common.described import Error
from pypto_serving.api.decisions import decision_body
from pypto_serving.api.decisions.endpoint import Decision
from pypto_serving.api.generation.labels import LabelTree, concentration, labels_of, probabilities
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig, load_serving_config
from pypto_serving.errors import RequestError
from pypto_serving.types.arrays import id_list
from tests.api.checkpoint import write_checkpoint, write_deepseek_v4
from tests.api.documented import schema_of
from tests.api.running import RunningServer
from tests.api.scripted_engine import engine_config
from tests.api.templates import OPENED

PATH = "/v1/decisions"
PUBLISHED: TypeAdapter[Any] = TypeAdapter(DecisionCreateParams)
ASKED: list[dict[str, Any]] = [
    {"type": "predicate", "name": "is fox", "instructions": "It is about a fox."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which one?"}, {"type": "input_json", "data": {"a": [1]}}],
        "choices": [{"value": "true", "description": "the word"}, {"value": True}, {"value": False}],
    },
    {"type": "score", "name": "speed", "instructions": "How quick?", "levels": [{"label": "slow"}, {"label": "quick"}]},
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Help."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
    {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "It rains."}, {"type": "refusal", "refusal": "No."}],
    },
]


def prompts_of(server: RunningServer) -> list[str]:
    tokenizer = server.service.tokenizer
    return [
        tokenizer.decode(list(id_list(sent.token_ids)), skip_special_tokens=False) for sent in server.engine.requests
    ]


def test_the_official_client_reads_the_answers(server: RunningServer) -> None:
    PUBLISHED.validate_python({"model": "tiny", "input": "the fox", "questions": ASKED})
    questions: Any = ASKED
    found = server.openai().decisions.create(
        model="tiny", input="the fox", questions=questions, safety_identifier="me", prompt_cache_options={"ttl": "30m"}
    )
    predicate, choice, score = found.answers
    assert predicate.type == "predicate" and (predicate.name, found.model) == ("is fox", "tiny")
    assert choice.type == "choice" and choice.name is None and choice.choice == "true"
    assert [one.value for one in choice.probabilities] == ["true", True, False]
    assert score.type == "score" and [(one.value, one.label) for one in score.probabilities] == [
        (0, "slow"),
        (1, "quick"),
    ]
    sent = server.engine.requests
    assert {request.params.max_tokens for request in sent} == {1}
    named = {request.params.logprob_token_ids for request in sent}
    assert len(named) == 1, "one list for all reads of a request"
    # The scripted model gives token i of that list exp(-i / 2 - i / 2 ...): each read falls by 1 from token to token.
    at = {token_id: i for i, token_id in enumerate(*named)}
    encode = server.service.tokenizer.encode
    weights = [math.exp(-sum(at[token_id] for token_id in encode(label, False))) for label in "ABC"]
    assert [one.probability for one in choice.probabilities] == pytest.approx([w / sum(weights) for w in weights])
    assert choice.confidence == pytest.approx((weights[0] / sum(weights) - 1 / 3) * 1.5)
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert (found.usage.output_tokens, found.usage.total_tokens) == (len(sent), found.usage.input_tokens + len(sent))


def test_every_question_has_a_prompt_that_begins_alike(server: RunningServer) -> None:
    assert server.post(PATH, {"input": "the fox", "questions": ASKED, "prompt_cache_key": "k"}).status_code == 200
    prompts = prompts_of(server)
    shared = "<|im_start|>user\n<input>\nthe fox\n</input>\n\n"
    assert all(prompt.startswith(shared) for prompt in prompts)
    assert {request.cache_salt for request in server.engine.requests} == {"k"}
    assert (
        prompts[0]
        .removeprefix(shared)
        .startswith(
            "Statement: It is about a fox.\nIs the statement true of the input? Answer with Yes or No only.<|im_end|>"
        )
    )
    texts = [prompt.removeprefix(shared) for prompt in prompts]
    assert 'Question: Which one?\n{"a":[1]}\nA: true - the word\nB: true\nC: false\nAnswer' in "".join(texts)
    assert "Question: How quick?\n0: slow\n1: quick\nAnswer with the number" in "".join(texts)
    ids = [id_list(request.token_ids) for request in server.engine.requests]
    same = sum(1 for tokens in zip(*ids, strict=False) if len(set(tokens)) == 1)
    assert same >= len(server.service.tokenizer.encode(shared, False)), "the input has the same tokens in all"


def test_a_conversation_becomes_a_transcript(server: RunningServer) -> None:
    body = {"input": CONVERSATION, "questions": ASKED[:1]}
    PUBLISHED.validate_python({"model": "tiny", **body})
    assert server.post(PATH, body).status_code == 200
    transcript = (
        "[system]\nHelp.\n\n[user]\nWeather?\n\n[assistant calls weather]\n{}\n\n"
        "[result of weather]\nrain\n\n[assistant]\nIt rains.\nNo."
    )
    assert f"<input>\n{transcript}\n</input>" in prompts_of(server)[0]
    server.engine.requests.clear()
    assert server.post(PATH, {"input": CONVERSATION[1:2], "questions": ASKED[:1]}).status_code == 200
    assert "<input>\nWeather?\n</input>" in prompts_of(server)[0]


PREDICATE, CHOICE, SCORE = ASKED
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": []}, "questions", "at least one"),
    ({"questions": [PREDICATE] * 401}, "questions", "at most 400"),
    ({"questions": "a"}, "questions", "list"),
    ({"questions": [{**PREDICATE, "type": "box"}]}, "questions[0].type", "'predicate', 'choice' or 'score'"),
    ({"questions": [{**PREDICATE, "type": ["predicate"]}]}, "questions[0].type", "'predicate', 'choice' or 'score'"),
    ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "missing"),
    ({"questions": [{**PREDICATE, "name": "x" * 1025}]}, "questions[0].name", "1024 characters"),
    ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices", "2 to 255"),
    (
        {"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]},
        "questions[0].choices",
        "2 to 255",
    ),
    ({"questions": [{**CHOICE, "choices": [{"value": 1}, {"value": 2}]}]}, "questions[0].choices[0].value", "true or"),
    ({"questions": [{**SCORE, "levels": [{"label": "a"}]}]}, "questions[0].levels", "2 to 10"),
    (
        {"questions": [{**SCORE, "levels": [{"label": True}, {"label": "a"}]}]},
        "questions[0].levels[0].label",
        "a string",
    ),
    ({"input": ""}, "input", "is empty"),
    ({"input": []}, "input", "1 to 16384"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'developer'"),
    ({"input": [{"type": {"a": 1}, "role": "user", "content": "a"}]}, "input[0].type", "'message'"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "only",
    ),
    ({"input": [{"role": "system", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0]", "only"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_json", "data": [1]}]}]},
        "input[0].content[0].data",
        "object",
    ),
    ({"stream": True}, "stream", "not supported"),
    ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key", ""),
]
DEPENDS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": CONVERSATION[3:]}, "input[0].call_id", "no earlier call"),
    (
        {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
        "questions[0].choices[1].value",
        "again",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": [0] * 10_001}}]}]},
        "",
        "10000 values",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": "x" * 262_144}}]}]},
        "",
        "262144 bytes",
    ),
    ({"input": "the fox " * 1000}, "input", "context"),
]
"""Refused by what no schema says."""


@pytest.mark.parametrize(("changes", "field", "words"), BAD + DEPENDS)
def test_what_is_refused_names_its_place(
    chat_server: RunningServer, changes: dict[str, Any], field: str, words: str
) -> None:
    body = {"input": "a", "questions": ASKED, **changes}
    if len(json.dumps(body)) > 5000 and field == "input":
        body["input"] *= 10
    response = chat_server.http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = msgspec.json.decode(response.content, type=Error).error
    assert (error.param or "").startswith(field) and words in error.message
    described = schema_of(chat_server.http.get("/openapi.json").json(), "DecisionBody")
    assert described.is_valid(body) == ((changes, field, words) in DEPENDS)


def test_deep_json_is_refused(chat_server: RunningServer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(33):
        deep = {"a": deep}
    item = {"role": "user", "content": [{"type": "input_json", "data": {"a": deep}}]}
    answer = chat_server.http.post(PATH, json={"input": [item], "questions": ASKED})
    assert answer.status_code == 400 and "32 levels" in answer.text


def test_answers_and_bodies_are_as_described(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    body = {"input": CONVERSATION, "questions": ASKED, "model": None, "stream": False, "odd": 1}
    schema_of(document, "DecisionBody").validate(body)
    response = server.http.post(PATH, json=body)
    assert response.headers["x-ignored-fields"] == "odd"
    msgspec.json.decode(response.content, type=Decision)
    schema_of(document, "Decision").validate(response.json())
    assert server.http.post(PATH, json={**body, "model": "other"}).status_code == 404


def test_a_request_needs_a_bounded_number_of_prompts_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompter, serving = prompter_of(write_checkpoint(tmp_path))
    choices = [{"value": str(i)} for i in range(255)]
    many = {"input": "a", "questions": [{**CHOICE, "choices": choices}] * 60}
    with pytest.raises(RequestError, match=r"more than \d+ prompts"):
        decision_body.read_decision(prompter, serving, json.dumps(many).encode())
    long = {"input": "the fox " * 100, "questions": ASKED}
    monkeypatch.setattr(decision_body, "MAX_READ_TOKENS", 600)
    with pytest.raises(RequestError, match="600 tokens in all"):
        decision_body.read_decision(prompter, serving, json.dumps(long).encode())


def prompter_of(folder: Path, **options: Any) -> tuple[Prompter, ServingConfig]:
    serving = load_serving_config(folder, served_model_names=("tiny",), **options)
    return Prompter.load(engine_config(500, max_model_len=8192), serving), serving


def read_with(folder: Path, **options: Any) -> ReadBody:
    """What a reader makes of a decision for the checkpoint in a folder."""
    prompter, serving = prompter_of(folder, **options)
    return decision_body.read_decision(prompter, serving, json.dumps({"input": "a", "questions": ASKED}).encode())


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [({"template": OPENED}, "reasoning"), ({"tokenizer": False}, "chat is off"), ({"template": None}, "chat is off")],
)
def test_models_that_cannot_decide_say_so(tmp_path: Path, checkpoint: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_with(write_checkpoint(tmp_path, **checkpoint))


def test_an_encoder_without_template_makes_decisions(tmp_path: Path) -> None:
    read = read_with(write_deepseek_v4(tmp_path), architecture="DeepseekV4ForCausalLM")
    assert [asked.kind for asked in read.asked] == ["predicate", "choice", "score"]
    firsts = {tuple(prompt.token_ids[:8]) for prompt in read.prompts}
    assert len(firsts) == 1 and len(read.prompts) >= len(ASKED)


def test_labels_of_several_tokens_are_read_along_a_tree() -> None:
    """[1], [2, 3] and [2, 4, 5] need reads behind nothing, [2] and [2, 4]."""
    tree = LabelTree([[1], [2, 3], [2, 4, 5]])
    assert tree.nodes == [(), (2,), (2, 4)]
    reads = [{1: math.log(0.2), 2: math.log(0.4)}, {3: math.log(0.25), 4: math.log(0.5)}, {5: math.log(0.5)}]
    assert probabilities(tree.paths, reads) == pytest.approx([0.5, 0.25, 0.25])


@pytest.mark.parametrize("labels", [[[1], [1]], [[1], [1, 2]], [[1, 2], [1]]])
def test_labels_that_begin_others_are_refused(labels: list[list[int]]) -> None:
    with pytest.raises(RequestError, match="tell the labels"):
        LabelTree(labels)


def test_labels_never_begin_each_other() -> None:
    for count in (2, 10, 26, 27, 255):
        labels = labels_of("choice", count)
        assert len(set(labels)) == count and len({len(label) for label in labels}) == 1
    assert labels_of("score", 10) == list("0123456789")


def test_a_model_that_rules_all_labels_out_is_not_confident() -> None:
    assert probabilities([[(0, 1)], [(0, 2)]], [{1: -math.inf, 2: -math.inf}]) == [0.5, 0.5]
    assert concentration([0.5, 0.5]) == 0 and concentration([0, 1.0, 0]) == 1
