"""The server's API keys, and their file, which may change while the server runs."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pypto_serving.api.http.allowance import Allowance
from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import read_keys
from pypto_serving.setup.rules import API_KEYS
from pypto_serving.types.api_keys import read_api_keys
from pypto_serving.util import Clock, counted

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger("pypto_serving.api")


class ApiKeys:
    """Owns the API keys of one server; without keys, the server is open. Used in its event loop only.

    `keys`: see `read_api_keys`. `file`: the file of the keys, or "". Admitted requests continue when their key is
    removed. `allowances`: what each holder uses, by name; `known`: that of each key's holder.
    """

    def __init__(self, keys: Sequence[str], file: str = "", clock: Clock = time.monotonic) -> None:
        self.file = file
        self.allowances: dict[str, Allowance] = {}
        self._clock = clock
        self._change(keys)

    def __bool__(self) -> bool:
        return bool(self.known)

    def find(self, key: bytes) -> Allowance | None:
        """Return the allowance of a key's holder, or None for a wrong key; the time does not depend on the key."""
        digest, found = sha256(key).digest(), None
        for known, allowance in self.known.items():  # always compare with all
            if hmac.compare_digest(digest, sha256(known).digest()):
                found = allowance
        return found

    def reload(self) -> None:
        """Read the file again. If it cannot be used, keep the present keys and log the reason."""
        try:
            keys = API_KEYS.parse(read_keys(Path(self.file), "the file of API keys"))
        except ConfigError as error:
            logger.warning("%s; the keys stay as they are", error)
        except ValueError as error:
            why = f" (it {error})" if error.args else ""
            told = "the file of API keys %s holds none, or a bad one%s; the keys stay as they are"
            logger.warning(told, self.file, why)
        else:
            self._change(keys)
            logger.info("read %s from %s", counted(len(keys), "API key"), self.file)

    def _change(self, texts: Sequence[str]) -> None:
        """Replace the keys. Holders who keep their names keep what they have used."""
        before, self.allowances, self.known = self.allowances, {}, {}
        for key in read_api_keys(texts):
            if key.name not in self.allowances:
                held = before.get(key.name) or Allowance(key.name, key.limits, self._clock)
                held.change(key.limits)
                self.allowances[key.name] = held
            self.known[key.key.strip().encode()] = self.allowances[key.name]


def sent_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key in the first header that has one: `x-api-key`, or `Authorization` with a bearer token."""
    for name, value in headers:
        scheme, _, key = value.partition(b" ")
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization" and scheme.lower() == b"bearer":
            return key.strip()
    return None


class Clients:
    """Tells clients apart, to whom responses, files and batches belong: by their keys. Without `keys` all are one."""

    def __init__(self, keys: ApiKeys, salt: bytes) -> None:
        self._keys, self._salt = keys, salt

    def name(self, key: bytes) -> str:
        """Return the name of the client with a key: unique to it, and useless as a key."""
        return blake2b(key if self._keys else b"", key=self._salt, digest_size=16).hexdigest()

    def allowance(self, name: str) -> Allowance | None:
        """Return the allowance of the client called `name`, such as the owner of a batch."""
        return next((held for key, held in self._keys.known.items() if self.name(key) == name), None)


def client_of(request: Request) -> str:
    """Return the name of the client that a request is from; one of a batch is from whoever made the batch."""
    clients: Clients = request.app.state.clients
    batch_client: Any = getattr(request.state, "client", None)
    return batch_client or clients.name(sent_key(request.scope["headers"]) or b"")
