"""Encode chats with a Jinja template: from the checkpoint, from an option, or from the request."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from pypto_serving.api.chat.formats import Calls, ChatOrigin, EncodedChat, OutputFormat
from pypto_serving.api.chat.parsers.families import FAMILIES, HABITS, Habit, choose_family, choose_habit
from pypto_serving.api.chat.parsers.scanner import Thinking
from pypto_serving.api.chat.tools import check_effort, parameter_types, read_calls, read_tools, refuse
from pypto_serving.api.prompting import tools_in_words
from pypto_serving.api.prompting.jinja import TooManyStepsError, compile_template, render, steps_limited
from pypto_serving.api.prompting.manners import Manners, Message, ToolPlace, place_tools
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.files import load_special_tokens, read_optional_json
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.util import brief, read_regular

logger = logging.getLogger("pypto_serving.api")

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "raise_exception",
        "strftime_now",
    }
)
DEFAULT = "default"
"""The name of the template for chats without tools, where a checkpoint has several."""
_CUT_HERE = "\ue000the answer goes on here\ue001 "
"""Appended to a message that the model shall continue, to find its end in the prompt."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template, and the format of its model's outputs.

    `family`: the form of tool calls, or "none" to parse no calls, and `reason` why it was chosen; `habit`: the marks of
    reasoning, or None to parse no reasoning. `manners` fit conversations to the template. `tools`: where it takes them.
    """

    compiled: jinja2.Template
    manners: Manners
    tools: ToolPlace | None
    knows_developers: bool
    family: str
    reason: str
    habit: Habit | None

    @classmethod
    def make(
        cls, source: str, special_tokens: Mapping[str, str], tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> ChatTemplate:
        """Compile `source`; "auto" chooses a parser by the template. Raises ModelError if it is not valid."""
        compiled = compile_template(source)
        values = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        manners = Manners(lambda messages, more: render(compiled, {**values, **more, "messages": messages}))
        tools = _find_place(source, manners)
        family, reason = choose_family(source, tools is not None)
        if tool_parser != "auto":
            family, reason = tool_parser, "given"
        habit = choose_habit(source)[0] if reasoning_parser == "auto" else reasoning_parser
        roles = "developer" in source
        return cls(compiled, manners, tools, roles, family, reason, HABITS.get(habit))


def _find_place(source: str, manners: Manners) -> ToolPlace | None:
    """Return where a template takes tools; None if it does not show them. One that runs for long is believed."""
    if re.search(r"\b(tools|functions)\b", source) is None:
        return None
    try:
        with steps_limited():
            return manners.place_of_tools
    except TooManyStepsError:
        return "tools"


class TemplateEncoder:
    """Encodes chats by rendering a template. See ChatEncoder.

    `is_special` returns whether a text is a special token. Without a `source`, requests must contain a template.
    """

    request_fields = frozenset[str]()

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        is_special: Callable[[str], bool] = lambda text: False,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        tool_source: str | None = None,
    ) -> None:
        """Compile `source`, and `tool_source`, which chats with tools use instead. Raises ModelError if one is bad."""
        self._parsers = (tool_parser, reasoning_parser)
        self._special_tokens = dict(special_tokens)
        self._template = None if source is None else self._make(source)
        self._tool_template = self._template if tool_source in (None, source) else self._make(str(tool_source))
        self._is_special = is_special

    @property
    def abilities(self) -> tuple[str, ...]:
        if self._template is None or self._tool_template is None:
            return ()
        calls = self._tool_template.tools is not None and self._tool_template.family != "none"
        return ("tools",) * calls + ("thinking",) * (self._template.habit is not None)

    def _make(self, source: str) -> ChatTemplate:
        return ChatTemplate.make(source, self._special_tokens, *self._parsers)

    def encode(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Render the conversation. Raises RequestError, with the template's own message if it has one."""
        options = dict(kwargs)
        functions = read_tools(options.get("tools"), "tools")
        template = self._choose(options.pop("chat_template", None), bool(functions))
        continues = _continues(options)
        given = template_messages(messages, template.knows_developers and template.manners.takes_developers)
        given = template.manners.fit(_in_words(template, given, functions))
        continued = _open_last(given) if continues else None
        given, more = place_tools(template.tools, given, functions)
        none = {"tools": None, "documents": None}
        values = {**self._special_tokens, **none, **more, **_with_effort(options), "messages": given}
        if template.tools != "tools":  # it fails with them, or shows them elsewhere
            values["tools"] = None
        prompt = render(template.compiled, values)
        if continues:
            prompt = _cut(prompt)
        return EncodedChat(prompt, self._format(template, prompt, continued, functions))

    def _choose(self, source: Any, with_tools: bool) -> ChatTemplate:
        own = self._tool_template if with_tools else self._template
        if source is None and own is not None:
            return own
        if not isinstance(source, str):
            refuse("chat_template", f"is {brief(source)}, but must be a Jinja template: this model has none of its own")
        try:
            return self._make(source)
        except ModelError as error:
            raise RequestError(str(error).replace(" of this model", ""), param="chat_template") from error

    def _format(
        self,
        template: ChatTemplate,
        prompt: str,
        continued: str | None,
        functions: Sequence[Mapping[str, Any]],
    ) -> OutputFormat | None:
        """Return the format to parse outputs with; None if outputs are plain content."""
        thinking = None if template.habit is None else template.habit.thinking(prompt, continued)
        calls, marks, family = None, [], FAMILIES.get(template.family)
        if thinking is not None:
            marks += [thinking.start, thinking.end]
        if functions and family is not None:
            types = {function["name"]: parameter_types(function.get("parameters") or {}) for function in functions}
            calls = Calls(template.family, types)
            marks += family.marks
            if thinking is not None:
                thinking = Thinking(thinking.start, thinking.end, thinking.opened, family.end_thinking)
        if thinking is None and calls is None:
            return None
        return OutputFormat(thinking, calls, any(map(self._is_special, marks)))


