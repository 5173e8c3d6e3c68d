"""A reader of bodies, as seen from the API process."""

from __future__ import annotations

import logging
from typing import get_args

import msgspec

from pypto_serving.api.common.body import Answered, Endpoint, ReadBody
from pypto_serving.api.reading.process import ReaderProcess, TooSlowError
from pypto_serving.api.reading.turns import Turns
from pypto_serving.api.reading.wire import Failure
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig

logger = logging.getLogger("pypto_serving.api")

QUICK_S = 0.5
"""CPU time to read a body where all usual ones are read, twice what long ones take; the rest is read anew elsewhere."""
READ_S = 10.0
"""CPU time to read a body there; each MiB of it may take one second more."""
MIB = 1 << 20
MAY_CHAT = frozenset[Endpoint]({"chat", "messages", "count_tokens", "tokenize", "decisions", "responses"})
"""Their bodies may hold a chat, whose template may not end."""
_FIELDS: dict[Endpoint, str | None] = {
    "completions": "prompt",
    "tokenize": None,
    "detokenize": "tokens",
    "decisions": "input",
    "responses": "input",
}
"""What takes long to read, where it is not the messages."""
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)


class BodyStart(msgspec.Struct, frozen=True):
    """What a reader of bodies needs to start. `channel` is the inherited file descriptor to the API process."""

    config: EngineConfig
    serving: ServingConfig
    channel: int


BODY_ANSWERS: msgspec.msgpack.Decoder[ReadBody | Answered | Failure] = msgspec.msgpack.Decoder(
    ReadBody | Answered | Failure
)


class BodyProcess:
    """Owns a reader of bodies, which has the shortest one read next, so that long ones delay none but their like."""

    def __init__(self, config: EngineConfig, serving: ServingConfig) -> None:
        serving = msgspec.structs.replace(serving, api_keys=())
        self.process: ReaderProcess[ReadBody | Answered] = ReaderProcess(
            "pypto_serving.api.reading", lambda channel: BodyStart(config, serving, channel), BODY_ANSWERS
        )
        self.turns = Turns[int](config.max_unfinished, int, "bodies that are not longer wait to be read")

    async def read(self, endpoint: Endpoint, raw: bytes | bytearray, allowed_s: float) -> ReadBody | Answered:
        """Read one body within so much CPU time. Raises what ReaderProcess.ask raises.

        A call that is cancelled before its turn costs nothing; a body that is being read is read to the end.
        """
        return await self.turns.run(len(raw), lambda: self.process.ask(ENDPOINTS.index(endpoint), raw, allowed_s))

    async def start(self) -> None:
        """Start the process if there is none, and wait until it can read. Raises UnavailableError."""
        await self.turns.run(0, self.process.ensure)

    async def close(self) -> None:
        """End the process, whatever it does, for good."""
        await self.process.close()


def longest_s(raw: bytes | bytearray) -> float:
    """Return the CPU time that a body may take."""
    return READ_S + len(raw) / MIB


def too_slow(endpoint: Endpoint, raw: bytes | bytearray) -> RequestError:
    """Log that a body took too long, and return the error."""
    advice = "send less text or fewer prompts"
    if endpoint in MAY_CHAT:
        advice = "send fewer or shorter messages; if short chats fail too, the model's chat template does not end"
    message = f"reading this request took more than {longest_s(raw):.0f} s of CPU time, so it was given up; {advice}"
    logger.error("a body of %s was given up after %.0f s of CPU time", endpoint, longest_s(raw))
    return RequestError(message, param=_FIELDS.get(endpoint, "messages"), code=TooSlowError.code)
