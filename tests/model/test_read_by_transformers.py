"""transformers reads what `convert` writes, by compressed-tensors' own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from pypto_serving.model.convert.rounding import Encoding, mxfp4, w4a16, w8a8
from tests.checkpoints import make_checkpoint
from tests.model.converting import converted, tensors_of, values

SCALE = ".weight_scale"
ENCODINGS = [w8a8(), w4a16(32), w4a16(128), mxfp4()]


def meaning(path: Path, encoding: Encoding) -> dict[str, torch.Tensor]:
    """What the matrices of a checkpoint are, by module, in the arithmetic of transformers.

    It multiplies the codes of int4 in bfloat16, the dtype of their scales.
    """
    if encoding.name == "w8a8":
        stored = tensors_of(path)
        modules = (name.removesuffix(SCALE) for name in stored if name.endswith(SCALE))
        return {name: stored[f"{name}.weight"].float() * stored[f"{name}{SCALE}"].float() for name in modules}
    found = {name: torch.from_numpy(value) for name, value in values(path).items()}
    return (
        {name: value.bfloat16().float() for name, value in found.items()}
        if encoding.name.startswith("w4a16")
        else found
    )


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_every_matrix_has_the_same_values(tmp_path: Path, encoding: Encoding) -> None:
    source = make_checkpoint(tmp_path / "source", hidden_size=128, intermediate_size=384, num_hidden_layers=2)
    converted(source, tmp_path / "target", encoding)
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32, quantization_config=config)
    found, wanted = model.state_dict(), meaning(tmp_path / "target", encoding)
    assert len(wanted) >= 14
    for name, value in wanted.items():
        assert torch.equal(found[f"{name}.weight"].float(), value), name
