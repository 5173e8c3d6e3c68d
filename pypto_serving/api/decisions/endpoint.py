"""Describe and make the answer of POST /v1/decisions."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import ReadBody
from pypto_serving.api.common.described import Answer, ResponseUsage
from pypto_serving.api.common.respond import respond_whole
from pypto_serving.api.generation.choice import ChoiceOutput, TokenUsage
from pypto_serving.api.generation.labels import Asked, concentration, probabilities
from pypto_serving.errors import RequestFailedError


class PredicateAnswer(Answer, tag="predicate", tag_field="type"):
    """`probability`: the probability that the statement is true."""

    name: str | None
    probability: float


class ChoiceProbability(Answer):
    value: str | bool
    probability: float


class ChoiceAnswer(Answer, tag="choice", tag_field="type"):
    """The most probable choice; `confidence` is 0 if all are equally probable, 1 if one is certain."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(Answer):
    value: int
    label: str
    probability: float


class ScoreAnswer(Answer, tag="score", tag_field="type"):
    """The expected level, counted from 0; `confidence` as in ChoiceAnswer."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


class Decision(Answer):
    """The answer of POST /v1/decisions: `answers` in the order of the questions, each of its question's type.

    `usage` counts the tokens of all prompts, of which each read has one, and one output token per read.
    """

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage


def decide(model: str, asked: Sequence[Asked], outputs: Sequence[ChoiceOutput], usage: TokenUsage) -> Decision:
    """Compute the answer from the outputs of all reads. Raises RequestFailedError if one lacks log-probabilities."""
    if not all(output.logprobs for output in outputs):
        raise RequestFailedError("the engine ended this request without log-probabilities; send it again")
    firsts = [output.logprobs[0].top for output in outputs if output.logprobs]
    reads = [{token.token_id: token.logprob for token in first} for first in firsts]
    return Decision(model, [_answer(each, probabilities(each.paths, reads)) for each in asked], ResponseUsage.of(usage))


def _answer(asked: Asked, found: list[float]) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    if asked.kind == "predicate":
        return PredicateAnswer(asked.name, found[0])
    pairs = list(zip(asked.values, found, strict=True))
    sure = concentration(found)
    if asked.kind == "choice":
        best = max(range(len(found)), key=found.__getitem__)
        return ChoiceAnswer(asked.name, asked.values[best], sure, [ChoiceProbability(*pair) for pair in pairs])
    levels = [ScoreProbability(i, str(label), each) for i, (label, each) in enumerate(pairs)]
    return ScoreAnswer(asked.name, math.fsum(i * each for i, each in enumerate(found)), sure, levels)


async def create_decision(request: Request) -> Response:
    """Answer questions about an input with probabilities."""
    body: ReadBody = await request.app.state.reading.read(request, "decisions")
    wanted = body.generation(f"decision-{uuid.uuid4().hex}")
    return await respond_whole(request, wanted, partial(decide, body.model, body.asked), body.headers())
