"""Encode chats with the checkpoint's Jinja template, in a sandbox, with Hugging Face's template helpers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pypto_serving.api.chat import EncodedChat
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.files import load_special_tokens, read_optional_json
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.util import read_regular

logger = logging.getLogger("pypto_serving.api")

MAX_CHARS = 256 << 20
"""Longest output of a template; no context holds more."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


class TemplateEncoder:
    """Render a compiled template. See ChatEncoder."""

    request_fields = frozenset[str]()
    runs_templates = True

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. Raises ModelError if it is not a valid template."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template of this model is not valid Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def encode(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Render the conversation. Raises RequestError with the template's own message."""
        try:
            values = self._special_tokens | {"messages": list(messages)} | dict(kwargs)
            return EncodedChat(self._render(values))
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template may fail in any way on unexpected messages
            detail = f"{type(error).__name__}: {error}"
            raise RequestError(f"the chat template failed on these messages: {detail}", param="messages") from error

    def _render(self, values: Mapping[str, Any]) -> str:
        pieces, num_chars = [], 0
        for piece in self._template.generate(values):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                message = f"the chat template writes more than {MAX_CHARS} characters for these messages; send fewer"
                raise RequestError(message, param="messages")
        return "".join(pieces)


def load(serving: ServingConfig, tokenizer: Tokenizer) -> TemplateEncoder:
    """Find and compile the template. Raises ModelError if there is none or it is damaged."""
    source, origin = find_template(Path(serving.model_dir), serving.chat_template)
    logger.info("chat template from %s", origin)
    return TemplateEncoder(source, load_special_tokens(serving.model_dir))


def origin(serving: ServingConfig) -> tuple[str, str]:
    """Return the template's file and why it was chosen. Raises ModelError like `load`."""
    source, path = find_template(Path(serving.model_dir), serving.chat_template)
    TemplateEncoder(source, {})
    return (path.name, "from the model's files") if serving.chat_template is None else (str(path), "given")


def find_template(model_dir: Path, override: str | None = None) -> tuple[str, Path]:
    """Return a template's source and file: the override, else the one Hugging Face would use. Raises ModelError."""
    if override is not None:
        return _read_text(Path(override)), Path(override)
    if (model_dir / "chat_template.jinja").is_file():
        return _read_text(model_dir / "chat_template.jinja"), model_dir / "chat_template.jinja"
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = _choose(read_optional_json(model_dir / name).get("chat_template"))
        if source is not None:
            return source, model_dir / name
    raise ModelError("this model has no chat template")


def _choose(declared: object) -> str | None:
    """Return the template in a `chat_template` value: a string, or the entry "default" of a list of named ones."""
    if isinstance(declared, str):
        return declared
    if not isinstance(declared, list):
        return None
    named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
    source = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    return source if isinstance(source, str) else None


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """Render the body of `{% generation %}`, a tag that matters in training only."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Compute nothing while compiling: `9 ** 9 ** 9` would never end, and compiling has no bound of its own."""

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(
        self, node: jinja2.nodes.EvalContextModifier, frame: jinja2.compiler.Frame
    ) -> NoReturn:
        self.fail("the tag autoescape is not supported", node.lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum")
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)
