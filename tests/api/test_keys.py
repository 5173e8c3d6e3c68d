"""Several API keys, and a file of them that changes while streams run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pypto_serving.api.http.keys import ApiKeys
from tests.api.running import COMPLETIONS, RunningServer
from tests.api.scripted_engine import Script


def allowed(keys: ApiKeys) -> list[str]:
    return [key for key in ("a", "b", "c", "", "ab", "ä") if keys.find(key.encode())]


def test_any_of_the_keys_is_enough() -> None:
    assert allowed(ApiKeys(("a", " b "))) == ["a", "b"]
    assert not ApiKeys(()) and allowed(ApiKeys(())) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read: No such file"),
        ("", "holds none, or a bad one"),
        ("# c\n\n", "holds none, or a bad one"),
        ("b\nc\x07", "holds none, or a bad one"),
    ],
)
def test_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, told: str
) -> None:
    keys = ApiKeys(("a",), str(tmp_path / "keys"))
    if text is not None:
        (tmp_path / "keys").write_text(text)
    keys.reload()
    assert allowed(keys) == ["a"]
    assert told in caplog.text and "the keys stay as they are" in caplog.text


def test_streams_outlive_their_key(
    start: Callable[..., RunningServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pypto_serving.api")
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = start(api_keys=("old",), api_key_file=str(file))
    tokens = server.engine.script(None).tokens  # type: ignore[arg-type]
    server.engine.script = lambda request: Script(tokens, hang=True)

    def status(key: str) -> int:
        return server.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    assert (status("old"), status("new"), status("next")) == (200, 401, 401)
    body, headers = {"prompt": "a", "stream": True}, {"Authorization": "Bearer old"}
    with server.http.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        file.write_text("# now two\nnew\nnext\n")
        server.call(server.server.reload)
        assert (status("old"), status("new"), status("next")) == (401, 200, 200)
        server.call(server.engine.submissions[-1].finish)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert f"read 2 API keys from {file}" in caplog.text
