"""Serve POST /tokenize and /detokenize, and what else is answered by whoever reads the body."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import Answering, BodySource


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text, or of the prompt that a chat has."""
    return await answer_read(request, "tokenize")


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids."""
    return await answer_read(request, "detokenize")


async def answer_read(request: Request, endpoint: Answering) -> Response:
    """Answer as the reader of the body says."""
    reading: BodySource = request.app.state.reading
    answered = await reading.answer(request, endpoint)
    return Response(answered.content, 200, answered.ignored.header(), "application/json")
