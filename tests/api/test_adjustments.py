"""Fields that change logits: what of them reaches the engine, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.generation.request import encode_bad_words
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.sampling import SamplingParams
from tests.api.bad_bodies import HELLO
from tests.api.checkpoint import write_checkpoint
from tests.api.running import RunningServer

BODIES = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": [HELLO]}}
FIELDS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -2,
    "repetition_penalty": 1.25,
    "logit_bias": {"5": -100, "7": 0.5},
    "allowed_token_ids": [3, 5, 7],
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_reach_the_engine(server: RunningServer, path: str) -> None:
    response = server.post(path, {**BODIES[path], **FIELDS, "bad_words": ["the end"]})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    params = server.engine.requests[-1].params
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -2.0, 1.25)
    assert (params.logit_bias, params.allowed_token_ids) == ({5: -100.0, 7: 0.5}, (3, 5, 7))
    assert params.bad_words == () and params.bad_word_ids
    server.post(path, {**BODIES[path], **dict.fromkeys([*FIELDS, "bad_words"])})
    assert server.engine.requests[-1].params.bad_word_ids == ()
    assert server.engine.requests[-1].params.logit_bias == {}


def test_bad_words_are_banned_with_and_without_a_space_before(tokenizer: Tokenizer) -> None:
    """Whatever white space they begin with, as vLLM has it, and each sequence once."""
    made = encode_bad_words(SamplingParams(bad_words=[" the", "the"], bad_word_ids=[[5]]), tokenizer)
    expected = [(5,), tuple(tokenizer.encode("the", False)), tuple(tokenizer.encode(" the", False))]
    assert list(made.bad_word_ids) == list(dict.fromkeys(expected)) and made.bad_words == ()
    plain = SamplingParams(bad_word_ids=((5,),))
    assert encode_bad_words(plain, None) is plain


def test_a_model_without_a_tokenizer_knows_no_words(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    server = start(write_checkpoint(tmp_path, tokenizer=False))
    response = server.post("/v1/completions", {"prompt": [5], "bad_words": ["a"]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "bad_words"
    assert "needs a tokenizer, which this model lacks" in response.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": [5], "presence_penalty": 1}).status_code == 200
