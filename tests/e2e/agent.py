"""An agent in a terminal, in the habits of Claude Code: what it sends of Anthropic's public protocol, by turns."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic.types.beta import BetaMessage

BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
EPHEMERAL = {"type": "ephemeral"}
_TEXT = {"type": "string"}
_FIELDS = {
    "Bash": ("command", "description"),
    "Read": ("file_path",),
    "Edit": ("file_path", "old_string", "new_string"),
    "Write": ("file_path", "content"),
    "Glob": ("pattern", "path"),
    "Grep": ("pattern", "path", "glob"),
    "TodoWrite": ("todos",),
    "WebFetch": ("url", "prompt"),
    "Task": ("description", "prompt"),
    "mcp__clock__now": (),
    "get_time": ("city",),
}
ORDER = ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta")


class Agent:
    """Holds a conversation. Each turn is streamed; before it, its tokens are counted, as such agents do."""

    def __init__(self, client: anthropic.Anthropic) -> None:
        self._client = client
        self._messages: list[dict[str, Any]] = []
        self._calls = 0
        self.counted: list[int] = []

    def turn(self, said: str | list[dict[str, Any]], tool_choice: dict[str, Any]) -> BetaMessage:
        """Send a user's message; return the answer, whose events must come in order."""
        self._calls += 1
        blocks = [{"type": "text", "text": said}] if isinstance(said, str) else said
        self._messages.append({"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": EPHEMERAL}]})
        prompt: Any = {"model": "bundled", "messages": self._messages, "system": self._system(), "tools": tools()}
        prompt |= {"thinking": {"type": "adaptive", "display": "summarized"}, "tool_choice": tool_choice}
        self.counted.append(self._client.beta.messages.count_tokens(**prompt, betas=BETAS).input_tokens)
        extra = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
        asked: Any = {**prompt, "max_tokens": 60, "metadata": {"user_id": "user_1_session_2"}}
        with self._client.beta.messages.stream(**asked, betas=BETAS, extra_body=extra) as stream:
            kinds = [event.type for event in stream if event.type in (*ORDER, "message_stop")]
            message = stream.get_final_message()
        assert kinds[0] == ORDER[0] and kinds[-2:] == [ORDER[-1], "message_stop"]
        assert kinds.count(ORDER[1]) == kinds.count(ORDER[3]) == len(message.content)
        content: list[Any] = [{"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"}]
        content += [{"type": "redacted_thinking", "data": "AAAA"}]
        content += [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]
        self._messages.append({"role": "assistant", "content": content})
        return message

    def results(self, message: BetaMessage, text: str, failed: bool = False) -> list[dict[str, Any]]:
        """Answer the calls of a message, with the reminder that such agents add."""
        content = [{"type": "text", "text": text}]
        calls = [block.id for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": i, "content": content, "is_error": failed} for i in calls]
        return [*results, {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"}]

    def _system(self) -> list[dict[str, Any]]:
        """Return the system's blocks; the first one changes with every request."""
        billing = f"x-anthropic-billing-header: cc_version=2.1.0.{self._calls}; cc_entrypoint=cli;"
        texts = [billing, "You are an agent in a terminal.", "# Tone\n" + "Be brief and exact. " * 20]
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        return [blocks[0], *({**block, "cache_control": EPHEMERAL} for block in blocks[1:])]


def tools() -> list[dict[str, Any]]:
    """Return the tools, the last one with a mark of the cache."""
    made = [
        {
            "name": name,
            "description": f"Use {name}.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": dict.fromkeys(fields, _TEXT),
                "required": list(fields[:1]),
                "additionalProperties": False,
            },
        }
        for name, fields in _FIELDS.items()
    ]
    return [*made[:-1], {**made[-1], "cache_control": EPHEMERAL}]
