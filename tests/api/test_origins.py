"""Web pages of other sites cannot use a server through a reader's browser, unless they are allowed to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.running import RunningServer

PATH, BODY = "/v1/completions", {"prompt": "hello", "max_tokens": 2}
FRIEND = "https://friend.example"


@pytest.mark.parametrize("path", [PATH, "/reset_prefix_cache"])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_pages_of_other_sites_are_refused(server: RunningServer, path: str, origin: str) -> None:
    response = server.http.post(path, json=BODY, headers={"Origin": origin})
    assert response.status_code == 403 and response.json()["error"]["code"] == "origin_not_allowed"
    assert not server.engine.requests


def test_a_name_that_another_site_points_here_is_refused(server: RunningServer) -> None:
    """DNS rebinding: the page and the server have the same name."""
    headers = {"Origin": "http://evil.example:80", "Host": "evil.example:80"}
    assert server.http.post(PATH, json=BODY, headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json"])
def test_a_rebound_page_reads_nothing(start: Callable[..., RunningServer], path: str) -> None:
    """Browsers send no Origin with a page's GETs to its own site; `Host` is what they cannot forge."""
    server = start(allowed_origins=(FRIEND,))
    for host in ("evil.example:8000", "EVIL.example", "127.0.0.1.evil.example", "evil.example.", "localhost.example"):
        response = server.http.get(path, headers={"Host": host})
        assert response.status_code == 403 and response.json()["error"]["code"] == "origin_not_allowed"
    for host in ("friend.example", "localhost:8000", "[::1]:8000", "my-service:80", "llm.default.svc.cluster.local"):
        assert server.http.get(path, headers={"Host": host}).status_code == 200


def test_names_are_free_with_a_key(start: Callable[..., RunningServer]) -> None:
    server = start(api_keys=("secret",))
    headers = {"Host": "llm.example", "Authorization": "Bearer secret"}
    assert server.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:3000", "[::1]:8000", "10.0.0.5", "app.localhost"])
def test_the_servers_own_pages_and_other_clients_are_served(server: RunningServer, host: str) -> None:
    own = {"Host": host, "Origin": f"http://{host}"}
    assert server.http.post(PATH, json=BODY, headers=own).status_code == 200
    assert server.http.post(PATH, json=BODY, headers={"Host": "my-service"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_bodies_that_a_form_could_send_are_refused(server: RunningServer, kind: str) -> None:
    response = server.http.post(PATH, content=b'{"prompt": "hello"}', headers={"Content-Type": kind})
    assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_media_type"


def test_json_in_any_spelling_is_served(server: RunningServer) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        response = server.http.post(PATH, content=b'{"prompt": "hello"}', headers={"Content-Type": kind})
        assert response.status_code == 200


@pytest.mark.parametrize("key", [None, "secret"])
def test_allowed_pages_get_cors_headers(start: Callable[..., RunningServer], key: str | None) -> None:
    server = start(allowed_origins=(FRIEND,), api_keys=(key,) if key else ())
    asks = {"Origin": FRIEND, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    preflight = server.http.options(PATH, headers=asks)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == FRIEND
    headers = {"Origin": FRIEND} | ({"Authorization": f"Bearer {key}"} if key else {})
    for stream in (False, True):
        response = server.http.post(PATH, json={**BODY, "stream": stream}, headers=headers)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == FRIEND
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    headers["Origin"] = "https://evil.example"
    stranger = server.http.post(PATH, json=BODY, headers=headers)
    assert "access-control-allow-origin" not in stranger.headers
    assert stranger.status_code == (200 if key else 403), "with a key, only its owner gets an answer"


@pytest.mark.parametrize("key", [None, "secret"])
def test_allowed_pages_may_delete(start: Callable[..., RunningServer], tmp_path: Path, key: str | None) -> None:
    """Files and responses; batches are cancelled instead. Other sites may not."""
    server = start(allowed_origins=(FRIEND,), api_keys=(key,) if key else (), batch_dir=str(tmp_path))
    client = server.openai(key or "none")
    file_id = client.files.create(file=("in.jsonl", b"{}"), purpose="batch").id
    response_id = client.responses.create(model="tiny", input="hello").id
    own = {"Authorization": f"Bearer {key or 'none'}"}
    for path in (f"/v1/files/{file_id}", f"/v1/responses/{response_id}"):
        for origin, allowed in (("https://evil.example", False), (FRIEND, True)):
            asks = {"Origin": origin, "Access-Control-Request-Method": "DELETE"}
            preflight = server.http.options(path, headers=asks | {"Access-Control-Request-Headers": "authorization"})
            assert ("access-control-allow-origin" in preflight.headers) == preflight.is_success == allowed
            if allowed or not key:  # a browser, which got no leave, sends nothing, and no page has the key
                deleted = server.http.delete(path, headers={"Origin": origin, **own})
                assert deleted.status_code == (200 if allowed else 403)
                assert deleted.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert server.http.get(path, headers=own).status_code == 404
    cancelled = server.http.post("/v1/batches/batch_x/cancel", headers={"Origin": FRIEND, **own})
    assert (cancelled.status_code, cancelled.headers["access-control-allow-origin"]) == (404, FRIEND)
