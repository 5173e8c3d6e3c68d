"""The schemas of /openapi.json."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator


def schema_of(document: dict[str, Any], name: str) -> Draft202012Validator:
    """What checks values by the schema of a name."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})
