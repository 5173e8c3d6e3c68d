"""Report requests that cannot be queued, or that the engine gave up."""

from __future__ import annotations

from pypto_serving.errors import RequestError, RequestFailedError
from pypto_serving.types.request import RequestFault


class TooManyChoicesError(RequestError):
    """The request has more choices than the server can ever hold."""


class EngineFaultError(RequestFailedError):
    """The engine gave an admitted request up; `fault` says why."""

    def __init__(self, fault: RequestFault) -> None:
        super().__init__(fault.message, code=fault.code)
        self.fault = fault
        self.status = fault.status
