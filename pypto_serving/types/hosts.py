"""What two hosts of a replica say to each other, and the secret that they share."""

from __future__ import annotations

import os

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.processes import ChildFault, ChildProgress
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import counted, read_regular

SECRET_VARIABLE = "PYPTO_JOIN_SECRET"
LEAST_SECRET = 16
JOINED = "joined"
"""What a host reports to the process that started it."""


class HostHello(msgspec.Struct, frozen=True, tag="hello"):
    """A host joins: its `name`, the `version` of this program, and digests of its checkpoint's files by name."""

    name: str
    version: str
    files: dict[str, bytes]


class HostStart(msgspec.Struct, frozen=True, tag="start"):
    """The host may load. `life` names this life of the group: its other connections bring it along."""

    config: EngineConfig
    life: bytes


class HostHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent regularly: the host is still there."""


FromHost = HostHello | HostStart | HostHeartbeat | ChildProgress | ChildFault


def read_secret(path: str) -> bytes:
    """Read the secret from a file, or else from the environment. Raises ConfigError where there is none."""
    try:
        secret = (read_regular(path) if path else os.environ.get(SECRET_VARIABLE, "").encode()).strip()
    except OSError as error:
        raise ConfigError(f"the secret of hosts cannot be read from {path}: {os.strerror(error.errno or 0)}") from None
    if not path and not secret:
        raise ConfigError(
            f"hosts need a secret: set {SECRET_VARIABLE} or give the option join-secret-file; at least {LEAST_SECRET} "
            "bytes"
        )
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the secret of hosts in {path or SECRET_VARIABLE} has {counted(len(secret), 'byte')}, but must have at "
            f"least {LEAST_SECRET}"
        )
    return secret
