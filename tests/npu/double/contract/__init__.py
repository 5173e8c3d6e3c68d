"""A double of pypto-lib's registry of contracts, with a contract for any dense Qwen3 whose pages it can hold.

`PYPTO_LIB_DOUBLE_REVISION` chooses the programs: 2026-08, the default, or 2026-06.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

VARIANT = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3"


def find_contract_for_model_config(model_config: object) -> Any:
    """Return the contract of a model. Raises KeyError."""
    if getattr(model_config, "model_type", None) != "qwen3":
        raise KeyError(f"unsupported external contract for model config: {getattr(model_config, 'model_type', None)!r}")
    spec = importlib.util.spec_from_file_location("_double_tiny_qwen3", VARIANT / "contract.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.make_contract(model_config)
