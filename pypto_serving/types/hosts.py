"""What two hosts of a replica say to each other, and the secret that they share."""

from __future__ import annotations

import os

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.ipc import ChildFault, ChildProgress
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import read_regular

SECRET_VARIABLE = "PYPTO_JOIN_SECRET"
LEAST_SECRET = 16
CONNECTING, JOINED = "waiting for the serving host", "joined"
"""What a host reports to the process that started it."""


class HostHello(msgspec.Struct, frozen=True, tag="hello"):
    """A host joins: its `name`, the `version` of this program, and the `digest` of its checkpoint."""

    name: str
    version: str
    digest: bytes


class HostStart(msgspec.Struct, frozen=True, tag="start"):
    """The host may load. `life` names this life of the group: its other connections bring it along."""

    config: EngineConfig
    life: bytes


class HostBeat(msgspec.Struct, frozen=True, tag="beat"):
    """The host is there."""


FromHost = HostHello | HostStart | HostBeat | ChildProgress | ChildFault


def read_secret(path: str) -> bytes:
    """Read the secret from a file, or else from the environment. Raises ConfigError where there is none."""
    where = path or SECRET_VARIABLE
    try:
        secret = (read_regular(path) if path else os.environ.get(SECRET_VARIABLE, "").encode()).strip()
    except OSError as error:
        raise ConfigError(f"the secret of hosts cannot be read from {path}: {os.strerror(error.errno or 0)}") from None
    if len(secret) < LEAST_SECRET:
        problem = f"has {len(secret)} bytes" if secret else "is not there"
        raise ConfigError(f"the secret of hosts in {where} {problem}, but must have at least {LEAST_SECRET} bytes")
    return secret
