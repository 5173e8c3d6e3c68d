"""What two hosts say to each other about a replica that both compute, beside ChildProgress and ChildFault."""

from __future__ import annotations

import msgspec

from pypto_serving.ipc import ChildFault, ChildProgress
from pypto_serving.types.config import EngineConfig


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
