"""The null program, which keeps its dispatches: random plans for contracts."""

from __future__ import annotations

from typing import Any

import numpy as np

from pypto_serving.backend.base import StepInputs
from pypto_serving.backend.null.program import NullProgram
from pypto_serving.types.config import EngineConfig


class Recorded(NullProgram):
    """The null program, which keeps copies of its dispatches."""

    def __init__(self, config: EngineConfig, found: list[StepInputs]) -> None:
        super().__init__(config)
        self.found = found

    def submit(self, inputs: StepInputs, sampling: Any) -> None:
        names = StepInputs.__struct_fields__
        self.found.append(StepInputs(**{name: _copied(getattr(inputs, name)) for name in names}))
        super().submit(inputs, sampling)


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value
