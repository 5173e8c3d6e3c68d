"""/v1/files and /v1/batches with the official client: answers, refusals, cancelling, and servers that end midway."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pypto_serving.api.batch import batches, running, store
from pypto_serving.api.batch.multipart import read_form
from pypto_serving.api.batch.running import AnswerFile, BatchRequest, Direct, Limits
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ConfigError, RequestError
from tests.api.batch.asking import answers, create, line, store_of, upload, wait
from tests.api.documented import schema_of
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S, Script

Start = Callable[..., RunningServer]


def test_a_batch(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    lines = [*(line(f"l{i}") for i in range(40)), line("bad", max_tokens=-1), ""]
    batch_id = create(client, lines)
    wait(server, batch_id, "completed")
    batch = client.batches.retrieve(batch_id)
    assert batch.request_counts is not None and batch.metadata == {"a": "b"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (41, 40, 1)
    found = answers(client, batch_id)
    assert found["l7"]["response"]["status_code"] == 200
    assert found["l7"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert [one.id for one in client.batches.list()] == [batch_id]
    with pytest.raises(openai.BadRequestError, match="completed already"):
        client.batches.cancel(batch_id)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{", "not a request"),
        ('{"custom_id": "b"}', "not a request"),
        (line("a"), "like that of an earlier line"),
        (line(""), "between 1 and 512"),
        (line("b", CHAT), "url is '/v1/chat/completions', but must be /v1/completions"),
        ({**line("b"), "method": "GET"}, "method is 'GET', but must be 'POST'"),
        ({**line("b"), "body": []}, "not a request"),
        (line("b", stream=True), "stream is not available"),
        (line("b", prompt="x" * 5000), "more than 4000 bytes"),
    ],
)
def test_a_file_that_is_none(start: Start, tmp_path: Path, entry: Any, words: str) -> None:
    server = start(batch_dir=str(tmp_path), max_body_bytes=9000)
    server.app.state.batches._max_line_bytes = 4000
    client = server.openai()
    batch_id = create(client, [line("a"), entry])
    wait(server, batch_id, "failed")
    errors = client.batches.retrieve(batch_id).errors
    assert errors is not None and errors.data is not None
    (error,) = errors.data
    assert error.line == 2 and error.message is not None and words in error.message
    assert server.engine.requests == []


def test_files_and_batches_are_bounded(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_REQUESTS", 2)
    monkeypatch.setattr(store, "MAX_FILES", 2)
    server = start(batch_dir=str(tmp_path), max_body_bytes=3000)
    client = server.openai()
    with pytest.raises(openai.APIStatusError) as large:
        upload(client, [line("a", prompt="x" * 4000)])
    assert large.value.status_code == 413
    batch_id = create(client, [line(str(i)) for i in range(3)])
    wait(server, batch_id, "failed")
    upload(client, [line("a")])
    with pytest.raises(openai.BadRequestError, match="2 files already"):
        upload(client, [line("a")])
    monkeypatch.setattr(store, "MAX_FILES", 3)
    monkeypatch.setattr(store, "MAX_BYTES", 500)
    with pytest.raises(openai.BadRequestError, match="at most 500 bytes"):
        upload(client, [line("a")])


def problems(client: openai.OpenAI, batch_id: str) -> list[tuple[int | None, str | None]]:
    """The lines of a batch's input that are no requests, and why."""
    errors = client.batches.retrieve(batch_id).errors
    assert errors is not None and errors.data is not None
    return [(error.line, error.message) for error in errors.data]


