"""Modules by the names that other programs give them, in lists of quantizations and in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pypto_serving.model.formats.values import dequantised
from pypto_serving.model.stored_names import own_module
from tests.checkpoints import make_checkpoint
from tests.model.coded import CODED, WIDE, inventory_of, read, schemes
from tests.quantised import FORMATS, quantise


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", ""])
def test_names_with_other_prefixes(tmp_path: Path, prefix: str) -> None:
    """Lists name modules as the files or as classes that wrap a decoder do."""
    named, matched = f"{prefix}layers.1.mlp.experts.3.up_proj", f"{prefix}layers.2.self_attn"
    head = "language_model.lm_head" if prefix else "lm_head"
    plain = {"lm_head", "model.layers.1.mlp.experts.3.up_proj"}
    plain |= {f"model.layers.2.self_attn.{part}_proj" for part in "qkvo"}
    pattern = "re:^" + matched.replace(".", "\\.") + ".*"
    others = ["re:^(?!.*language_model).*", "vision_tower.encoder.layers.0.mlp.up_proj"] if prefix else []
    gptq = {f"-:^{matched}.*": {}, f"-:{named}": {}}
    for section in (
        FORMATS["int4_g32"].section([head, named, pattern, *others]),
        FORMATS["blocks_bf16"].section([head, named, matched]),
        FORMATS["modelopt"].section([head, named, f"{matched}.*"]),
        FORMATS["gptq"].section([]) | {"dynamic": gptq},
    ):
        found = schemes(tmp_path, section)
        routers = {name for name in found if name.endswith("mlp.gate") and not found[name]}
        assert {name for name, scheme in found.items() if not scheme} - routers == plain, section
    groups = FORMATS["mxfp4"].section([])["config_groups"]["group_0"] | {"targets": [named, pattern]}
    section = FORMATS["mxfp4"].section([]) | {"config_groups": {"group_0": groups}}
    assert {name for name, scheme in schemes(tmp_path, section).items() if scheme} == plain - {"lm_head"}


@pytest.mark.parametrize("format", CODED)
def test_names_of_mixtral(tmp_path: Path, format: str) -> None:
    path = make_checkpoint(tmp_path / "model", "mixtral", **WIDE)
    means = quantise(path, format, ("lm_head", "re:.*block_sparse_moe.gate$"))
    inventory, tensors = inventory_of(path)
    assert {name for name, scheme in inventory.schemes.items() if not scheme.name} == {
        "lm_head",
        "model.layers.0.mlp.gate",
    }
    assert sum("block_sparse_moe" in module for module in means) == 3 * 8
    for module, wanted in means.items():
        matrix = read(inventory, tensors, own_module(module))
        np.testing.assert_array_equal(dequantised(matrix), wanted.numpy())
