"""What is asked of pypto-lib's Qwen3-14B. Where its checkout is on Python's path, its host functions are read."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pypto_serving.backend.npu.programs import _find_contract, _require_limits
from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import StageName
from pypto_serving.model.families import qwen3
from pypto_serving.model.qwen3.pypto import Qwen3Contract
from tests.model.configs import QWEN3_14B

LIBRARY = importlib.util.find_spec("contract")
CONTRACT = Qwen3Contract(qwen3.parse(QWEN3_14B, "config.json"), "2026-08", 4096, 512)
LIMITS = {
    "batch": 16,
    "max_seq": 4096,
    "page_size": 128,
    "vocab": 152064,
    "real_vocab": 151936,
    "num_layers": 40,
    "sampled_ids_pad": 8,
    "vocab_pad_multiple": 512,
}
DTYPES = {"bfloat16": "pl.BF16", "float32": "pl.FP32", "int32": "pl.INT32"}


@pytest.mark.npu
@pytest.mark.skipif(LIBRARY is None, reason="pypto-lib is not on PYTHONPATH; docs/npu.md says where to get it")
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_host_functions_take_what_the_contract_says(stage: StageName) -> None:
    assert LIBRARY is not None and LIBRARY.origin is not None
    source = Path(LIBRARY.origin).parents[1] / "models" / "qwen3_14b" / f"{stage}_fwd.py"
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    (host,) = [function for function in functions if function.name == f"qwen3_{stage}_host"]
    arguments = CONTRACT.stages[stage]
    assert [each.arg for each in host.args.args] == [each.name for each in arguments]
    for argument, described in zip(arguments, host.args.args, strict=True):
        assert described.annotation is not None
        assert DTYPES[argument.dtype] in ast.unparse(described.annotation), argument.name


def test_other_limits_are_refused() -> None:
    _require_limits(LIMITS, CONTRACT)
    for name, value in {"max_seq": 2048, "page_size": 64, "num_layers": 8}.items():
        with pytest.raises(ConfigError, match=f"^pypto-lib's contract has the limit {name} {value}, but must have "):
            _require_limits(LIMITS | {name: value}, CONTRACT)


CHECKPOINT: Any = SimpleNamespace(architecture="Qwen3ForCausalLM", model=SimpleNamespace(head_dim=128), raw={})


@pytest.mark.parametrize("problem", ["ImportError('pypto has no extern')", "AttributeError('pl has no extern')"])
def test_programs_for_another_pypto_are_refused(problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not taken for missing, which small programs would stand in for."""
    (tmp_path / "contract").mkdir()
    (tmp_path / "contract" / "__init__.py").write_text(f"raise {problem}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "contract", raising=False)
    with pytest.raises(ConfigError, match=r"^pypto-lib's programs cannot be loaded \(\w+ has no extern\); docs/npu.md"):
        _find_contract(CHECKPOINT)


def test_pypto_lib_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _find_contract(CHECKPOINT) is None