def test_lines_are_read_beside_the_event_loop(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 60 MB takes long, and the server answers others meanwhile."""
    readers: list[threading.Thread] = []

    def read(path: Path, limits: Limits) -> Iterator[BatchRequest]:
        for request in running.read(path, limits):
            readers.append(threading.current_thread())
            yield request

    monkeypatch.setattr(batches, "read", read)
    server = start(batch_dir=str(tmp_path))
    wait(server, create(server.openai(), [line("a"), line("b")]), "completed")
    assert len(readers) == 2 and server.thread not in readers


def test_a_batch_has_a_most_of_requests(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    batch_id = create(client, [line(str(i)) for i in range(batches.MAX_REQUESTS + 2)])
    wait(server, batch_id, "failed")
    message = f"the file has more than {batches.MAX_REQUESTS} requests; split it"
    assert problems(client, batch_id) == [(batches.MAX_REQUESTS + 1, message)]
    assert server.engine.requests == []


def test_a_line_has_a_most_of_bytes(start: Start, tmp_path: Path) -> None:
    """That of a body, so a file with longer ones came to a server that takes more."""
    at_most, longer = (json.dumps(line("a", user="x" * count)) for count in (3000, 3001))
    first = start(batch_dir=str(tmp_path))
    ids = [upload(first.openai(), [text]) for text in (at_most, longer)]
    first.stop()
    second = start(batch_dir=str(tmp_path), max_body_bytes=len(at_most))
    client = second.openai()
    good, bad = (
        client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id
        for file_id in ids
    )
    wait(second, bad, "failed")
    assert problems(client, bad) == [(1, f"the line has more than {len(at_most)} bytes; send less")]
    wait(second, good, "completed")
    assert answers(client, good)["a"]["response"]["status_code"] == 200


def test_blank_lines_are_bounded(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_REQUESTS", 2)
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    wait(server, create(client, [line("a"), "", "", line("b")]), "completed")
    batch_id = create(client, [line("a"), *[""] * 1000])
    wait(server, batch_id, "failed")
    assert problems(client, batch_id) == [(5, "the file has more than 4 lines; leave blank ones out")]


def test_a_form_is_not_copied() -> None:
    body = bytearray(b"before\r\n--b\r\nContent-Disposition: form-data; name=file\r\n\r\n\r\n--\r\n--b--\r\n")
    form = read_form("multipart/form-data; boundary=b", body)
    assert form.data == b"\r\n--" and form.data.obj is body


def test_files_come_and_go(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    ids = [upload(client, [line(str(i))]) for i in range(3)]
    listed = [file.id for file in client.files.list(limit=2)]
    assert sorted(listed) == sorted(ids), "pages lead to all"
    assert client.files.retrieve(ids[0]).filename == "in.jsonl"
    assert client.files.delete(ids[0]).deleted
    for name in (ids[0], "file-" + "0" * 32, "x", "..%2fsalt"):
        assert server.http.get(f"/v1/files/{name}").status_code == 404
        assert server.http.get(f"/v1/batches/{name}").status_code == 404
    for query in ("limit=0", "limit=x", "after=x", "limit=" + "0" * 8 + "1" + "0" * 5000):
        assert server.http.get(f"/v1/files?{query}").status_code == 400


def test_files_may_go_while_they_are_listed(tmp_path: Path) -> None:
    kept = store.KeyStore.of("a client", tmp_path)
    gone, left = (kept.new_file("in.jsonl", "batch", 1, b"{}").id for _ in range(2))
    kept.content(gone).unlink()
    assert [file.id for file in kept.files()] == [left]
    with pytest.raises(RequestError, match="there is no"):
        kept.file(gone)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data; boundary=", b"--\r\n\r\nx\r\n----"),
        ("multipart/form-data; boundary*" + "9" * 5000 + "=b", b"--b--"),
        ("multipart/form-data; boundary*=a; boundary*0=b", b"--b--"),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\ncontent-disposition: form-data; name*=file; name*0=x\r\n\r\n--b--",
        ),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"a: b\r\n" * 1000 + b"\r\nx\r\n--b--"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx" * 30 + b"--b--\r\n"),
    ],
)
def test_forms_that_are_none(start: Start, tmp_path: Path, kind: str, body: bytes) -> None:
    server = start(batch_dir=str(tmp_path))
    response = server.http.post("/v1/files", content=body, headers={"content-type": kind})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize(
    ("given", "filename"),
    [
        ('filename="a b.jsonl"', "a b.jsonl"),
        ("filename=in.jsonl", "in.jsonl"),
        (r'filename="a\"b;c\\d"', r'a"b;c\d'),
        ("filename=x; filename*=UTF-8''a%20%C3%BC.jsonl", "a ü.jsonl"),
        ("filename*=UTF-8''%ED%A0%80", "\ufffd" * 3),
        ("filename", "file"),
    ],
)
def test_names_of_files(given: str, filename: str) -> None:
    head = f"Content-Disposition: form-data; name=file; {given}\r\n\r\n".encode()
    assert read_form('multipart/form-data; boundary="b"', b"--b\r\n" + head + b"x\r\n--b--").filename == filename


def test_a_batch_is_cancelled(start: Start, tmp_path: Path, tokenizer: Tokenizer) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    batch_id = create(client, [line(str(i)) for i in range(3)])
    server.engine.wait_for(lambda: len(server.engine.requests) == 3)
    input_file = client.batches.retrieve(batch_id).input_file_id
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(input_file)
    behind = create(client, [line("a")])
    assert client.batches.cancel(behind).status == "cancelled"
    assert client.batches.cancel(batch_id).status == "cancelling"
    wait(server, batch_id, "cancelled")
    server.engine.wait_for(lambda: len(server.engine.aborted) == 3)
    server.wait_idle()
    assert client.batches.retrieve(behind).output_file_id is None


def test_the_next_server_goes_on(start: Start, tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = start(batch_dir=str(tmp_path), drain_timeout_s=0.1)
    count = iter(range(100))
    hello = tokenizer.encode("hello")
    first.engine.script = lambda request: Script(hello, hang=next(count) >= 2)
    batch_id = create(first.openai(), [line(str(i)) for i in range(6)])
    first.engine.wait_for(lambda: len(first.engine.requests) == 6)
    kept = first.app.state.batches
    first.wait_for(lambda: kept.shown(store_of(first).batch(batch_id)).request_counts.completed == 2)
    first.stop()
    second = start(batch_dir=str(tmp_path))
    wait(second, batch_id, "completed")
    assert sorted(answers(second.openai(), batch_id)) == [str(i) for i in range(6)]
    assert len(second.engine.requests) == 4


def test_a_batch_is_cancelled_while_its_output_is_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, goes_on = threading.Event(), threading.Event()

    class SlowOutput(AnswerFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            reads.set()
            goes_on.wait(WAIT_S)

    monkeypatch.setattr(batches, "AnswerFile", SlowOutput)
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    batch_id = create(client, [line("a")])
    assert reads.wait(WAIT_S)
    assert client.batches.cancel(batch_id).status == "cancelled"
    behind = create(client, [line("b")])
    goes_on.set()
    wait(server, behind, "completed")
    assert client.batches.retrieve(batch_id).status == "cancelled"
    assert len(server.engine.requests) == 1, "nothing of a cancelled batch runs"


def test_a_file_that_grows_is_sent_as_it_was(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(batch_dir=str(tmp_path))
    file_id = upload(server.openai(), [line("a")])
    path = store_of(server).content(file_id)
    whole = path.read_bytes()

    def grow(self: store.KeyStore, file: store.File) -> Iterator[bytes]:
        path.write_bytes(whole + b"more")
        return read(self, file)

    read = store.KeyStore.read
    monkeypatch.setattr(store.KeyStore, "read", grow)
    assert server.http.get(f"/v1/files/{file_id}/content").content == whole
    path.unlink()
    assert server.http.get(f"/v1/files/{file_id}/content").status_code == 404


def test_damaged_records_are_left_out(start: Start, tmp_path: Path) -> None:
    first = start(batch_dir=str(tmp_path))
    batch_id = create(first.openai(), [line("a")])
    wait(first, batch_id, "completed")
    first.stop()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for name in ("batch_" + "0" * 32, "file-" + "0" * 32, "batch_", "file-x"):
        (folder / f"{name}.json").write_bytes(b"")
    second = start(batch_dir=str(tmp_path))
    assert [batch.id for batch in second.openai().batches.list()] == [batch_id]
    assert len(list(second.openai().files.list())) == 2
    assert second.http.get("/v1/batches/batch_" + "0" * 32).status_code == 404


KILLED = """
import os, signal, sys
from pathlib import Path
from pypto_serving.api.batch.store import KeyStore

path = Path(sys.argv[1])
type(path).replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
KeyStore(path).new_file("in.jsonl", "batch", 1, b"{}")
"""


def test_what_a_killed_server_had_begun_is_deleted(start: Start, tmp_path: Path) -> None:
    """An upload that never got its record; other files stay."""
    first = start(batch_dir=str(tmp_path))
    file_id = upload(first.openai(), [line("a")])
    first.stop()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "notes.new").write_text("not ours")
    before = {path.name for path in folder.iterdir()}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, timeout=WAIT_S)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    begun = {path.name for path in folder.iterdir()} - before
    assert {Path(name).suffix for name in begun} == {".jsonl", ".new"}
    second = start(batch_dir=str(tmp_path))
    assert {path.name for path in folder.iterdir()} == before
    assert [file.id for file in second.openai().files.list()] == [file_id]


def test_a_folder_that_takes_nothing(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai().with_options(max_retries=0)
    file_id = upload(client, [line(str(i)) for i in range(3)])
    count = len(list(tmp_path.rglob("*")))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(store.KeyStore, "save", refuse)
        for attempt in (
            lambda: upload(client, [line("a")]),
            lambda: client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"),
        ):
            with pytest.raises(openai.APIStatusError, match="No space left") as refused:
                attempt()
            assert refused.value.status_code == 507
    assert len(list(tmp_path.rglob("*"))) == count, "nothing is left of what was refused"
    with monkeypatch.context() as full:
        full.setattr(AnswerFile, "add", refuse)
        batch_id = create(client, [line("a")])
        wait(server, batch_id, "failed")
    errors = client.batches.retrieve(batch_id).errors
    assert errors is not None and errors.data is not None
    assert [(error.code, error.line) for error in errors.data] == [("storage_failed", None)]
    shutil.rmtree(tmp_path)
    assert server.http.get("/v1/files").status_code == 507


def test_the_oldest_batches_that_ended_are_forgotten(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(batches, "MAX_BATCHES", 2)
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    for i in range(3):
        wait(server, create(client, [line(str(i))]), "completed")
    assert len(list(client.batches.list())) == 2
    server.engine.script = lambda request: Script(tokenizer.encode("hello"), hang=True)
    ids = [create(client, [line("a")]) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="2 batches have not ended"):
        create(client, [line("a")])
    for batch_id in ids:
        client.batches.cancel(batch_id)
        wait(server, batch_id, "cancelled")


def test_a_folder_has_one_server(start: Start, tmp_path: Path) -> None:
    first = start(batch_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="another server"):
        start(batch_dir=str(tmp_path))
    first.stop()
    assert start(batch_dir=str(tmp_path)).http.get("/v1/batches").status_code == 200


def test_without_a_folder_there_are_no_batches(start: Start) -> None:
    assert start().http.get("/v1/batches").status_code == 404


def test_batches_ask_for_no_batches(start: Start, tmp_path: Path) -> None:
    direct = Direct(start(batch_dir=str(tmp_path)).app)
    assert direct.paths > {COMPLETIONS, "/v1/messages", "/v1/responses"}
    others = {"/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/cancel"}
    assert not direct.paths & (others | {"/tokenize"})


def test_a_request_of_a_batch_may_have_a_deadline(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client = server.openai()
    batch_id = create(client, [line("a", timeout=60)])
    wait(server, batch_id, "completed")
    assert answers(client, batch_id)["a"]["response"]["status_code"] == 200


def test_answers_are_as_described(start: Start, tmp_path: Path) -> None:
    server = start(batch_dir=str(tmp_path))
    client, http = server.openai(), server.http
    document = http.get("/openapi.json").json()
    assert {"/v1/files", "/v1/files/{file_id}/content", "/v1/batches/{batch_id}/cancel"} <= set(document["paths"])
    body = {"input_file_id": upload(client, [line("a"), "{"]), "endpoint": COMPLETIONS}
    failed = http.post("/v1/batches", json=body).json()
    wait(server, failed["id"], "failed")
    answers = {
        "BatchBody": body,
        "Batch": http.get(f"/v1/batches/{failed['id']}").json(),
        "BatchList": http.get("/v1/batches").json(),
        "File": http.get(f"/v1/files/{body['input_file_id']}").json(),
        "FileList": http.get("/v1/files").json(),
        "DeletedFile": http.delete(f"/v1/files/{body['input_file_id']}").json(),
    }
    for name, answer in answers.items():
        schema_of(document, name).validate(answer)
