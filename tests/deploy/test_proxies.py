"""The reverse proxies: nginx and Caddy with the files of deploy/, in front of a real server."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.certificates import make_certificate
from tests.deploy.files import DEPLOY, ROOT
from tests.e2e.server import Server

PAGE = ROOT / "docs" / "proxies.md"
WAIT_S = 60.0
POLL_S = 0.1
OPTIONS = ("--kv-memory", "64MiB", "--access-log", "--api-key", "secret")
KEY = {"Authorization": "Bearer secret"}
LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 0}
MIB = 1 << 20


@dataclass
class Proxied:
    """A server, its log, and a client of the proxy in front of it."""

    server: Server
    log: Path
    http: httpx.Client
    proxy: subprocess.Popen[bytes]

    def aborted(self) -> float:
        """The number of requests whose clients went away."""
        text = self.server.http.get("/metrics", headers=KEY).text
        return sum(map(float, re.findall(r'^vllm:request_success_total{.*"abort".*} (\S+)$', text, re.MULTILINE)))


def until(condition: Callable[[], object], told: Callable[[], str] = lambda: "in vain") -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, told()
        time.sleep(POLL_S)


def nginx(folder: Path, port: int, upstream: str) -> list[str]:
    """Write the file of deploy/ for these addresses, and what Debian's /etc/nginx/nginx.conf has around it."""
    certificate = make_certificate(folder, "localhost")
    text = replaced(
        (DEPLOY / "nginx.conf").read_text(),
        ("127.0.0.1:8000", upstream),
        ("443", f"127.0.0.1:{port}"),
        ("llm.example.com;", "localhost;"),
        ("/etc/ssl/llm.example.com.pem", str(certificate)),
        ("/etc/ssl/private/llm.example.com.key", str(certificate.with_suffix(".key"))),
    )
    (folder / "site.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    around = f"access_log off;\n{paths}include {folder}/site.conf;\n"
    user = "user root;\n" if os.geteuid() == 0 else ""
    main = f"{user}daemon off;\npid {folder}/pid;\nevents {{}}\nhttp {{\n{around}}}\n"
    (folder / "nginx.conf").write_text(main)
    return ["nginx", "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, upstream: str) -> list[str]:
    """Write the file of deploy/ for these addresses. For localhost, Caddy makes its own certificate."""
    text = replaced(
        (DEPLOY / "Caddyfile").read_text(),
        ("127.0.0.1:8000", upstream.replace("unix:", "unix/")),
        ("llm.example.com {", f"https://localhost:{port} {{"),
    )
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}\n"
    (folder / "Caddyfile").write_text(options + text)
    return ["caddy", "run", "--config", str(folder / "Caddyfile")]


PROXIES = {"nginx": nginx, "caddy": caddy}


def replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@contextmanager
def run(name: str, folder: Path, server: Server, log: Path, upstream: str) -> Iterator[Proxied]:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = PROXIES[name](folder, port, upstream)
    environment = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    output = folder / "proxy.log"
    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as proxy,
        httpx.Client(base_url=f"https://localhost:{port}", verify=unchecked(), headers=KEY, timeout=WAIT_S) as http,
    ):
        try:
            until(lambda: is_up(http, proxy, output), output.read_text)
            yield Proxied(server, log, http, proxy)
        finally:
            proxy.terminate()


def unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def is_up(http: httpx.Client, proxy: subprocess.Popen[bytes], output: Path) -> bool:
    assert proxy.poll() is None, output.read_text()
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


def logging_to(log: Path) -> tuple[str, ...]:
    return "sh", "-c", f'exec "$@" 2>{log}', "sh", sys.executable, "-m", "pypto_serving"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    with Server(*OPTIONS, program=logging_to(log)) as server:
        yield server


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    """The name of a proxy that is installed."""
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} on PATH (Debian: apt-get install {name})")
    return name


