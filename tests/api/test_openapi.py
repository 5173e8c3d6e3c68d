"""GET /openapi.json: valid, complete, and true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pypto_serving.api.common.described import Error
from pypto_serving.api.status import HealthState, Load, Model, ModelList, ServerInfo, Version
from tests.api.bad_bodies import BAD_CHATS, BAD_COMPLETIONS, HELLO
from tests.api.documented import schema_of
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


def test_schemas_keep_their_names(document: dict[str, Any]) -> None:
    assert {"KVGroup", "Model", "ServerInfo"} <= set(document["components"]["schemas"])


def test_there_is_no_page_that_needs_the_internet(server: RunningServer) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert server.http.get(path).status_code == 404


def test_schemas_are_those_of_json_schema(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        assert schema["type"] == "object" and set(schema.get("required", ())) <= set(schema["properties"])
    for part in parts(document["components"]["schemas"]):
        assert part.get("default", ...) is not None, "no field has null as its value when it is left out"


def test_operations_are_described(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names) == 25
    for path, operation in operations(document):
        in_path = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "path" and p["required"]]
        assert in_path == [part[1:-1] for part in path.split("/") if part.startswith("{")]
        responses = operation["responses"]
        assert {"200", "403", "408", "431", "503"} <= set(responses) and "401" not in responses
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


DEPENDS = [
    *("1000000", "512 tokens", "600 tokens", "1000", "640 sequences", "max_tokens", "tokens long", "stream = true"),
    *(
        "between n, which",
        "logprobs = true",
        "like tools[0]",
        "64 levels",
        "no tools",
        "are ['now']",
    ),
    *("last message", "both true", "without the option"),
]
"""Words of refusals that depend on the model, on options, on other fields or on the depth of a schema."""


@pytest.mark.parametrize(("name", "bad"), [("CompletionBody", BAD_COMPLETIONS), ("ChatBody", BAD_CHATS)])
def test_bodies_that_are_refused_are_not_as_described(
    document: dict[str, Any], name: str, bad: list[tuple[dict[str, Any], str, str]]
) -> None:
    schema = schema_of(document, name)
    for body, field, words in bad:
        is_described = any(word in words for word in DEPENDS) or field == "chat_template_kwargs"
        assert schema.is_valid(body) == is_described, (field, words)


def test_bodies_that_are_served_are_as_described(server: RunningServer, document: dict[str, Any]) -> None:
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "CompletionBody", {"prompt": [[1, 2], [3]], "stop": [], "logit_bias": {"5": -100}}),
        ("/v1/completions", "CompletionBody", {"prompt": "a", "suffix": "", "length_penalty": 1.0, "echo": None}),
        ("/v1/chat/completions", "ChatBody", {"messages": [HELLO, {"role": "assistant"}], "verbosity": "medium"}),
        (
            "/v1/chat/completions",
            "ChatBody",
            {"messages": [HELLO], "response_format": {"type": "text"}, "store": False},
        ),
    ]
    for path, name, body in bodies:
        schema_of(document, name).validate(body)
        assert server.post(path, body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"length_penalty": True},
        {"use_beam_search": 0},
        {"guided_choice": {}},
        {"guided_json": []},
        {"structured_outputs": []},
    ],
)
def test_values_that_only_look_neutral_are_refused(
    server: RunningServer, document: dict[str, Any], body: dict[str, Any]
) -> None:
    given = {"prompt": "a", **body}
    assert not schema_of(document, "CompletionBody").is_valid(given)
    answer = server.post("/v1/completions", given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(body)))


def test_forgetting_the_cache_answers_as_described(server: RunningServer) -> None:
    answer = server.http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.text) == (200, "")
    assert answer.headers["content-type"].startswith("text/plain")


def test_events_are_described_with_their_end(document: dict[str, Any]) -> None:
    content = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    parts, end = content["schema"]["properties"]["data"]["anyOf"]
    assert parts["contentSchema"]["anyOf"][0] == {"$ref": "#/components/schemas/Completion"}
    assert end == {"const": "[DONE]"}


def test_named_events_are_described_one_by_one(document: dict[str, Any]) -> None:
    for path, count in (("/v1/messages", 8), ("/v1/responses", 17)):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        kinds = content["schema"]["properties"]["data"]["contentSchema"]["anyOf"]
        schemas = [document["components"]["schemas"][kind["$ref"].rpartition("/")[2]] for kind in kinds]
        assert len({schema["properties"]["type"]["enum"][0] for schema in schemas}) == count


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/models", ModelList),
        ("/v1/models/tiny", Model),
        ("/health", HealthState),
        ("/version", Version),
        ("/ready", HealthState),
        ("/load", Load),
        ("/server_info", ServerInfo),
    ],
)
def test_small_answers_are_as_described(server: RunningServer, path: str, kind: type[msgspec.Struct]) -> None:
    msgspec.json.decode(server.http.get(path).content, type=kind)
    msgspec.json.decode(server.http.delete(path).content, type=Error)


def test_a_key_is_described_where_it_is_needed(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("secret",))
    document = server.http.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert document["security"] == [{"key": []}] and "key" in document["components"]["securitySchemes"]
    free = {"/health", "/ready"}
    assert all(document["paths"][path]["get"]["security"] == [] for path in free)
    refusing = {path for path, operation in operations(document) if "401" in operation["responses"]}
    assert refusing == set(document["paths"]) - free
