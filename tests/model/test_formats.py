"""Every format: tensors are found and checked by name, and mean what the writer meant; other schemes are named."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ModelError
from pypto_serving.kernels import Engine
from pypto_serving.model.checkpoint import Checkpoint, StoredTensors
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.section import read_quantization
from pypto_serving.model.formats.values import MatrixTensors, dequantised
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.registry import load_spec, read_config
from tests.checkpoints import make_checkpoint
from tests.model.coded import CODED, WIDE, inventory_of, read, schemes
from tests.model.configs import MOE, write
from tests.needs import needs_kernels
from tests.quantised import FORMATS, Tensors, quantise, quantise_deepseek

MODULE = "model.layers.0.mlp.down_proj"


def made(path: Path, format: str, kind: str = "qwen3") -> tuple[Path, Tensors]:
    path = make_checkpoint(path / format, kind, **WIDE)
    return path, quantise(path, format)


@pytest.mark.parametrize("format", CODED)
def test_matrices_mean_what_was_meant(tmp_path: Path, format: str) -> None:
    path, means = made(tmp_path, format)
    inventory, tensors = inventory_of(path)
    assert {scheme.name for scheme in inventory.schemes.values()} == {FORMATS[format].name}
    for module, wanted in means.items():
        stored = read(inventory, tensors, module)
        assert np.array_equal(dequantised(stored), wanted.numpy())
        assert np.array_equal(dequantised(stored, 3, 70), wanted[3:70].numpy())


def test_exponents_stored_as_plain_bytes(tmp_path: Path) -> None:
    """e8m0 scales of FP8 in U8, as writers without that type have them, are powers of two as well."""
    path, means = made(tmp_path, "blocks_e8m0")

    def as_bytes(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].view(torch.uint8)

    change(path, as_bytes)
    assert np.array_equal(dequantised(read(*inventory_of(path), MODULE)), means[MODULE].numpy())


@pytest.mark.parametrize("form", ["released", "base"])
def test_matrices_of_deepseek_v4(tmp_path: Path, form: str) -> None:
    path = make_checkpoint(tmp_path, "deepseek_v4_fast", "bfloat16")
    means = quantise_deepseek(path, form)
    tensors = StoredTensors(path, lambda *_: None)
    inventory = DeepseekV4Inventory(read_config(path).model, tensors.headers)
    tensors.require(inventory.expected(), inventory.ignores)
    for module, wanted in means.items():
        scheme: Any = inventory.scheme(f"{module}.weight")
        stored = scheme.read(MatrixTensors(tensors, module), *wanted.shape)
        assert np.array_equal(dequantised(stored), wanted.numpy())
    contents = read_config(path).contents()
    assert contents.verdicts == ()
    forms = {form.name: form.matrices for form in contents.forms}
    experts, matrices = 4 * 8 * 3, sum(not name.startswith("mtp.") for name in means)
    assert forms == {"fp8 128x128": matrices} | (
        {"mxfp4": experts, "fp8 128x128": matrices - experts} if form == "released" else {}
    )


def test_experts_are_what_files_hold(tmp_path: Path) -> None:
    """A repackaged release says nothing of its experts."""
    path = make_checkpoint(tmp_path, "deepseek_v4_fast", "bfloat16")
    quantise_deepseek(path, "released")
    config, planned = json.loads((path / "config.json").read_text()), load_spec(path)
    del config["expert_dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert read_config(path).contents().verdicts == ()
    assert load_spec(path).packed_bytes == planned.packed_bytes


def change(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_every_tensor_is_needed(tmp_path: Path, format: str) -> None:
    """One that is missing, or of another shape or type, is named; and so is one too many."""
    path, _ = made(tmp_path, format)
    whole = load_file(path / "model.safetensors")
    inventory, _ = inventory_of(path)
    n, k = inventory.weights()[f"{MODULE}.weight"]
    for name in inventory.schemes[MODULE].expected(MODULE, n, k):
        odd = whole[name].flatten()[:1].repeat(7)
        for tensor in (None, odd, whole[name].to(torch.float64)):
            kept = {key: value for key, value in whole.items() if key != name}
            save_file(kept if tensor is None else kept | {name: tensor}, path / "model.safetensors")
            with pytest.raises(ModelError) as caught:
                inventory_of(path)
            assert name in str(caught.value) and "\n" not in str(caught.value)
    save_file(whole | {f"{MODULE}.weight_surplus": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight_surplus is not part"):
        inventory_of(path)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_spec_and_what_files_hold(tmp_path: Path, format: str) -> None:
    """Memory is planned without files; `check` counts the bytes of those that are there."""
    path, means = made(tmp_path, format)
    spec, contents = load_spec(path), read_config(path).contents()
    assert spec.quantization == FORMATS[format].name
    assert spec.dtype == "bfloat16" and [line for line in contents.verdicts if "left alone" not in line] == []
    (form,) = contents.forms
    assert (form.name, form.matrices) == (FORMATS[format].name, len(means))
    assert form.num_parameters == sum(values.numel() for values in means.values())
    bits = {"int4": (4.1, 4.7), "fp8 ": (8, 8.2), "w8a8": (8, 8.4), "mxfp": (4.25, 4.25), "nvfp": (4.5, 4.51)}
    if format != "w4a8":
        low, high = bits[form.name[:4]]
        assert low <= form.bits_per_weight <= high
    files = sum(tensor.num_bytes for tensor in Checkpoint.open(path).tensors.values())
    assert sum(tensors.num_bytes for tensors in contents.tensors) == files
    assert 0.9 * files < spec.packed_bytes < 1.15 * files or format == "w4a8"
    assert spec.token_bytes == spec.packed_bytes


def test_a_token_reads_its_experts(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "int4_g32", "qwen3_moe")
    config = read_config(path).model
    inventory = DecoderInventory(config)
    sizes = inventory.packed_bytes(2)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    unread = sizes["model.embed_tokens.weight"] + experts * 6 // 8
    assert load_spec(path).token_bytes == sum(sizes.values()) - unread
    outputs, lines, head, own = (2 * 64, 128), (64, 32), 4 * 2, 4
    assert experts == 8 * sum(n * (line + head + own) for n, line in zip(outputs, lines, strict=True))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("format", ["gptq", "awq", "blocks_f32"])
def test_files_say_what_is_not_quantised(tmp_path: Path, kind: str, format: str) -> None:
    """A matrix that is stored in floats is plain, whatever lists of modules say."""
    path = make_checkpoint(tmp_path / format, kind, **WIDE)
    plain = load_file(path / "model.safetensors")
    quantise(path, format, ignore=())
    module, planned = "model.layers.0.self_attn.o_proj", load_spec(path)
    scheme, shape = inventory_of(path)[0].schemes[module], plain["model.layers.0.self_attn.o_proj.weight"].shape

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(module)]:
            del tensors[name]
        tensors[f"{module}.weight"] = plain[f"{module}.weight"]

    change(path, edit)
    inventory, _ = inventory_of(path)
    plainly = {name for name, scheme in inventory.schemes.items() if not scheme.name}
    assert plainly == {module, *(name for name in inventory.schemes if name.endswith(("mlp.gate", "lm_head")))}
    more = 2 * shape[0] * shape[1] - scheme.packed_bytes(*shape)
    spec = load_spec(path)
    assert spec.packed_bytes - planned.packed_bytes == spec.token_bytes - planned.token_bytes == more


@pytest.mark.parametrize(("format", "width"), [("awq", 160), ("gptq", 144)])
def test_what_groups_do_not_fill_is_left_in_floats(tmp_path: Path, format: str, width: int) -> None:
    """Quantisers skip a matrix whose inputs are no whole groups, without a word in config.json."""
    path = make_checkpoint(tmp_path / "model", **WIDE | {"intermediate_size": width})

    def quantise_others(tensors: Tensors) -> None:
        modules = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
        for module in set(modules) - {MODULE}:
            parts, _ = FORMATS[format].quantise(tensors.pop(f"{module}.weight").float())
            tensors.update({f"{module}.{part}": value.contiguous() for part, value in parts.items()})

    change(path, quantise_others)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[format].section([])}))
    schemes = inventory_of(path)[0].schemes
    assert [module for module, scheme in schemes.items() if not scheme.name] == [MODULE]


@pytest.mark.parametrize(
    ("format", "tensor", "value", "words"),
    [
        ("mxfp4", "weight_scale", 255, "not finite"),
        ("nvfp4", "weight_scale", 0x7F, "not finite"),
        ("nvfp4", "weight_global_scale", 0.0, "divided by it"),
        ("int4_g32", "weight_scale", float("nan"), "not finite"),
        ("int4_g32", "weight_shape", 7, r"says \[7, 384\]"),
        ("blocks_e8m0", "weight_scale_inv", 255, "not finite"),
        ("gptq", "g_idx", 3, "input 0 into group 3, not 0: act-order"),
        ("gptq", "qzeros", 0, r"zero point \d+, but sym is true"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, format: str, tensor: str, value: Any, words: str) -> None:
    path, _ = made(tmp_path, format)
    spoil(path, tensor, value)
    inventory, tensors = inventory_of(path)
    with pytest.raises(ModelError, match=words) as caught:
        read(inventory, tensors, MODULE)
    assert f"{MODULE}.{tensor}" in str(caught.value) and "\n" not in str(caught.value)


def spoil(path: Path, tensor: str, value: Any) -> None:
    """Change the first number of a tensor of MODULE."""

    def edit(tensors: Tensors) -> None:
        found = tensors[f"{MODULE}.{tensor}"]
        raw = found.view(torch.uint8) if found.dtype.itemsize == 1 and value > 8 else found
        raw.view(-1)[0] = value

    change(path, edit)


@needs_kernels
@pytest.mark.parametrize(
    ("format", "value", "words"),
    [("blocks_bf16", 0x7F, "not a number"), ("blocks_bf16", 0xFF, "not a number"), ("w4a8", 8, r"not in \[-8, 7\]")],
)
def test_weights_that_are_none_are_found_while_they_are_packed(
    tmp_path: Path, format: str, value: int, words: str
) -> None:
    """Not by reading them once more before."""
    path, _ = made(tmp_path, format)
    spoil(path, "weight", value)
    inventory, _ = inventory_of(path)
    weights = PackedWeights(path, Engine(), lambda *_: None)
    weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
    with pytest.raises(ModelError, match=f"{MODULE}: a weight of output 0 is {words}"):
        weights.matrix([MODULE])


@needs_kernels
def test_scales_of_int8_are_finite(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "w8a8")
    spoil(path, "weight_scale", float("inf"))
    inventory, _ = inventory_of(path)
    weights = PackedWeights(path, Engine(), lambda *_: None)
    weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
    with pytest.raises(ModelError, match=f"tensor {MODULE}.weight_scale has scales that are not finite"):
        weights.matrix([MODULE])


@pytest.mark.parametrize(("format", "name"), [("gptq_asym", "g_idx"), ("int4_g32", "weight_g_idx")])
def test_act_order_is_refused_by_its_tensor(tmp_path: Path, format: str, name: str) -> None:
    """Not by the flag `desc_act`, which files have whose groups are neighbours."""
    path, means = made(tmp_path, format)
    order = torch.arange(384, dtype=torch.int32) // 32
    change(path, lambda tensors: tensors.update({f"{MODULE}.{name}": order}))
    assert np.array_equal(dequantised(read(*inventory_of(path), MODULE)), means[MODULE].numpy())
    change(path, lambda tensors: tensors.update({f"{MODULE}.{name}": order.flip(0)}))
    with pytest.raises(ModelError, match=rf"{MODULE}.{name} puts input 0 into group 11, not 0: act-order"):
        read(*inventory_of(path), MODULE)
    for odd in (order[:64], order[None], order.float()):
        change(path, lambda tensors, odd=odd: tensors.update({f"{MODULE}.{name}": odd.contiguous()}))
        with pytest.raises(ModelError, match=rf"{MODULE}.{name} has shape .* must have shape \[384\] and dtype I32"):
            read(*inventory_of(path), MODULE)


@pytest.mark.parametrize("format", ["int4_g32", "w4a8", "gptq"])
def test_order_that_was_never_set(tmp_path: Path, format: str) -> None:
    """compressed-tensors fills `weight_g_idx` with -1 then. In GPTQ that would be the last group."""
    path, means = made(tmp_path, format)
    name, unset = "g_idx" if format == "gptq" else "weight_g_idx", torch.full((384,), -1, dtype=torch.int32)
    change(path, lambda tensors: tensors.update({f"{MODULE}.{name}": unset}))
    if format != "gptq":
        assert np.array_equal(dequantised(read(*inventory_of(path), MODULE)), means[MODULE].numpy())
        unset[5] = 0
        change(path, lambda tensors: tensors.update({f"{MODULE}.{name}": unset}))
    with pytest.raises(ModelError, match=rf"{MODULE}.{name} puts input 0 into group -1, not 0: act-order"):
        read(*inventory_of(path), MODULE)


def test_biases_that_gptq_files_have_besides(tmp_path: Path) -> None:
    """Those of zeros are written by habit; others are not left out in silence."""
    path, means = made(tmp_path, "gptq")
    change(path, lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(128, dtype=torch.float16)}))
    assert np.array_equal(dequantised(read(*inventory_of(path), MODULE)), means[MODULE].numpy())
    for odd, words in (
        (torch.ones(128, dtype=torch.float16), "bias is not zero"),
        (torch.zeros(128, dtype=torch.float64), "bias has shape .128. and dtype F64"),
    ):
        change(path, lambda tensors, odd=odd: tensors.update({f"{MODULE}.bias": odd}))
        with pytest.raises(ModelError, match=words):
            read(*inventory_of(path), MODULE)


@pytest.mark.parametrize("format", ["gptq_asym", "gptq_v2"])
def test_zero_points_of_0(tmp_path: Path, format: str) -> None:
    """Those of outputs without negative weights. Version 1 of GPTQ is one less in every word, not in every code."""
    path = make_checkpoint(tmp_path / "model", **WIDE)
    change(path, lambda tensors: tensors[f"{MODULE}.weight"][1::7].abs_())
    means = quantise(path, format)[MODULE]
    stored = read(*inventory_of(path), MODULE)
    assert (stored.zeros[1::7] == 0).all() and stored.zeros[0].any()
    assert np.array_equal(dequantised(stored), means.numpy())


def refused(path: Path, section: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(write(path, MOE, quantization_config=section))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("format", "key", "value"),
    [
        ("int4_g32", "config_groups.group_0.weights.num_bits", 8),
        ("int4_g32", "config_groups.group_0.weights.group_size", 48),
        ("int4_g32", "config_groups.group_0.weights.group_size", 32.0),
        ("int4_g32", "config_groups.group_0.weights.strategy", "tensor"),
        ("int4_g32", "config_groups.group_0.input_activations", {"num_bits": 8, "type": "float"}),
        ("w4a8", "config_groups.group_0.input_activations.dynamic", False),
        ("fp8_block", "config_groups.group_0.weights.block_structure", [128]),
        ("fp8_block", "config_groups.group_0.weights.block_structure", f"{'9' * 5000}x4"),
        ("fp8_block", "config_groups.group_0.weights.block_structure", "128x30"),
        ("fp8_block", "config_groups.group_0.input_activations.type", "int"),
        ("fp8_channel", "config_groups.group_0.weights.num_bits", 4),
        ("mxfp4", "config_groups.group_0.weights.group_size", 16),
        ("nvfp4", "config_groups.group_0.weights.strategy", "group"),
        ("blocks_bf16", "weight_block_size", [128]),
        ("blocks_bf16", "weight_block_size", [128, 2]),
        ("blocks_bf16", "fmt", "e5m2"),
        ("blocks_bf16", "modules_to_not_convert", "lm_head"),
        ("gptq", "bits", 8),
        ("gptq", "checkpoint_format", "gptq_p"),
        ("gptq", "is_marlin_format", True),
        ("gptq", "pack_dtype", "int64"),
        ("gptq", "group_size", 0),
        ("awq", "q_group_size", 16),
        ("gptq", "dynamic.+:.*down.*.bits", 8),
        ("awq", "version", "gemv"),
        ("awq", "zero_point", False),
        ("auto_round", "packing_format", "auto_round:fp8"),
        ("auto_round", "data_type", "fp"),
        ("auto_round", "extra_config.model.layers.0.bits", 8),
        ("modelopt", "quant_algo", "MIXED_PRECISION"),
    ],
)
def test_other_schemes_are_named(tmp_path: Path, format: str, key: str, value: Any) -> None:
    section = json.loads(json.dumps(FORMATS[format].section(["lm_head"])))
    match key.split(".", 1):
        case ["dynamic", _]:
            section["dynamic"] = {"+:.*down.*": {"bits": value}}
        case ["extra_config", _]:
            section["extra_config"] = {"model.layers.0": {"bits": value}}
        case _:
            *outer, last = key.split(".")
            reduce(getitem, outer, section)[last] = value
    message = refused(tmp_path, section)
    assert f"quantization_config.{key} is {json.dumps(value)[:60]}" in message


def leaves(section: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values of a section, objects and lists among them."""
    inner = section.items() if isinstance(section, dict) else enumerate(section) if isinstance(section, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_values_of_any_type_are_read_or_refused(format: str) -> None:
    """Whatever stands in a field, the answer is a section that works, or one line."""
    odd: tuple[Any, ...] = (None, True, -1, 0, 2.5, 10**30, "", "re:", "\0", [], [[]], [1], {}, {"a": {}}, "(" * 200)
    whole = json.dumps(FORMATS[format].section(["lm_head", "re:.*mlp.gate$"]))
    for path, value in itertools.product(leaves(json.loads(whole)), odd):
        section = json.loads(whole)
        reduce(getitem, path[:-1], section)[path[-1]] = value
        try:
            quantization = read_quantization(Fields({"quantization_config": section}, "config.json"))
        except ModelError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, (path, value)
            continue
        assert quantization is not None and quantization.schemes("model.layers.0.mlp.gate_proj")


def test_groups_of_mixed_precision(tmp_path: Path) -> None:
    """A name comes before a pattern, that before the class, and `ignore` before all."""
    int4, fp8 = (FORMATS[name].section([])["config_groups"]["group_0"] for name in ("int4_g128_f32", "fp8_channel"))
    mxfp4 = FORMATS["mxfp4"].section([])["config_groups"]["group_0"]
    groups = {
        "group_0": int4 | {"format": "pack-quantized"},
        "group_1": fp8 | {"format": "float-quantized", "targets": ["re:.*self_attn.*"]},
        "group_2": mxfp4 | {"format": "mxfp4-pack-quantized", "targets": ["model.layers.3.self_attn.o_proj"]},
    }
    section = FORMATS["int4_g32"].section(["lm_head", "re:.*mlp.gate$", "re:model.layers.5.self_attn"])
    found = schemes(tmp_path, section | {"format": "mixed-precision", "config_groups": groups})
    assert found["model.layers.3.self_attn.o_proj"] == "mxfp4"
    assert found["model.layers.3.self_attn.q_proj"] == "fp8 per output"
    assert found["model.layers.3.mlp.up_proj"] == found["model.layers.1.mlp.experts.7.up_proj"] == "int4 g128"
    assert found["lm_head"] == found["model.layers.5.self_attn.q_proj"] == found["model.layers.1.mlp.gate"] == ""
    spec = load_spec(tmp_path)
    assert spec.quantization == "fp8 per output + int4 g128 + mxfp4"
    del groups["group_1"]["format"]
    section |= {"format": "mixed-precision", "config_groups": groups}
    assert "config_groups.group_1.format is null" in refused(tmp_path, section)


def test_lists_of_modules_name_parts(tmp_path: Path) -> None:
    listed = ["lm_head", "model.layers.1", "mlp.gate", "self_attn.o"]
    found = schemes(tmp_path, FORMATS["blocks_bf16"].section(listed))
    assert {name for name, scheme in found.items() if not scheme} == {
        "lm_head",
        *(name for name in found if name.startswith("model.layers.1.") or name.endswith("mlp.gate")),
    }


def test_overrides_of_gptq(tmp_path: Path) -> None:
    """The first pattern that matches counts."""
    dynamic = {"-:.*layers\\.0\\..*": {}, "+:.*o_proj": {"group_size": 64}, ".*down_proj": {"sym": False}}
    found = schemes(tmp_path, FORMATS["gptq"].section([]) | {"dynamic": dynamic})
    assert found["model.layers.0.self_attn.o_proj"] == found["lm_head"] == found["model.layers.1.mlp.gate"] == ""
    assert found["model.layers.2.self_attn.o_proj"] == "int4 g64"
    assert found["model.layers.2.mlp.down_proj"] == "int4 g32 with zero points"
    assert found["model.layers.2.mlp.up_proj"] == "int4 g32"


def test_wildcards_of_modelopt(tmp_path: Path) -> None:
    section = FORMATS["modelopt"].section([]) | {"exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}
    del section["ignore"]
    found = schemes(tmp_path, section)
    assert found["model.layers.2.self_attn.o_proj"] == found["lm_head"] == ""
    assert found["model.layers.2.mlp.up_proj"] == "nvfp4"


def test_groups_must_fill_the_inputs(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", hidden_size=96, num_hidden_layers=1)
    quantise(path, "int4_g32")
    config = (path / "config.json").read_text().replace('"group_size": 32', '"group_size": 64')
    (path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="96 inputs, which groups of 64 do not fill"):
        inventory_of(path)


def test_columns_must_fill_their_words(tmp_path: Path) -> None:
    """Before a matrix is packed: `check` tells it."""
    path = make_checkpoint(tmp_path / "model", vocab_size=309, num_hidden_layers=1, tie_word_embeddings=False)
    quantise(path, "gptq", head=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["lm_head"] = True
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lm_head has 309 outputs, but int4 g32 by columns stores multiples of 8"):
        read_config(path).contents()
