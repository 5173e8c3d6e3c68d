"""What is asked of pypto-lib's Qwen3-14B. Where its checkout is on Python's path, its host functions are read."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from pypto_serving.backend.npu.library import _require_limits
from pypto_serving.errors import ConfigError
from pypto_serving.model.contract import StageName
from pypto_serving.model.qwen3.config import Qwen3Config
from pypto_serving.model.qwen3.pypto import Qwen3Contract
from tests.model.test_qwen3_pypto import QWEN3_14B

LIBRARY = importlib.util.find_spec("contract")
CONTRACT = Qwen3Contract(Qwen3Config.from_json(QWEN3_14B, "config.json"), "2026-08", 4096, 512)
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
