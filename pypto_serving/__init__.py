"""An LLM serving engine: continuous batching over a paged KV cache made of groups.

`LLM`, `AsyncLLM`, `SamplingParams` and `StructuredOutputsParams` are the offline API; they are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM, AsyncLLM
    from pypto_serving.types.sampling import SamplingParams
    from pypto_serving.types.structured import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

_LAZY = {
    "AsyncLLM": "pypto_serving.offline.llm",
    "LLM": "pypto_serving.offline.llm",
    "SamplingParams": "pypto_serving.types.sampling",
    "StructuredOutputsParams": "pypto_serving.types.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
