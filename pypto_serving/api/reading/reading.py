"""Read small bodies in the API process, and others in the reader process, which also checks grammars."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial

import msgspec
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
from pypto_serving.api.prompting.jinja import TooManyStepsError, steps_limited
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.reading.body_reader import READERS
from pypto_serving.api.reading.process import QueueName, Reader, TooLargeError, TooSlowError
from pypto_serving.api.reading.wire import Compiles, Refusal, RefusedError
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.guidance import KnownGrammars, content_key
from pypto_serving.limits import CPU_S, cpu_limit_s
from pypto_serving.types.guide import Grammar, Guide

logger = logging.getLogger("pypto_serving.api")

SMALL_BYTES, SMALL_VALUES = 16 << 10, 128
"""Bodies with at most these bytes, and at most this many lists and strings, are read here, in a few milliseconds."""
LARGE_BYTES = 256 << 10
"""Larger bodies, and bodies with a chat template, wait in a queue of their own."""
_MAY_BRING_TEMPLATE = re.compile(rb'"chat_template"|\\u00(?:5[fF]|[67])')
"""Finds the field `chat_template`, or an escape of a letter of its name, which ordinary clients do not write."""
_WITHOUT_CHATS = ("completions", "detokenize")
"""Bodies of other endpoints may contain a chat, whose template may not terminate."""
_FIELDS: dict[Endpoint, str | None] = {
    "completions": "prompt",
    "tokenize": None,
    "detokenize": "tokens",
    "decisions": "input",
    "responses": "input",
    "input_tokens": "input",
}
"""The field to name when reading takes too long, if it is not `messages`."""


class Reading:
    """Reads bodies without blocking the event loop. Owned by the application; used in its event loop only.

    Small bodies are read here, including chats if the checkpoint's template takes few steps. Other bodies and all
    grammars go to the reader: only a process can be stopped while it computes.
    """

    def __init__(
        self,
        prompter: Prompter,
        serving: ServingConfig,
        require_admission: Callable[[int], None],
        warn_ignored: Callable[[list[str]], None],
    ) -> None:
        """`require_admission(n)` raises if n requests would not be admitted now; then the body is not read.

        `warn_ignored` is called with the names of unknown fields.
        """
        self._prompter = prompter
        self._serving = serving
        self._require_admission = require_admission
        self._warn_ignored = warn_ignored
        self._reader = Reader(prompter.config, serving)
        self._known = KnownGrammars[Compiles | Refusal]()

    async def read(self, request: Request, endpoint: Generating, prepare: Prepare | None = None) -> ReadBody:
        """Read the body, after `prepare` has changed it.

        Raises RequestError, or ClientDisconnect if the client leaves first.
        """
        with telling_when_parsed(request):
            read = await self._read(request, endpoint, prepare)
            assert isinstance(read, ReadBody)
            self._warn_ignored(read.ignored.names)
            return await self._with_checked_guide(request, read)

    async def answer(self, request: Request, endpoint: Answering, prepare: Prepare | None = None) -> Answered:
        """Return the answer to the body, after `prepare` has changed it. Raises like `read`."""
        with telling_when_parsed(request):
            answered = await self._read(request, endpoint, prepare)
            assert isinstance(answered, Answered)
            self._warn_ignored(answered.ignored.names)
            return answered

    async def _read(self, request: Request, endpoint: Endpoint, prepare: Prepare | None = None) -> ReadBody | Answered:
        require_json(request)
        self._require_admission(1)
        raw = await read_body(request, self._serving.max_body_bytes)
        if prepare is not None:
            raw = prepare(raw)
        repeats_input = endpoint == "decisions"
        if is_small(raw) and not repeats_input and not self._may_bring_template(raw):
            try:
                with steps_limited():
                    return READERS[endpoint](self._prompter, self._serving, raw)
            except TooManyStepsError:
                logger.debug("a chat template takes many steps; the reader runs it")
        self._require_admission(1)
        return await until_disconnect(request.receive, self._read_apart(endpoint, raw, host_of(request)))

    def _may_bring_template(self, raw: bytes | bytearray) -> bool:
        return self._serving.trust_request_chat_template and _MAY_BRING_TEMPLATE.search(raw) is not None

    async def _read_apart(self, endpoint: Endpoint, raw: bytearray, host: str) -> ReadBody | Answered:
        is_large = len(raw) > LARGE_BYTES or self._may_bring_template(raw)
        name: QueueName = "large bodies" if is_large else "bodies"
        try:
            answer = await self._reader.at_turn(name, host, partial(self._reader.do, name, host, endpoint, raw))
        except TooSlowError:
            raise _too_slow(endpoint, cpu_limit_s(len(raw))) from None
        assert not isinstance(answer, Compiles)
        return answer

    async def _with_checked_guide(self, request: Request, read: ReadBody) -> ReadBody:
        guide = read.params.guide
        if guide is None or guide.grammar is None:
            return read
        self._require_admission(1)
        check = self.check_guide(guide, host_of(request))
        return with_guide(read, await until_disconnect(request.receive, check))

    async def check_guide(self, guide: Guide, host: str = "") -> Guide:
        """Check that a guide's grammar compiles; return the guide with the grammar in a syntax that workers read.

        Raises RequestError that names the guide's field, UnavailableError if the machine is too busy, and RuntimeError
        if the reader fails on the grammar. A call that is cancelled while it waits in the queue costs nothing.
        """
        grammar = guide.grammar
        if grammar is None:
            return guide
        key = content_key(grammar)
        if (verdict := self._known.find(key)) is None:
            verdict = await self._reader.at_turn("grammars", host, partial(self._judge, grammar, key, host))
        if isinstance(verdict, Refusal):
            raise RequestError(f"{guide.field}: {verdict.message}", param=guide.field, code=verdict.code)
        return msgspec.structs.replace(guide, grammar=verdict.grammar or grammar, client=host)

    async def _judge(self, grammar: Grammar, key: int, host: str) -> Compiles | Refusal:
        """Compile a grammar, unless an equal one earlier in the queue has been compiled meanwhile."""
        if (verdict := self._known.find(key)) is None:
            verdict = await self._compile(grammar, host)
            translated = verdict.grammar if isinstance(verdict, Compiles) else None
            self._known.add(key, verdict, 0 if translated is None else len(translated.text))
        return verdict

    async def _compile(self, grammar: Grammar, host: str) -> Compiles | Refusal:
        try:
            answer = await self._reader.do("grammars", host, "grammar", msgspec.msgpack.encode(grammar))
        except TooSlowError:
            logger.error("a grammar was given up after %g s of CPU time", CPU_S)
            message = f"it took more than {CPU_S:g} s of CPU time to compile; send a simpler one"
            return Refusal(400, message, TooSlowError.code, None)
        except TooLargeError:
            return Refusal(400, "it takes too much memory to compile; send a simpler one", TooLargeError.code, None)
        except RefusedError as error:
            return Refusal(error.status, str(error), error.code, None)
        assert isinstance(answer, Compiles)
        return answer

    async def close(self) -> None:
        """End the reader."""
        await self._reader.close()


def host_of(request: Request) -> str:
    """Return the host that a request comes from."""
    client = request.scope.get("client")
    return client[0] if client else ""


def is_small(raw: bytes | bytearray) -> bool:
    """Return whether a body is short and has few lists and strings, so also few prompts, which are lists or strings."""
    return len(raw) <= SMALL_BYTES and raw.count(b"[") + raw.count(b'"') // 2 <= SMALL_VALUES


def _too_slow(endpoint: Endpoint, allowed_s: float) -> RequestError:
    """Log that a body took too long to read, and return the client's error."""
    advice = "send less text or fewer prompts"
    if endpoint not in _WITHOUT_CHATS:
        advice = "send fewer or shorter messages; if short chats fail too, the model's chat template does not end"
    message = f"reading this request took more than {allowed_s:.0f} s of CPU time, so it was given up; {advice}"
    logger.error("a body of %s was given up after %.0f s of CPU time", endpoint, allowed_s)
    return RequestError(message, param=_FIELDS.get(endpoint, "messages"), code=TooSlowError.code)
