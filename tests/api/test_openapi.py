"""GET /openapi.json: valid, complete, and true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pypto_serving.api.openai.answers import Error, HealthState, Model, ModelList, Version
from tests.api.running import RunningServer


@pytest.fixture
def document(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object within a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inner)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        yield from ((path, operation) for operation in methods.values())


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    references = [part["$ref"] for part in parts(document) if "$ref" in part]
    assert len(references) > 50
    for reference in references:
        found = document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


def test_schemas_are_those_of_json_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        assert schema["type"] == "object" and set(schema.get("required", ())) <= set(schema["properties"])
    for part in parts(document["components"]["schemas"]):
        assert part.get("default", ...) is not None, "no field has null as its value when it is left out"


def test_operations_are_described(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names) == 8
    for path, operation in operations(document):
        in_path = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path" and p["required"]]
        assert in_path == [part[1:-1] for part in path.split("/") if part.startswith("{")]
        responses = operation["responses"]
        assert {"200", "401", "403", "408", "431", "503"} <= set(responses)
        assert all(response["description"] and response["content"] for response in responses.values())
        schemas = [content["schema"] for r in responses.values() for content in r["content"].values()]
        assert all(schemas)


def test_generating_endpoints_name_bodies_events_and_errors(document: dict[str, Any]) -> None:
    for path, body, answer in (
        ("/v1/completions", "CompletionBody", "Completion"),
        ("/v1/chat/completions", "ChatBody", "ChatCompletion"),
    ):
        operation = document["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{body}"}
        content = operation["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{answer}"}
        assert "text/event-stream" in content
        assert {"400", "404", "413", "415", "429", "500"} <= set(operation["responses"])


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/models", ModelList), ("/v1/models/tiny", Model), ("/health", HealthState), ("/version", Version)],
)
def test_small_answers_are_as_described(server: RunningServer, path: str, kind: type[msgspec.Struct]) -> None:
    msgspec.json.decode(server.http.get(path).content, type=kind)
    msgspec.json.decode(server.http.delete(path).content, type=Error)


def test_a_key_is_described_where_it_is_needed(start: Callable[..., RunningServer]) -> None:
    server = start(api_key="secret")
    document = server.http.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert document["security"] == [{"key": []}] and "key" in document["components"]["securitySchemes"]
    assert document["paths"]["/health"]["get"]["security"] == []
