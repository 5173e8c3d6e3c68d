"""How much a client wants the model to think."""

from __future__ import annotations

from typing import Any

from pypto_serving.api.chat.tools import refuse
from pypto_serving.util import brief

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def check_effort(effort: Any, field: str) -> None:
    """Raise RequestError, about a client's field, unless it is null or one of EFFORTS."""
    if effort is not None and effort not in EFFORTS:
        refuse(field, f"is {brief(effort)}, but must be one of {', '.join(EFFORTS)}")
