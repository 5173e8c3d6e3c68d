"""Encode conversations for DeepSeek V4, which has an encoding of its own instead of a Jinja template.

`encoding/encoding_dsv4.py` in DeepSeek's checkpoints defines the format. The file is read, to find out which effort
texts the model knows, but never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pypto_serving.api.chat.formats import Calls, ChatOrigin, EncodedChat, OutputFormat
from pypto_serving.api.chat.parsers.dsml import MARK, to_json, write_calls, write_tools
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.chat.tools import as_object, check_effort, parameter_types, read_calls, read_tools, refuse
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ConfigError, ModelError, RequestError
from pypto_serving.types.structured import schema_of
from pypto_serving.util import brief, read_regular

Role = Literal["system", "user", "developer", "assistant", "latest_reminder"]
Message = Mapping[str, Any]
Call = tuple[str, Mapping[str, Any]]

ROLES = ("system", "user", "developer", "assistant", "tool", "latest_reminder")
INSTRUCTING: tuple[Role, ...] = ("system", "developer")
"""Roles whose messages may contain tools and a response_format."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. `tools` are OpenAI's function objects; `schema` is the JSON schema that the answer should follow.

    A user's `text` joins all messages between two answers: user messages and tool results. The model continues an
    assistant's turn that is not `ended`.
    """

    role: Role
    text: str
    tools: Sequence[Mapping[str, Any]] = ()
    schema: Mapping[str, Any] | None = None
    reasoning: str = ""
    calls: Sequence[Call] = ()
    ended: bool = True


def read_turns(messages: Sequence[Message]) -> list[Turn]:
    """Return the turns of a conversation. Raises RequestError that names the message at fault."""
    turns: list[Turn] = []
    said = _Said()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            refuse(f"{where}.role", f"is {brief(role)}, but must be one of {', '.join(ROLES)}")
        text = _text(message, "content", where)
        if role == "user":
            said.words(text)
        elif role == "tool":
            said.result(text, _text(message, "tool_call_id", where), where)
        else:
            turns += said.turns()
            turns.append(_turn(message, role, text, where))
        if role == "assistant" and message.get("tool_calls"):
            calls = enumerate(message["tool_calls"])
            said.expect([_text(call, "id", f"{where}.tool_calls[{i}]") for i, call in calls])
    return turns + said.turns()


def with_request(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None
) -> list[Turn]:
    """Add the request's tools and schema to the leading system or developer turn; make one if there is none."""
    if not tools and not schema:
        return list(turns)
    leads = bool(turns) and turns[0].role in INSTRUCTING
    head, rest = (turns[0], turns[1:]) if leads else (Turn("system", ""), turns)
    return [replace(head, tools=tools or head.tools, schema=schema or head.schema), *rest]


class _Said:
    """Collects the messages between two answers. Remembers the order of all earlier calls by their ids."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._num_calls = 0
        self._blocks: list[tuple[str | None, str]] = []
        self._have_ids: bool | None = None

    def expect(self, call_ids: Sequence[str]) -> None:
        """Remember the calls of an answer; a repeated id belongs to the later call."""
        for call_id in call_ids:
            self._num_calls += 1
            if call_id:
                self._places[call_id] = self._num_calls

    def words(self, text: str) -> None:
        self._blocks.append((None, text))

    def result(self, text: str, call_id: str, where: str) -> None:
        """Add a tool result. Either all results have ids, or none has one and they are in the order of their calls."""
        if call_id and call_id not in self._places:
            known = brief(list(self._places)) if self._places else "none"
            refuse(f"{where}.tool_call_id", f"is {brief(call_id)}, but the ids of earlier calls are {known}")
        if self._have_ids not in (None, bool(call_id)):
            refuse(f"{where}.tool_call_id", "must be in all results of an answer's calls, or in none of them")
        self._have_ids = bool(call_id)
        self._blocks.append((call_id, f"<tool_result>{text}</tool_result>"))

    def turns(self) -> list[Turn]:
        """Return the user's turn, or [] without messages. Tool results are sorted in the order of their calls."""
        if not self._blocks:
            return []
        results = [block for block in self._blocks if block[0] is not None]
        in_order = iter(sorted(results, key=lambda block: self._places.get(block[0] or "", 0)))
        texts = [text if call_id is None else next(in_order)[1] for call_id, text in self._blocks]
        self._blocks, self._have_ids = [], None
        return [Turn("user", "\n\n".join(texts))]


