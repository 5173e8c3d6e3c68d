"""What a parent tells a child process when it starts it, over the control pipe as one line of JSON."""

from __future__ import annotations

import msgspec

from pypto_serving.config import EngineConfig


class WorkerStart(msgspec.Struct, frozen=True):
    """`channel` is the inherited file descriptor of the channel to the core; `epoch` numbers this worker life."""

    config: EngineConfig
    channel: int
    epoch: int


class CoreStart(msgspec.Struct, frozen=True):
    """`channel` is the inherited file descriptor of the channel to the API process."""

    config: EngineConfig
    channel: int
