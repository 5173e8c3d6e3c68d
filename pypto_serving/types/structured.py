"""StructuredOutputsParams: the user's constraints on the structure of an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from pypto_serving.errors import RequestError
from pypto_serving.util import brief, entries

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of structure for an output, with vLLM's names. Raises RequestError that names the field at fault.

    - `json`: a JSON schema, as a mapping or as text.
    - `regex`: a regular expression for the whole output, in the syntax of Rust.
    - `choice`: the output is one of these texts.
    - `grammar`: Lark, in llguidance's dialect, or GBNF, whose rules have `::=`.
    - `json_object`: any JSON object.
    - `structural_tag`: text with parts in given formats: `format`, or the older `structures` and `triggers`.

    For JSON: `whitespace_pattern` is a regular expression for each run of white space, by default one space, or a line
    break and at most 20 spaces or tabs; `disable_any_whitespace` allows none. `disable_additional_properties` forbids
    additional properties of objects whose schema does not mention them.

    `field`: the request's field with these parameters, for messages.
    """

    json: Any = None
    regex: str | None = None
    choice: Any = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    field: str = "structured_outputs"

    @classmethod
    def read(cls, given: Any, field: str = "structured_outputs") -> Self:
        """Read a mapping. Raises RequestError."""
        if not isinstance(given, dict):
            raise RequestError(f"{field} is {brief(given)}, but must be an object", param=field, code="invalid_type")
        names = set(cls.__struct_fields__) - {"field"}
        if unknown := sorted(map(str, given.keys() - names)):
            raise RequestError(
                f"{field} has {brief(unknown[0])}, but knows only {', '.join(sorted(names))}", param=field
            )
        return cls(**given, field=field)

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            named = f"has {' and '.join(given)}" if given else "has none"
            raise self.refusal(f"{named} of {', '.join(KINDS)}; send exactly one")
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._require(name, isinstance(getattr(self, name), str | None), "a text")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            self._require(name, isinstance(getattr(self, name), bool | None), "true or false")
        for name in ("json", "structural_tag"):
            self._require(name, isinstance(getattr(self, name), str | dict | None), "an object, or its JSON text")
        if given[0] in ("regex", "choice", "grammar"):
            for name in ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
                if getattr(self, name):
                    raise self.refusal(f"has {name}, which is for JSON, but {given[0]} is not; leave it out")
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", self._choices())

    def _choices(self) -> tuple[str, ...]:
        try:
            texts = entries(self.choice)
        except ValueError:
            texts = []
        self._require(
            "choice", bool(texts) and all(isinstance(text, str) for text in texts), "a list of texts, not empty"
        )
        return tuple(texts)

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise self.refusal(f"has {name} = {brief(getattr(self, name))}, but it must be {allowed}")

    @property
    def place(self) -> str:
        """Return the field with the structure itself, for messages."""
        if self.field != "structured_outputs":
            return self.field
        return f"{self.field}.{next(name for name in KINDS if getattr(self, name) not in (None, False))}"

    def refusal(self, problem: str, code: str | None = None) -> RequestError:
        """Make the error about these parameters; `problem` continues the sentence after their field's name."""
        return RequestError(f"{self.field} {problem}", param=self.field, code=code)


def schema_of(form: Mapping[str, Any]) -> Any:
    """Return the JSON schema of a format: OpenAI's, or llama.cpp's, which has it beside the type. None for none."""
    schema, inner = form.get("schema"), form.get("json_schema")
    return inner.get("schema") if schema is None and isinstance(inner, Mapping) else schema


def structure_of(form: Mapping[str, Any], where: str, param: str) -> dict[str, Any]:
    """Return the structure that a format of type `json_object` or `json_schema` asks for. Both may have a schema.

    Raises RequestError that names the schema `where`, and the field `param`.
    """
    schema = schema_of(form)
    if schema is None and form["type"] == "json_object":
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise RequestError(f"{where} is {brief(schema)}, but must be a JSON schema", param=param)
    return {"json": schema}
