"""A small client of the chat API. Each request has its own connection; closing a stream aborts its request."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from pypto_serving.api.chat.parsers.scanner import TextPart
from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.errors import ConfigError, PyptoError
from pypto_serving.types.server_url import parse_server_url
from pypto_serving.util import brief, parse_json

TIMEOUT_S = 600.0
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)
"""Errors while reading a reply of unexpected form."""


class ChatServerError(PyptoError):
    """A server answered with an error, ended an answer early, or could not be reached."""


class ChatClient:
    """Sends requests to the server at `url`, with or without `/v1`. Owns no connection between calls."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            self._url = parse_server_url(url)
        except ValueError:
            raise ConfigError(f"--url is {brief(url)}, but must be like http://127.0.0.1:8000") from None
        self._given = url
        self._headers = {"Content-Type": b"application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def models(self) -> list[str]:
        """Return the server's model names, at least one, the default first. Raises ChatServerError."""
        connection, response = self._request("GET", "/v1/models")
        try:
            names = [str(entry["id"]) for entry in parse_json(response.read())["data"]]
        except (http.client.HTTPException, OSError, *_MALFORMED):
            raise ChatServerError(f"--url {self._given} is not an OpenAI-compatible server") from None
        finally:
            connection.close()
        if not names:
            raise ChatServerError(f"--url {self._given} serves no model")
        return names

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]
    ) -> Generator[TextPart, None, TokenUsage | None]:
        """Yield pieces of the answer as they arrive. Raises ChatServerError. Closing the generator aborts the request.

        The generator returns the usage, or None if the server does not report it.
        """
        return self._stream("/v1/chat/completions", {"model": model, "messages": list(messages), **sampling})

    def stream_text(
        self, model: str, prompt: str, sampling: Mapping[str, Any]
    ) -> Generator[TextPart, None, TokenUsage | None]:
        """Continue `prompt`, otherwise like `stream`."""
        return self._stream("/v1/completions", {"model": model, "prompt": prompt, **sampling})

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Generator[TextPart, None, TokenUsage | None]:
        usage = None
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        connection, response = self._request("POST", path, json.dumps(body))
        try:
            for event in _events(response):
                if "error" in event:
                    raise ChatServerError(_error_message(event, "the server gave up on the answer"))
                usage = _usage(event.get("usage")) or usage
                for choice in event["choices"]:
                    delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
                    if thought := delta.get("reasoning_content"):
                        yield TextPart("reasoning", thought)
                    if text := delta.get("content"):
                        yield TextPart("content", text)
        except _MALFORMED:
            raise ChatServerError("the server streams something other than OpenAI's events") from None
        except (http.client.HTTPException, OSError) as error:
            raise ChatServerError(f"the server ended the answer early: {type(error).__name__}") from None
        finally:
            connection.close()
        return usage

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._url.tls else http.client.HTTPConnection
        connection = kind(self._url.host, self._url.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, self._url.target(path), body, self._headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ChatServerError(self._read_error(method, path, response))
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise ChatServerError(
                f"--url {self._given} cannot be reached: {reason.lower()}; is a server running?"
            ) from None
        except ChatServerError:
            connection.close()
            raise
        return connection, response

    def _read_error(self, method: str, path: str, response: http.client.HTTPResponse) -> str:
        """Return the reason of a refusal. A 404 without a message of the server means that the URL is wrong."""
        fallback = f"the server answered {response.status} {response.reason}"
        try:
            message = _error_message(parse_json(response.read()), fallback)
        except ValueError:
            message = fallback
        vague = method == "GET" or message in (fallback, http.HTTPStatus.NOT_FOUND.phrase)
        if response.status == http.HTTPStatus.NOT_FOUND and vague:
            asked = self._url.origin + self._url.target(path)
            return f"{asked} was not found there; --url should end in /v1, or be the server's root"
        return message


def _usage(sent: Any) -> TokenUsage | None:
    if not sent:
        return None
    cached = (sent.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return TokenUsage(sent["prompt_tokens"], sent["completion_tokens"], cached, ())


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to `[DONE]`."""
    for line in response:
        name, _, data = line.decode().strip().partition(":")
        if name != "data":
            continue
        if data.strip() == "[DONE]":
            return
        yield parse_json(data)


def _error_message(body: Any, fallback: str) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else fallback
