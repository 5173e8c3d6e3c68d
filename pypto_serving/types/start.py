"""What a parent tells a child process when it starts it, over the control pipe as one line of JSON."""

from __future__ import annotations

import msgspec

from pypto_serving.config import EngineConfig


class WorkerStart(msgspec.Struct, frozen=True):
    """`address` is bound by the engine core; `epoch` numbers this worker life."""

    config: EngineConfig
    address: str
    epoch: int


class CoreStart(msgspec.Struct, frozen=True):
    """`address` is bound by the API process."""

    config: EngineConfig
    address: str
