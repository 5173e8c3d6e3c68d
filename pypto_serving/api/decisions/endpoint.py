"""Serve POST /v1/decisions."""

from __future__ import annotations

import uuid
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import BodySource
from pypto_serving.api.common.respond import respond_whole
from pypto_serving.api.decisions.answers import decide


async def create_decision(request: Request) -> Response:
    """Answer questions about an input with probabilities."""
    reading: BodySource = request.app.state.reading
    body = await reading.read(request, "decisions")
    wanted = body.generation(f"decision-{uuid.uuid4().hex}")
    return await respond_whole(request, wanted, partial(decide, body.model, body.asked), body.headers())
