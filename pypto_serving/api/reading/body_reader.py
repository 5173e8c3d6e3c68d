"""Read the bodies of all endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pypto_serving.api.anthropic.messages_body import read_count_tokens, read_messages
from pypto_serving.api.common.body import Answered, Endpoint, ReadBody
from pypto_serving.api.decisions.decision_body import read_decision
from pypto_serving.api.ollama.ollama_body import read_ollama_chat, read_ollama_generate
from pypto_serving.api.openai.bodies import read_chat, read_completion
from pypto_serving.api.openai.tokenize import read_detokenize, read_tokenize
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.responses.response_body import read_input_tokens, read_response
from pypto_serving.api.settings import ServingConfig

READERS: dict[Endpoint, Callable[[Prompter, ServingConfig, bytes | bytearray], ReadBody | Answered]] = {
    "completions": read_completion,
    "chat": read_chat,
    "messages": read_messages,
    "responses": read_response,
    "ollama_chat": partial(read_ollama_chat, read_chat),
    "ollama_generate": partial(read_ollama_generate, read_chat, read_completion),
    "count_tokens": read_count_tokens,
    "input_tokens": read_input_tokens,
    "decisions": read_decision,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
}
"""What parses the body of an endpoint, checks its fields and makes its prompts. A hostile body may take very long.

Does not check whether grammars compile. Raises RequestError that names the field at fault.
"""