def _turn(message: Message, role: Role, text: str, where: str) -> Turn:
    """Make the turn of a message whose role is neither user nor tool."""
    if role == "assistant":
        reasoning = _text(message, "reasoning_content", where) or _text(message, "reasoning", where)
        open_ended = bool(message.get("prefix") or message.get("wo_eos"))
        calls = [(call["function"]["name"], as_object(arguments)) for call, arguments in read_calls(message, where)]
        return Turn(role, text, reasoning=reasoning, calls=calls, ended=not open_ended)
    if role == "developer" and not text:
        refuse(f"{where}.content", "is empty; a developer message must say something")
    tools = read_tools(message.get("tools"), f"{where}.tools")
    schema = message.get("response_format")
    if schema is not None and not isinstance(schema, dict):
        refuse(f"{where}.response_format", f"is {brief(schema)}, but must be a JSON schema")
    if role not in INSTRUCTING and (tools or schema is not None):
        refuse(where, "has tools or a response_format; only system and developer messages, and the request, may")
    return Turn(role, text, tools, schema)


def _text(entry: Message, field: str, where: str) -> str:
    """Return a string field, or "" if it is missing."""
    value = entry.get(field)
    if not isinstance(value, str | None):
        refuse(f"{where}.{field}", f"is {brief(value)}, but must be a string")
    return value or ""


BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
_SAYING = ("user", "developer")
NEEDED_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END)

_BEFORE_SCHEMA = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

_THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
FIRST_EFFORTS = {"low": "", "high": "", "max": _THOROUGH}
"""Text before a conversation in thinking mode, by effort, for the first releases of Flash, Pro and DSpark."""
LATER_EFFORTS = {"low": "", "high": _THOROUGH, "max": _EXHAUSTIVE}
"""Like FIRST_EFFORTS, for DeepSeek-V4-Flash-0731 and later."""
EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
}
"""The effort that DeepSeek's API uses for each `reasoning_effort`; "none" also turns thinking off."""

