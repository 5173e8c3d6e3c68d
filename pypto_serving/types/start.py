"""What a parent tells a child process when it starts it, over the control pipe as one line of JSON."""

from __future__ import annotations

import msgspec

from pypto_serving.types.config import EngineConfig


class WorkerStart(msgspec.Struct, frozen=True):
    """Inherited file descriptors are numbers: of the channels to the core, for steps and for transfers.

    `host_memory` is the memory of the host tier, -1 without one. `epoch` numbers this worker life.
    """

    config: EngineConfig
    channel: int
    transfers: int
    host_memory: int
    epoch: int


class CoreStart(msgspec.Struct, frozen=True):
    """`channel` is the inherited file descriptor of the channel to the API process."""

    config: EngineConfig
    channel: int
