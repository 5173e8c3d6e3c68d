"""Rewrite a checkpoint of `convert --format w4a16` as GPTQ: the same codes, scales in float16.

python benchmarks/make_gptq.py SOURCE DIR
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from pypto_serving.model.formats.quantization import SECTION

ZEROS = 0x77777777
"""Eight zero points of 8, less the 1 that version 1 of GPTQ adds."""


def as_gptq(tensors: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """Return the tensors of GPTQ. Both keep 8 inputs in a word, and outputs become columns."""
    made = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == "weight_packed":
            n, words = tensor.shape
            made[f"{module}.qweight"] = tensor.T.contiguous()
            made[f"{module}.qzeros"] = torch.full((words * 8 // group, n // 8), ZEROS, dtype=torch.int32)
            made[f"{module}.g_idx"] = torch.arange(words * 8, dtype=torch.int32) // group
        elif last == "weight_scale":
            made[f"{module}.scales"] = tensor.T.to(torch.float16).contiguous()
        elif last != "weight_shape":
            made[name] = tensor
    return made


def main(
    source: Annotated[Path, typer.Argument(help="A folder that `convert --format w4a16` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; created if missing.")],
) -> None:
    """Rewrite the checkpoint."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    group = config[SECTION]["config_groups"]["group_0"]["weights"]["group_size"]
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            save_file(as_gptq(load_file(file), group), out / file.name, metadata={"format": "pt"})
        elif file.name != "config.json":
            shutil.copy(file, out)
    config[SECTION] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
