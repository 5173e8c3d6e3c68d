"""A double of PyPTO's language: it reads what a host function takes and dispatches, and compiles it to numpy kernels.

Only Qwen3's stages have such kernels, those of `models/tiny_qwen3`, which a host function `qwen3_STAGE_host` calls.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pypto.ir.distributed_compiled_program import Host, Parameter

KERNELS = Path(__file__).resolve().parents[2] / "models" / "tiny_qwen3" / "kernels.py"
FP32, BF16, INT32, INDEX = "float32", "bfloat16", "int32", "index"


@dataclass(frozen=True)
class Annotation:
    """What is known of an argument."""

    shape: tuple[int, ...]
    dtype: str
    direction: str = "in"


class Tensor:
    def __class_getitem__(cls, of: Any) -> Annotation:
        shape, dtype = of
        return Annotation(tuple(shape), dtype)


class Out:
    def __class_getitem__(cls, of: Annotation) -> Annotation:
        return replace(of, direction="out")


class Scalar:
    def __class_getitem__(cls, dtype: str) -> Annotation:
        return Annotation((), dtype)


def dynamic(name: str) -> int:
    return -1


class Jit:
    """The decorators; only a host function becomes something that can be compiled."""

    def __call__(self, function: Any) -> Any:
        return function

    inline = incore = staticmethod(lambda function: function)

    @staticmethod
    def host(function: Any) -> Host:
        """Read the arguments, and which of them each device's dispatch gets under which name."""
        stage = function.__name__.removeprefix("qwen3_").removesuffix("_host")
        (definition,) = ast.parse(inspect.getsource(function)).body
        assert isinstance(definition, ast.FunctionDef)
        own = inspect.signature(function.__globals__[stage]).parameters
        dispatches: dict[int, dict[str, str]] = {}
        for node in ast.walk(definition):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == stage:
                device = next((ast.literal_eval(each.value) for each in node.keywords if each.arg == "device"), 0)
                given = [ast.unparse(each) for each in node.args]
                dispatches[device] = dict(zip(own, given, strict=True))
        types = inspect.get_annotations(function, eval_str=True)
        parameters = tuple(Parameter(name, of.dtype, of.shape, of.direction) for name, of in types.items())
        passed = tuple(
            {ours: theirs for ours, theirs in dispatches[device].items() if theirs in types}
            for device in range(len(dispatches))
        )
        return Host(str(KERNELS), stage, parameters, passed)


jit = Jit()