@pytest.fixture(scope="module")
def proxied(proxy: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    server: Server = request.getfixturevalue("server")
    log: Path = request.getfixturevalue("log")
    upstream = f"127.0.0.1:{server.ready['port']}"
    with run(proxy, tmp_path_factory.mktemp(proxy), server, log, upstream) as made:
        yield made


@pytest.mark.e2e
def test_a_stream_arrives_token_by_token(proxied: Proxied) -> None:
    arrivals_s = []
    with proxied.http.stream("POST", "/v1/completions", json=LONG) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for _ in answer.iter_lines():
            arrivals_s.append(time.monotonic())
    assert len(arrivals_s) > LONG["max_tokens"]
    taken_s = arrivals_s[-1] - arrivals_s[0]
    longest_s = max(later - earlier for earlier, later in pairwise(arrivals_s))
    assert longest_s < taken_s / 4, "it came in few pieces"


@pytest.mark.e2e
def test_the_end_of_a_client_ends_its_request(proxied: Proxied) -> None:
    before = proxied.aborted()
    with proxied.http.stream("POST", "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    until(lambda: proxied.aborted() == before + 1)
    with pytest.raises(httpx.ReadTimeout):
        proxied.http.post("/v1/completions", json=LONG | {"stream": False, "max_tokens": 4000}, timeout=0.5)
    until(lambda: proxied.aborted() == before + 2)


@pytest.mark.e2e
def test_a_large_body_passes_and_a_larger_one_is_refused_by_the_server(proxied: Proxied) -> None:
    body = {"prompt": "Once", "max_tokens": 1, "padding": "x" * (20 * MIB)}
    answer = proxied.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text[:1000]
    answer = proxied.http.post("/v1/completions", json=body | {"padding": "x" * (65 * MIB)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.e2e
def test_the_log_names_the_proxys_client(proxied: Proxied) -> None:
    proxied.http.get("/v1/models", headers={"X-Forwarded-For": "203.0.113.9", "X-Request-Id": "forged"})
    line = next(line for line in proxied.log.read_text().splitlines() if "[forged]" in line)
    assert "127.0.0.1:0 GET '/v1/models' 200" in line, "port 0: the address is from the header that the proxy wrote"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/", "/v1/metrics", "/v1//metrics//", "/%6Detrics", "/x/../metrics"]
)
def test_metrics_are_private(proxied: Proxied, path: str) -> None:
    request = proxied.http.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    answer = proxied.http.send(request)
    assert answer.status_code == 404 and "x-request-id" not in answer.headers, "the proxy answers"


@pytest.mark.e2e
def test_errors_of_the_server_pass_unchanged(proxied: Proxied) -> None:
    answer = proxied.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.e2e
@pytest.mark.parametrize(("trusted", "client"), [(None, "a Unix socket"), ("*", "127.0.0.1:0")])
def test_a_unix_socket(
    proxy: str, trusted: str | None, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    place, log = tmp_path / "api.sock", tmp_path / "log"
    with (
        Server(*OPTIONS, "--uds", place, port=None, program=logging_to(log)) as server,
        run(proxy, tmp_path, server, log, f"unix:{place}") as proxied,
    ):
        answer = proxied.http.post("/v1/completions", json=LONG | {"max_tokens": 2})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert f"{client} POST '/v1/completions' 200" in log.read_text()


@pytest.mark.e2e
def test_a_server_that_is_gone_is_left_out(proxy: str, server: Server, log: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        other = f"127.0.0.1:{gone.getsockname()[1]}"
    here = f"127.0.0.1:{server.ready['port']}"
    (checks,) = re.findall(r"^```\n(lb_policy.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    upstream = {
        "nginx": f"{here};\n    server {other};\n    least_conn",
        "caddy": f"{here} {other} {{\n{checks}#",
    }[proxy]
    with run(proxy, tmp_path, server, log, upstream) as proxied:

        def answers() -> bool:
            body = LONG | {"max_tokens": 1}
            return all(proxied.http.post("/v1/completions", json=body).status_code == 200 for _ in range(10))

        until(answers)


def test_the_page_has_the_files() -> None:
    assert all((DEPLOY / name).read_text() in PAGE.read_text() for name in ("nginx.conf", "Caddyfile"))
