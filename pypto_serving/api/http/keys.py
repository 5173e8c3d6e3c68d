"""The server's API keys, and their file, which may change while the server runs."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable, Sequence
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import read_keys
from pypto_serving.setup.rules import API_KEYS
from pypto_serving.util import counted

if TYPE_CHECKING:
    from starlette.requests import Request

logger = logging.getLogger("pypto_serving.api")


class ApiKeys:
    """Owns the API keys of one server; without keys, the server is open. Used in its event loop only.

    `file`: the file of the keys, or "". Admitted requests continue when their key is removed.
    """

    def __init__(self, keys: Sequence[str], file: str = "") -> None:
        self.file = file
        self._digests = _digests(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, key: bytes) -> bool:
        """Return whether `key` is valid, in a time that does not depend on the key."""
        digest = sha256(key).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # always compare with all

    def reload(self) -> None:
        """Read the file again. If it cannot be used, keep the present keys and log the reason."""
        try:
            keys = API_KEYS.parse(read_keys(Path(self.file), "the file of API keys"))
        except ConfigError as error:
            logger.warning("%s; the keys stay as they are", error)
        except ValueError:
            logger.warning("the file of API keys %s holds none, or a bad one; the keys stay as they are", self.file)
        else:
            self._digests = _digests(keys)
            logger.info("read %s from %s", counted(len(keys), "API key"), self.file)


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


def client_of(request: Request) -> str:
    """Return the name of the client that a request is from; one of a batch is from whoever made the batch."""
    clients: Clients = request.app.state.clients
    batch_client: Any = getattr(request.state, "client", None)
    return batch_client or clients.name(sent_key(request.scope["headers"]) or b"")


def _digests(keys: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(sha256(key.strip().encode()).digest() for key in keys)