OPTIONS = ("thinking", "enable_thinking", "drop_thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Mode:
    """Options of the encoding: `thinking` or chat mode; `drop` earlier turns' reasoning; `effort` low, high or max."""

    thinking: bool = True
    drop: bool = True
    effort: str = "high"


@dataclass(frozen=True)
class DeepseekV4Encoder:
    """Encode conversations for DeepSeek V4. See ChatEncoder.

    `is_special` returns whether a text is a special token. The other flags say which parts of outputs are parsed.
    """

    request_fields: ClassVar[frozenset[str]] = frozenset({"response_format", "thinking"})

    efforts: Mapping[str, str] = field(default_factory=lambda: FIRST_EFFORTS)
    is_special: Callable[[str], bool] = lambda text: False
    parses_calls: bool = True
    parses_reasoning: bool = True

    @property
    def abilities(self) -> tuple[str, ...]:
        return ("tools",) * self.parses_calls + ("thinking",) * self.parses_reasoning

    def encode(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Write the conversation as text that begins with BOS. Raises RequestError that names the field at fault."""
        if not messages:
            refuse("messages", "is an empty list; send at least one message")
        options = dict(kwargs)
        tools = read_tools(options.pop("tools", None), "tools")
        wanted = options.pop("response_format", None)
        schema = schema_of(wanted) if isinstance(wanted, dict) else None  # for the prompt; a grammar enforces it
        schema = schema if isinstance(schema, dict) else None
        for name in ("documents", "chat_template"):
            if options.pop(name, None) is not None:
                refuse(name, "is not supported by DeepSeek V4, which has an encoding of its own; leave it out")
        continues = bool(options.pop("continue_final_message", False))
        asks = bool(options.pop("add_generation_prompt", not continues))
        if continues:
            messages = _continued(messages, asks)
        mode = read_mode(options)
        turns = with_request(read_turns(messages), tools, schema)
        continues = turns[-1].role == "assistant" and not turns[-1].ended
        if asks and turns[-1].role == "assistant" and not continues:
            refuse(
                f"messages[{len(messages) - 1}]",
                "is the assistant's, but the last message must ask for an answer; "
                "set its `prefix` to true to continue it",
            )
        prefix = self.efforts[mode.effort] if mode.thinking else ""
        try:
            text = BOS + prefix + write_turns(turns, mode, asks)
        except (ValueError, RecursionError) as error:  # integers of thousands of digits, deep nesting
            raise RequestError(f"messages or tools cannot be written as JSON: {error}", param="messages") from error
        if not asks and not continues:
            return EncodedChat(text)
        return EncodedChat(text, self._format(mode.thinking and not continues, turns))

    def _format(self, thinks: bool, turns: Sequence[Turn]) -> OutputFormat | None:
        """Return the format to parse outputs with; None if outputs are plain content."""
        tools = [tool for turn in turns for tool in turn.tools] if self.parses_calls else []
        types = {tool["name"]: parameter_types(tool.get("parameters") or {}) for tool in tools}
        calls = Calls("deepseek_v4", types) if tools else None
        thinking = Thinking(THINK, THINK_END, opened=True) if thinks and self.parses_reasoning else None
        if calls is None and thinking is None:
            return None
        return OutputFormat(thinking, calls, any(map(self.is_special, (THINK, THINK_END, MARK))))


def load(serving: ServingConfig, tokenizer: Tokenizer) -> DeepseekV4Encoder:
    """Load the encoder of a checkpoint. Raises ModelError if its tokenizer lacks a special token of the format."""
    origin(serving)
    for token in NEEDED_TOKENS:
        if tokenizer.raw.token_to_id(token) is None:
            raise ModelError(f"tokenizer.json has no token {token}, which chats of DeepSeek V4 need")
    try:
        encoding = read_regular(Path(serving.tokenizer_dir) / "encoding" / "encoding_dsv4.py").decode()
    except (OSError, ValueError):
        encoding = ""
    efforts = LATER_EFFORTS if "REASONING_EFFORT_PROMPTS" in encoding else FIRST_EFFORTS
    parses = serving.tool_call_parser != "none", serving.reasoning_parser != "none"
    return DeepseekV4Encoder(efforts, tokenizer.is_special, *parses)


def origin(serving: ServingConfig) -> ChatOrigin:
    """Describe the encoding. Raises ConfigError for an option that would have to replace it."""
    if serving.chat_template is not None:
        raise ConfigError("the option chat-template has no effect: DeepSeek V4 has an encoding of its own; drop it")
    for name, given, own in (
        ("tool-call-parser", serving.tool_call_parser, ("auto", "none", "deepseek_v4")),
        ("reasoning-parser", serving.reasoning_parser, ("auto", "none", "deepseek_r1")),
    ):
        if given not in own:
            raise ConfigError(f"{name} is {given}, but DeepSeek V4 needs {own[-1]}; drop the option, or give none")
    why = "DeepSeek V4 has an encoding instead of a template"
    return ChatOrigin(("its own", why), ("deepseek_v4", why), ("deepseek_r1", why))


def read_mode(options: Mapping[str, Any]) -> Mode:
    """Read the mode from a client's options; the default is thinking. Raises RequestError."""
    if unknown := sorted(options.keys() - set(OPTIONS)):
        names = ", ".join(unknown)[:200]
        refuse("chat_template_kwargs", f"has {names}, but this model knows only {', '.join(OPTIONS)}")
    effort = options.get("reasoning_effort")
    check_effort(effort, "reasoning_effort")
    said = [
        flag for flag in (_thinking(options.get("thinking")), _flag(options, "enable_thinking")) if flag is not None
    ]
    if len(set(said)) > 1:
        refuse("chat_template_kwargs", "has thinking and enable_thinking with different values; send one")
    thinking = said[0] if said else effort != "none"
    return Mode(thinking, _flag(options, "drop_thinking") is not False, EFFORTS[effort or "high"])


def write_turns(turns: Sequence[Turn], mode: Mode, asks: bool = True) -> str:
    """Write the turns of a conversation; with `asks`, also open the assistant's answer."""
    drops = mode.thinking and mode.drop and not any(turn.tools for turn in turns)
    if drops:
        last = _last_said(turns)
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
    last = _last_said(turns)
    written = []
    for i, turn in enumerate(turns):
        thinks = mode.thinking and (i >= last or not drops)
        written.append(_write(turn, thinks))
        if _hands_over(turns, i, asks):
            written.append(ASSISTANT + (THINK if thinks else THINK_END))
    return "".join(written)


def _continued(messages: Sequence[Mapping[str, Any]], asks: bool) -> Sequence[Mapping[str, Any]]:
    """Leave the last message open to be continued. Raises RequestError if it is not the assistant's."""
    if asks:
        refuse("continue_final_message", "and add_generation_prompt are both true; set one of them to false")
    if messages[-1].get("role") != "assistant":
        refuse("continue_final_message", "needs a last message of the assistant, to be continued")
    return [*messages[:-1], {**messages[-1], "prefix": True}]


def _last_said(turns: Sequence[Turn]) -> int:
    """Return the index of the last user or developer turn, or -1."""
    return max((i for i, turn in enumerate(turns) if turn.role in _SAYING), default=-1)


def _hands_over(turns: Sequence[Turn], i: int, asks: bool) -> bool:
    """Return whether the assistant's turn is opened after turn `i`.

    Unlike DeepSeek's code, open it also after final instructions, which agents send.
    """
    role = turns[i].role
    if i + 1 < len(turns):
        return role in _SAYING and turns[i + 1].role in ("assistant", "latest_reminder")
    is_open = role == "assistant" or (role == "latest_reminder" and i > 0 and turns[i - 1].role in _SAYING)
    return asks and not is_open


def _write(turn: Turn, thinks: bool) -> str:
    if turn.role == "assistant":
        reasoning = turn.reasoning + THINK_END if thinks else ""
        calls = "\n\n" + write_calls(turn.calls) if turn.calls else ""
        return reasoning + turn.text + calls + (EOS if turn.ended else "")
    before = {"user": USER, "developer": USER, "latest_reminder": REMINDER}.get(turn.role, "")
    tools = "\n\n" + write_tools(turn.tools) if turn.tools else ""
    schema = f"\n\n{_BEFORE_SCHEMA}{to_json(turn.schema)}" if turn.schema else ""
    return before + turn.text + tools + schema


def _thinking(value: Any) -> bool | None:
    """Read `thinking`: a flag in chat_template_kwargs, or the object of DeepSeek's API."""
    if isinstance(value, dict):
        value = {"enabled": True, "disabled": False}.get(str(value.get("type")), value)
    if not isinstance(value, bool | None):
        refuse(
            "thinking", "must be true or false in chat_template_kwargs, {'type': 'enabled' or 'disabled'} beside them"
        )
    return value


def _flag(options: Mapping[str, Any], name: str) -> bool | None:
    value = options.get(name)
    if not isinstance(value, bool | None):
        refuse(f"chat_template_kwargs.{name}", f"is {brief(value)}, but must be true or false")
    return value
