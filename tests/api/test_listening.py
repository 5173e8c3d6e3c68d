"""Where a server listens: HTTPS, with a certificate that changes, and Unix sockets."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pypto_serving.api.http import listening
from pypto_serving.api.http.listening import bind_unix, handed_over
from pypto_serving.cli import main
from pypto_serving.errors import ConfigError
from tests.api.running import COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S
from tests.certificates import make_certificate

BODY = {"prompt": "hello", "max_tokens": 3}


def trusting(*certificates: Path) -> httpx.Client:
    context = ssl.create_default_context()
    for each in certificates:
        context.load_verify_locations(each)
    return httpx.Client(verify=context, timeout=WAIT_S)


def test_https_and_its_next_certificate(
    start: Callable[..., RunningServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pypto_serving.api")
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    used = tmp_path / "used.pem"
    used.write_text(first.read_text())
    server = start(listening={"ssl_certfile": str(used)})
    url = f"https://127.0.0.1:{server.port}"
    with trusting(first) as client:
        assert client.post(url + COMPLETIONS, json=BODY).status_code == 200
        with client.stream("POST", url + COMPLETIONS, json={**BODY, "stream": True}) as response:
            used.write_text("no certificate")
            server.call(server.server.reload)
            assert "cannot be used, and stays as it was" in caplog.text
            used.write_text(second.read_text())
            server.call(server.server.reload)
            assert list(response.iter_lines())[-2] == "data: [DONE]"
        assert client.post(url + COMPLETIONS, json=BODY).status_code == 200  # on the connection that is open
    with trusting(second) as client:
        assert client.post(url + COMPLETIONS, json=BODY).status_code == 200
    with trusting(first) as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        client.get(url)
    with pytest.raises(httpx.RemoteProtocolError), httpx.Client() as client:
        client.get(f"http://127.0.0.1:{server.port}/health")


def test_a_unix_socket(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    bind_unix(str(path)).close()  # as a server that was killed leaves it
    server = start(listening={"uds": str(path)})
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x.y", timeout=WAIT_S) as client:
        assert client.post(COMPLETIONS, json=BODY).status_code == 200
        assert client.get("/health").status_code == 200
    with pytest.raises(OSError, match="in use"):
        bind_unix(str(path))
    server.stop()
    assert not path.exists()


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("content")
    with pytest.raises(OSError, match="in use"):
        bind_unix(str(path))
    assert path.read_text() == "content"


LONG = "/x" * 60


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--uds", "a.sock", "--port", "1"], "--port and --uds are both given; drop one"),
        (["--uds", LONG], f"--uds is {LONG[:77]}..., but must be a path of at most 107 bytes"),
        (["--uds", "/nowhere/a.sock"], "--uds /nowhere/a.sock cannot be used: no such file or directory; give another"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "/nowhere.pem"], "--ssl-certfile /nowhere.pem cannot be used: no such file or directory"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], told: str) -> None:
    assert main(["serve", "--backend", "null", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {told}") and err.count("\n") == 1


def test_a_key_with_a_password_asks_nobody(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificate, locked = make_certificate(tmp_path, "locked"), tmp_path / "locked.pem.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", str(certificate), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    assert main(["serve", "--backend", "null", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(locked)]) == 2
    assert "PEM files without a password" in capsys.readouterr().err


def test_a_client_that_shakes_no_hands_holds_up_nobody(start: Callable[..., RunningServer], tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "only")
    server = start(listening={"ssl_certfile": str(certificate)})
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    with trusting(certificate) as client:
        assert client.get(f"https://127.0.0.1:{server.port}/health").status_code == 200
    for each in silent:
        each.close()


def test_a_socket_of_packets_is_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager's ListenSequentialPacket takes connections, too."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as given:
        given.bind(str(tmp_path / "packets"))
        given.listen()
        monkeypatch.setattr(listening, "FIRST_FD", given.fileno())
        with pytest.raises(ConfigError, match="give it a ListenStream"):
            handed_over()
