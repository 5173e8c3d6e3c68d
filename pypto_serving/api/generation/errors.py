"""Report requests that the engine gave up."""

from __future__ import annotations

from pypto_serving.errors import RequestFailedError
from pypto_serving.types.request import RequestFault


class EngineFaultError(RequestFailedError):
    """The engine gave an admitted request up; `fault` says why."""

    def __init__(self, fault: RequestFault) -> None:
        super().__init__(fault.message, param=fault.param, code=fault.code)
        self.fault = fault
        self.status = fault.status
