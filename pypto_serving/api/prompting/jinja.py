"""Compile and run Jinja templates as Hugging Face does, in a sandbox, with its helpers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from pypto_serving.errors import ModelError, RequestError

MAX_CHARS = 256 << 20
"""Longest output of a template; no model's context is longer."""
MAX_REPEATED = 1 << 20
"""Largest length, in characters or values, of a text or list that `*` makes."""
MAX_POWER_BITS = 1 << 16
"""Largest size, in bits, of an integer that `**` makes."""
MAX_STEPS, MAX_STEPS_CHARS = 4000, 32 << 10
"""Limits of a template under `steps_limited`: steps (rounds of loops, and calls), and length, in characters or values,
of any text or list that it makes. A chat in a small body takes a few steps per message and tool, a few milliseconds in
all; tokenizing a prompt of at most MAX_STEPS_CHARS takes a few more."""
VALUES_PER_STEP = 64
"""Characters or values that a call or filter processes per counted step."""
_steps_left: ContextVar[list[int] | None] = ContextVar("_steps_left", default=None)
"""Remaining steps of the running template, as a list of one number; None without a limit."""


class TooManyStepsError(Exception):
    """A template takes more steps than are allowed here."""


@contextmanager
def steps_limited() -> Iterator[None]:
    """Raise TooManyStepsError from templates that take more than MAX_STEPS within the block."""
    token = _steps_left.set([MAX_STEPS])
    try:
        yield
    finally:
        _steps_left.reset(token)


def _count_steps(count: int = 1) -> None:
    if (left := _steps_left.get()) is not None:
        left[0] -= count
        if left[0] < 0:
            raise TooManyStepsError


def _check_size(size: int) -> None:
    if size > MAX_STEPS_CHARS and _steps_left.get() is not None:
        raise TooManyStepsError


def _size(value: Any) -> int:
    """Return the size of a value: its characters or values, or the bits of an integer; 0 for other types."""
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 0


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: under `steps_limited`, count steps by its arguments, and limit its numbers and its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _steps_left.get() is None:
            return function(*args, **kwargs)
        given = (*args, *kwargs.values())
        for value in given:
            if isinstance(value, int):
                _check_size(abs(value))
        _count_steps(1 + sum(map(_size, given)) // VALUES_PER_STEP)
        result = function(*args, **kwargs)
        _check_size(_size(result))
        return result

    return call


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raises ModelError if it is not valid."""
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template of this model is not valid Jinja: {error}") from error


def render(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Run a template. Raises RequestError with the template's own message."""
    try:
        return _join(template.generate(values))
    except (RequestError, TooManyStepsError):
        raise
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
    except Exception as error:  # a template may fail in any way on unexpected messages
        detail = f"{type(error).__name__}: {error}"
        raise RequestError(f"the chat template failed on these messages: {detail}", param="messages") from error


def _join(pieces: Iterable[str]) -> str:
    joined, num_chars = [], 0
    for piece in pieces:
        joined.append(piece)
        num_chars += len(piece)
        _check_size(num_chars)
        if num_chars > MAX_CHARS:
            message = f"the chat template writes more than {MAX_CHARS} characters for these messages; send fewer"
            raise RequestError(message, param="messages")
    return "".join(joined)


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, a tag that matters only in training."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Generates code that counts rounds of loops, and evaluates no constant expression at compile time.

    Evaluating `9 ** 9 ** 9` would not terminate, and nothing limits the time of compiling.
    """

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        node.body.insert(0, jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute("step")))
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

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
    """Counts steps, and bounds the length of a repeated text or list: one `*` could take gigabytes at once."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @property
    def step(self) -> None:
        """Count a round of a loop."""
        _count_steps()

    def call(self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _counted(super().call)(context, called, *args, **kwargs)

    def join_texts(self, parts: Iterable[Any]) -> str:
        """Concatenate the operands of `~`."""
        joined = "".join(map(str, parts))
        _check_size(len(joined))
        return joined

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * right > MAX_POWER_BITS:
            raise jinja2.TemplateError(f"it makes an integer of more than {MAX_POWER_BITS} bits")
        for value, count in ((left, right), (right, left)):
            if isinstance(value, Sized) and isinstance(count, int) and len(value) * count > MAX_REPEATED:
                raise jinja2.TemplateError(f"it repeats something to more than {MAX_REPEATED} characters or values")
        if operator == "%" and isinstance(left, str):
            _check_size(MAX_STEPS_CHARS + 1)  # a field width in the format may have any size
        if operator == "*" and integers:
            _check_size(left.bit_length() + right.bit_length())
        result = super().call_binop(context, operator, left, right)
        _check_size(_size(result))
        return result


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals.pop("lipsum")
    environment.filters = {name: _counted(function) for name, function in environment.filters.items()}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)
