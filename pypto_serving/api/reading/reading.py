"""Decide where a body is read: small ones here, others by a reader. Grammars have a reader of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

from starlette.requests import Request

from pypto_serving.api.common.body import (
    Answered,
    Answering,
    Endpoint,
    Generating,
    Prepare,
    ReadBody,
    read_body,
    require_json,
    telling_when_parsed,
    with_guide,
)
from pypto_serving.api.common.respond import until_disconnect
from pypto_serving.api.reading import bodies
from pypto_serving.api.reading.bodies import BodyProcess
from pypto_serving.api.reading.grammars import Grammars
from pypto_serving.api.reading.process import TooSlowError
from pypto_serving.api.reading.reader import BodyReader

SMALL_BYTES, SMALL_VALUES = 16 << 10, 128
"""A body of at most this size, with at most so many lists and strings, is read at once, in a few milliseconds."""
QUICK_BYTES = 256 << 10
"""Larger bodies, and chats with a template of their own, have another reader, so that they hold up nobody else's."""

_MAY_BRING_TEMPLATE = re.compile(rb'"chat_template"|\\u00(?:5[fF]|[67])')
"""The field's name, or the escape of a character as it has, which no program needs to write."""


class Reading:
    """Read bodies so that none holds up the event loop. Owned by the application; used in its event loop only.

    Chats that run a template of the checkpoint always go to a reader, and grammars to theirs, since only a process can
    be stopped. No body waits for a grammar of another one, and a usual one for each that has its turn before it waits
    for QUICK_S of CPU time at most.
    """

    def __init__(
        self,
        reader: BodyReader,
        require_admission: Callable[[int], None],
        warn_ignored: Callable[[list[str]], None],
    ) -> None:
        """`require_admission` raises if so many requests would not be admitted now: then none of them is read.

        `warn_ignored` is told of unknown fields.
        """
        self._here = reader
        self._require_admission = require_admission
        self._warn_ignored = warn_ignored
        config, serving = reader.prompter.config, reader.serving
        self._quick = BodyProcess(config, serving)
        self._slow = BodyProcess(config, serving)
        self._grammars = Grammars(config.max_unfinished)

    async def read(self, request: Request, endpoint: Generating, prepare: Prepare | None = None) -> ReadBody:
        """Return what the body says, once `prepare` changed it.

        Raises RequestError, and ClientDisconnect if the client leaves before.
        """
        with telling_when_parsed(request):
            read = await self._read(request, endpoint, prepare)
            assert isinstance(read, ReadBody)
            self._warn_ignored(read.ignored.names)
            return await self._with_checked_guide(request, read)

    async def answer(self, request: Request, endpoint: Answering) -> Answered:
        """Return the answer to the body. Raises like `read`."""
        with telling_when_parsed(request):
            answered = await self._read(request, endpoint)
            assert isinstance(answered, Answered)
            self._warn_ignored(answered.ignored.names)
            return answered

    async def _read(self, request: Request, endpoint: Endpoint, prepare: Prepare | None = None) -> ReadBody | Answered:
        require_json(request)
        self._require_admission(1)
        raw = await read_body(request, self._here.serving.max_body_bytes)
        if prepare is not None:
            raw = prepare(raw)
        templates = endpoint in bodies.MAY_CHAT and self._here.prompter.chat_encoder.runs_templates
        if is_small(raw) and not templates and endpoint != "decisions":  # which may repeat its input many times
            return self._here.read(endpoint, raw)
        self._require_admission(1)
        return await until_disconnect(request.receive, self._read_apart(endpoint, raw))

    async def _with_checked_guide(self, request: Request, read: ReadBody) -> ReadBody:
        guide = read.params.guide
        if guide is None or guide.grammar is None:
            return read
        self._require_admission(1)
        check = self._grammars.check(guide, request.scope.get("client"))
        return with_guide(read, await until_disconnect(request.receive, check))

    async def _read_apart(self, endpoint: Endpoint, raw: bytearray) -> ReadBody | Answered:
        """Have a body read by a process: a usual one by the quick reader, but by the other one if it takes too long."""
        if is_quick(raw, self._here.serving.trust_request_chat_template):
            with suppress(TooSlowError):
                return await self._quick.read(endpoint, raw, bodies.QUICK_S)
        try:
            return await self._slow.read(endpoint, raw, bodies.longest_s(raw))
        except TooSlowError:
            raise bodies.too_slow(endpoint, raw) from None

    async def start(self) -> None:
        """Start the reader of usual bodies before the first one comes. Raises UnavailableError."""
        await self._quick.start()

    async def close(self) -> None:
        """End the readers."""
        await self._quick.close()
        await self._slow.close()
        await self._grammars.close()


def is_small(raw: bytes | bytearray) -> bool:
    """Return whether a body is read at once: prompts are lists or strings, so there are few of them."""
    return len(raw) <= SMALL_BYTES and raw.count(b"[") + raw.count(b'"') // 2 <= SMALL_VALUES


def is_quick(raw: bytes | bytearray, trusts_templates: bool) -> bool:
    """Return whether a body takes no longer than most: it is not large and, if that is allowed, brings no template."""
    return len(raw) <= QUICK_BYTES and not (trusts_templates and _MAY_BRING_TEMPLATE.search(raw))
