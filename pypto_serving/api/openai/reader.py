"""Read the bodies of both endpoints."""

from __future__ import annotations

from msgspec.structs import replace

from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.generation.structured import checked
from pypto_serving.api.openai.body import Endpoint, ReadBody
from pypto_serving.api.openai.chat_body import read_chat
from pypto_serving.api.openai.completion_body import read_completion
from pypto_serving.api.settings import ServingConfig

_READ = {"completions": read_completion, "chat": read_chat}


class BodyReader:
    """Parse bodies, check their fields, and make their prompts. Does not change; takes as long as a body makes it.

    A body is complete once `check` has seen it, too.
    """

    def __init__(self, prompter: Prompter, serving: ServingConfig) -> None:
        self.prompter = prompter
        self.serving = serving

    def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> ReadBody:
        """Return what the body says. Raises RequestError that names the field at fault."""
        return _READ[endpoint](self.prompter, self.serving, raw)

    def check(self, read: ReadBody) -> ReadBody:
        """Return `read` with a grammar that compiles, which only a process that can be stopped should find out.

        Raises RequestError that names the field at fault.
        """
        return replace(read, params=checked(read.params))
