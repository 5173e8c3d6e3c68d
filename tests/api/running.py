"""A real server on 127.0.0.1, in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import httpx
import msgspec
import openai

from pypto_serving.api.common.described import Error
from pypto_serving.api.openai.answers import ChatCompletion, ChatCompletionChunk, Completion
from pypto_serving.api.run import ApiServer
from pypto_serving.api.server import create_app
from pypto_serving.api.settings import ServingConfig
from pypto_serving.types.config import ServerConfig
from tests.api.scripted_engine import WAIT_S, ScriptedEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOMENT_S = 2.0
DESCRIBED = {
    COMPLETIONS: (Completion, Completion),
    CHAT: (ChatCompletion, ChatCompletionChunk),
}
"""What /openapi.json says of answers and of their events."""


class RunningServer:
    """Started when made; `stop` ends it. `call` runs a function in the server's event loop.

    All that it answers must be as described.
    """

    def __init__(
        self, engine: ScriptedEngine, serving: ServingConfig, drain_timeout_s: float = 5.0, **listening: Any
    ) -> None:
        self.engine = engine
        self.app = create_app(engine, serving)
        self.service = self.app.state.service
        self._bound: Future[int] = Future()
        names = serving.served_model_names
        self.config = ServerConfig(served_model_names=names, port=0, drain_timeout_s=drain_timeout_s, **listening)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        self.port = self._bound.result(WAIT_S)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, headers={"Content-Type": "application/json"})

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            self.server = ApiServer(self.app, self.config)
            await self.server.run(self._bound.set_result)
        except BaseException as error:
            if not self._bound.done():
                self._bound.set_exception(error)
            raise

    def call(self, function: Callable[[], object]) -> Any:
        """The result of `function` in the event loop."""

        async def run() -> object:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition`, which is asked in the event loop, is true."""

        async def ask() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(ask(), self.loop).result()

    def wait_idle(self) -> None:
        """Return once no request is in the server; a client may have its answer just before."""
        asyncio.run_coroutine_threadsafe(self.service.admission.wait_idle(), self.loop).result(WAIT_S)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """The official client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT_S)

    def stop(self) -> None:
        """Drain and end; all requests must be done by then."""
        self.http.close()
        if self.thread.is_alive():
            self.call(self.server.stop)
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def post(self, path: str, body: Any) -> httpx.Response:
        response = self.http.post(path, json=body)
        if path in DESCRIBED:
            kind = DESCRIBED[path][0] if response.status_code == 200 else Error
            if response.headers["content-type"] == "application/json":
                msgspec.json.decode(response.content, type=kind)
        return response

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        found = [event.removeprefix("data: ") for event in events]
        for event in found:
            msgspec.json.decode(event, type=DESCRIBED[path][1])
        return list(map(json.loads, found))

    def raw_post(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A socket over which the request was sent and nothing was read."""
        payload = json.dumps(body).encode()
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}"
        head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        connection.sendall(head.encode() + payload)
        return connection


BETWEEN_S = 0.02


def is_served_until(server: RunningServer, slow: Future[httpx.Response]) -> bool:
    """Whether /health and small completions are answered all the time until `slow` is.

    However loaded the machine is: no answer takes most of that time, if that is more than a moment.
    """
    started_s = answered_s = time.monotonic()
    longest_s = 0.0
    while not slow.done():
        assert server.http.get("/health").status_code == 200
        assert server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1}).status_code == 200
        before_s, answered_s = answered_s, time.monotonic()
        longest_s = max(longest_s, answered_s - before_s)
        wait([slow], BETWEEN_S)
    return longest_s < max(MOMENT_S, 0.8 * (answered_s - started_s))