def _in_words(template: ChatTemplate, given: list[Message], functions: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Describe in texts what the template does not show of tools, calls and results. Raises RequestError."""
    has_calls = any("tool_calls" in message or message["role"] == "tool" for message in given)
    if template.tools is not None:
        form = FAMILIES.get(template.family) if has_calls and not template.manners.shows_calls else None
        in_line = form is not None and form.arguments in ("json", "python")
        return tools_in_words.calls_in_text(given, form) if form is not None and in_line else given
    if functions and template.family != tools_in_words.FAMILY:
        described = f"describes no tools, and the server does so only in the form {tools_in_words.FAMILY}"
        refuse("tools", f"cannot be used: the chat template {described}, not for tool_call_parser {template.family}")
    if functions or (has_calls and not template.manners.shows_calls):
        return tools_in_words.in_words(given, functions)
    return given


def _continues(options: dict[str, Any]) -> bool:
    """Remove `continue_final_message` from `options` and return it. If true, `add_generation_prompt` becomes false."""
    continues = bool(options.pop("continue_final_message", False))
    if continues and options.get("add_generation_prompt"):
        refuse("continue_final_message", "and add_generation_prompt are both true; set one of them to false")
    options["add_generation_prompt"] = options.get("add_generation_prompt", not continues)
    return continues


def _open_last(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message; return its text."""
    if not messages or messages[-1].get("role") != "assistant" or not messages[-1]["content"]:
        refuse("continue_final_message", "needs a last message of the assistant with content, to be continued")
    text = str(messages[-1]["content"])
    messages[-1]["content"] = text + _CUT_HERE
    return text


def _cut(prompt: str) -> str:
    """Cut the prompt after the continued message, without trailing white space if the template strips it."""
    before, mark, after = prompt.rpartition(_CUT_HERE.rstrip())
    if not mark:
        refuse("continue_final_message", "cannot be honoured: the chat template does not show the last message")
    return before if after.startswith(" ") else before.rstrip()


def _with_effort(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add the meaning of `reasoning_effort` for templates that can only turn thinking on or off."""
    effort = options.get("reasoning_effort")
    if effort is None:
        return dict(options)
    check_effort(effort, "reasoning_effort")
    return {"enable_thinking": effort != "none", **options}


def load(serving: ServingConfig, tokenizer: Tokenizer) -> TemplateEncoder:
    """Find and compile the template. Raises ModelError if it is damaged, or missing while requests cannot have one."""
    source: str | None = None
    tool_source: str | None = None
    try:
        source, origin = find_template(Path(serving.tokenizer_dir), serving.chat_template)
        tool_source, _ = find_template(Path(serving.tokenizer_dir), serving.chat_template, "tool_use")
        logger.info("chat template from %s", origin)
    except ModelError as error:
        if serving.chat_template is not None or not serving.trust_request_chat_template:
            raise
        logger.warning("each chat request must have its own chat_template: %s", error)
    special = load_special_tokens(serving.tokenizer_dir)
    parsers = serving.tool_call_parser, serving.reasoning_parser
    return TemplateEncoder(source, special, tokenizer.is_special, *parsers, tool_source)


def origin(serving: ServingConfig) -> ChatOrigin:
    """Return names and reasons for the template and both parsers. Raises ModelError like `load`."""
    source, path = find_template(Path(serving.tokenizer_dir), serving.chat_template)
    tool_source, _ = find_template(Path(serving.tokenizer_dir), serving.chat_template, "tool_use")
    TemplateEncoder(source, {})
    tools = ChatTemplate.make(tool_source, load_special_tokens(serving.tokenizer_dir))
    found = (path.name, "from the model's files") if serving.chat_template is None else (str(path), "given")
    return ChatOrigin(found, (tools.family, tools.reason), choose_habit(source))


def find_template(model_dir: Path, override: str | None = None, name: str = DEFAULT) -> tuple[str, Path]:
    """Return the source and file of `override`, else of the checkpoint's template of this name. Raises ModelError.

    Without that it is the one named "default", and without both the first.
    """
    if override is not None:
        return _read_text(Path(override)), Path(override)
    named = _named_templates(model_dir)
    if not named:
        raise ModelError("this model has no chat template")
    return named.get(name) or named.get(DEFAULT) or next(iter(named.values()))


def _named_templates(model_dir: Path) -> dict[str, tuple[str, Path]]:
    """Return the templates of a checkpoint by name, from where Hugging Face looks first."""
    own = model_dir / "chat_template.jinja"
    others = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    files = ({DEFAULT: own} if own.is_file() else {}) | others
    if files:
        return {name: (_read_text(path), path) for name, path in files.items()}
    for path in (model_dir / "chat_template.json", model_dir / "tokenizer_config.json"):
        declared = read_optional_json(path).get("chat_template")
        listed = [{"name": DEFAULT, "template": declared}] if isinstance(declared, str) else declared
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        named = {str(e.get("name")): (e["template"], path) for e in entries if isinstance(e.get("template"), str)}
        if named:
            return named
    return {}


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from error


def template_messages(messages: Sequence[Mapping[str, Any]], knows_developers: bool = True) -> list[dict[str, Any]]:
    """Return messages for a template. Raises RequestError that names the field at fault.

    - Null fields and empty lists of calls are dropped, since templates test whether a field exists.
    - The arguments of a call become an object; text that is not a JSON object stays text.
    - Reasoning is given under both names, `reasoning` and `reasoning_content`.
    - If the template lacks the role developer, developer messages become system messages.
    """
    given = [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for message in given:
        if message["role"] == "developer" and not knows_developers:
            message["role"] = "system"
    return given


def _template_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    made.pop("tool_calls", None)
    calls = [
        {**call, "type": "function", "function": {**call["function"], "arguments": arguments}}
        for call, arguments in read_calls(message, where)
    ]
    if calls:
        made["tool_calls"] = calls
    for name in ("reasoning_content", "reasoning"):
        if not isinstance(made.get(name), str | None):
            refuse(f"{where}.{name}", f"is {brief(made[name])}, but must be a string")
    if thought := made.get("reasoning_content") or made.get("reasoning"):
        made |= {"reasoning_content": thought, "reasoning": thought}
    return made
