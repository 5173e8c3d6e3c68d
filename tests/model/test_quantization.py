"""What is read from `quantization_config`: llm-compressor's W8A8, and errors that name what else was found."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.formats.schemes import Int8
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.registry import Serving, load_spec, read_config
from pypto_serving.setup.host import read_host_facts
from pypto_serving.setup.options import make_options
from pypto_serving.setup.resolver import resolve
from tests.checkpoints import make_checkpoint
from tests.compressed import compress, quantization_config
from tests.model.configs import MOE, RELEASED, write
from tests.model.sequences import load_program
from tests.needs import needs_kernels
from tests.quantised import FORMATS
from tests.simulation import null_config

IGNORED = ["lm_head"]


def with_section(path: Path, model: dict[str, Any], keys: str, value: Any, ignore: list[str]) -> Path:
    """A folder with config.json, where one value of its quantization_config is another."""
    section = copy.deepcopy(quantization_config(ignore))
    where = section
    *outer, last = keys.split(".")
    for key in outer:
        where = where[key]
    where[last] = value
    return write(path, model, quantization_config=section)


def test_what_llm_compressor_writes(tmp_path: Path) -> None:
    path = write(tmp_path, RELEASED, quantization_config=quantization_config(IGNORED))
    config = read_config(path).model
    int8, tensors = DecoderInventory(config).int8_weights(), DecoderInventory(config).tensors()
    assert len(int8) == 28 * 7 and all(name.endswith("_proj.weight") for name in int8)
    assert tensors["model.layers.3.mlp.down_proj.weight_scale"] == (1024, 1)
    assert "lm_head.weight_scale" not in tensors
    spec = load_spec(path)
    assert (spec.quantization, spec.dtype, spec.num_parameters) == ("w8a8", "bfloat16", 596_049_920)
    outputs = 28 * (4096 + 1024 + 6144 + 1024)
    linear = 28 * 1024 * (4096 + 2048 + 6144 + 3072)
    vectors = 28 * (2 * 1024 + 2 * 128) + 1024
    assert spec.packed_bytes == 2 * (596_049_920 - linear + vectors) + linear + 8 * outputs


def test_patterns_and_names_are_ignored(tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*mlp.gate$", "model.layers.0.self_attn.o_proj", r"re:model\.layers\.1\.mlp\.experts"]
    config = read_config(write(tmp_path, MOE, quantization_config=quantization_config(ignore))).model
    int8 = DecoderInventory(config).int8_weights()
    assert "model.layers.5.mlp.experts.7.down_proj.weight" in int8
    assert "model.layers.0.mlp.gate_proj.weight" in int8 and "model.layers.1.self_attn.o_proj.weight" in int8
    assert not {"model.layers.5.mlp.gate.weight", "model.layers.0.self_attn.o_proj.weight"} & int8
    assert not any(name.startswith("model.layers.1.mlp") for name in int8)


@pytest.mark.parametrize("dtype", ["float32", "float16", ...])
def test_int8_weights_are_served_in_bfloat16(tmp_path: Path, dtype: Any) -> None:
    path = write(tmp_path, RELEASED, torch_dtype=dtype, quantization_config=quantization_config(IGNORED))
    assert load_spec(path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "quark"),
        ("format", "marlin-24"),
        ("quantization_status", "calibration"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("config_groups", {}),
        ("config_groups.group_1", {"targets": ["Linear"]}),
        ("config_groups.group_0.targets", []),
        ("config_groups.group_0.format", "mxfp8-quantized"),
        ("config_groups.group_0.output_activations", {"num_bits": 8}),
        ("config_groups.group_0.input_activations", None),
        ("config_groups.group_0.input_activations.dynamic", False),
        ("config_groups.group_0.input_activations.strategy", "tensor"),
        ("config_groups.group_0.input_activations.symmetric", False),
        ("config_groups.group_0.weights", None),
        ("config_groups.group_0.weights.num_bits", 3),
        ("config_groups.group_0.weights.type", "float"),
        ("config_groups.group_0.weights.symmetric", False),
        ("config_groups.group_0.weights.symmetric", 1),
        ("config_groups.group_0.weights.strategy", "group"),
        ("config_groups.group_0.weights.group_size", 128),
        ("config_groups.group_0.weights.actorder", "weight"),
        ("config_groups.group_0.weights.dynamic", True),
        ("ignore", "lm_head"),
        ("ignore", []),
    ],
)
def test_other_schemes_are_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(with_section(tmp_path, RELEASED, key, value, IGNORED))
    message = str(caught.value)
    whole = key == "config_groups.group_1"
    shown, value = (f"{key}.weights", None) if whole else (key, value)
    assert f"quantization_config.{shown} is " in message and "\n" not in message
    assert json.dumps(value) in message


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("re:((", r"ignore has 're:\(\(', which is no pattern"),
        ("re:a{99999999999}", "is no pattern: the repetition number is too large"),
        ("re:" + "(" * 5000 + ")" * 5000, "is no pattern: maximum recursion"),
        (r"re:(\w+\.?)*x", r"has '\(\\\\w\+\\\\.\?\)\*x', and its patterns could take long to match"),
        ("re:(?:.|.)" + "(.|.)" * 25, "could take long to match"),
        ("re:.*.*.*.*.*x", "could take long to match"),
        ("re:" + ".?" * 30 + "x", "could take long to match"),
        ("re:(?=(m|mo|o)*)x", "could take long to match"),
    ],
)
def test_patterns_that_are_none_or_take_long(tmp_path: Path, entry: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        load_spec(write(tmp_path, MOE, quantization_config=quantization_config([entry])))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_too_many_patterns(tmp_path: Path) -> None:
    """Each is cheap, but every module of a large model is matched against all of them."""
    ignore = [f"re:x{number}" for number in range(5000)]
    with pytest.raises(ModelError, match="could take long to match"):
        read_config(write(tmp_path, MOE, quantization_config=quantization_config(ignore)))


def test_patterns_of_any_depth(tmp_path: Path) -> None:
    """They are read, or refused in one line."""
    refused = 0
    for depth in range(100, 600, 20):
        entry = "re:" + "(" * depth + ")" * depth
        try:
            read_config(write(tmp_path, MOE, quantization_config=quantization_config([entry])))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 0 < refused < 25


def test_patterns_as_quantisers_write_them(tmp_path: Path) -> None:
    """Many of them, with repeats of characters, groups that are not repeated, and lookaheads."""
    some = [
        r"re:^(?!.*self_attn).*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj$",
        r"re:(?:model\.)?layers\.(0|1|[2-9]|1\d)\.self_attn.*",
        r"re:(x)?(?(1)|)(?>y.*z)q*+",
        *(rf"re:model\.layers\.{layer}\..*(q|k|v)_proj.*" for layer in range(200)),
    ]
    config = read_config(write(tmp_path, MOE, quantization_config=quantization_config(some))).model
    int8 = DecoderInventory(config).int8_weights()
    assert "model.layers.5.mlp.experts.7.down_proj.weight" in int8
    assert not any("layers.7.self_attn" in name or "experts.7.up_proj" in name for name in int8)


def resolve_error(path: Path, has: tuple[str, ...] = ("portable",), **options: Any) -> str:
    chosen = make_options({"model": str(path), **options})
    spec = load_spec(path, Serving(chosen.dtype or "auto", chosen.block_size or 32))
    with pytest.raises(ConfigError) as caught:
        resolve(chosen, spec, msgspec.structs.replace(read_host_facts(), kernels=has))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_int8_needs_the_kernels(tmp_path: Path) -> None:
    path = write(tmp_path, RELEASED, quantization_config=quantization_config(IGNORED))
    assert "torch was chosen by --kernels" in resolve_error(path, kernels="torch")
    assert "bfloat16 only, not float32 (see --dtype)" in resolve_error(path, dtype="float32")
    assert "no C++ compiler" in resolve_error(path, ())
    assert "multiple of 32 tokens, not 16" in resolve_error(path, block_size=16)
    path = write(tmp_path, RELEASED, hidden_size=1026, quantization_config=quantization_config(IGNORED))
    assert "quantised weights need a hidden_size that is a multiple of 4, not 1026" in resolve_error(path)
    path = write(
        tmp_path, RELEASED, intermediate_size=3088, quantization_config=FORMATS["int4_channel"].section(IGNORED)
    )
    assert "4-bit weights need inputs in multiples of 32, not 3088" in resolve_error(path)


@pytest.fixture
def compressed(tmp_path: Path) -> Path:
    return compress(make_checkpoint(tmp_path / "model"))


def changed(path: Path, **tensors: Any) -> Path:
    """The checkpoint with other tensors; `...` removes one."""
    held = load_file(path / "model.safetensors") | tensors
    save_file({name: t for name, t in held.items() if t is not ...}, path / "model.safetensors")
    return path


SCALE = "model.layers.1.self_attn.o_proj.weight_scale"


@needs_kernels
@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (SCALE, ..., "missing"),
        (SCALE, torch.ones(64), r"shape \[64\]"),
        (SCALE, torch.ones(64, 1, dtype=torch.int8), "dtype I8"),
        (SCALE.removesuffix("_scale"), torch.ones(64, 128, dtype=torch.uint8), "dtype U8; supported: I8"),
        (SCALE.removesuffix("_scale"), torch.ones(64, 128), "weight_scale is not part"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), "dtype I8"),
        (f"{SCALE.removesuffix('scale')}zero_point", torch.ones(64, 1), "zero_point is not part"),
    ],
)
def test_tensors_that_are_not_as_the_config_says(compressed: Path, name: str, tensor: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load_program(changed(compressed, **{name: tensor}), "bfloat16", kernels=runnable()[0])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_of_every_type(compressed: Path, dtype: torch.dtype) -> None:
    from pypto_serving.kernels import Engine

    scales = load_file(compressed / "model.safetensors")[SCALE].to(dtype)
    weights = PackedWeights(changed(compressed, **{SCALE: scales}), Engine(), lambda *_: None)
    module = "model.layers.1.self_attn.o_proj"
    weights.require({}, lambda _: True, {module: Int8()})
    (matrix,) = weights.matrix([module])
    assert matrix.scales is not None and torch.equal(torch.from_numpy(matrix.scales), scales.float()[:, 0])


@needs_kernels
def test_the_fingerprint_names_int8(compressed: Path) -> None:
    shutil.copytree(compressed, compressed.parent / "other")
    config = json.loads((compressed / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "re:.*mlp.gate$"]
    program = load_program(compressed, "bfloat16", kernels=runnable()[0])
    assert program.model.name(program.model.model, null_config(num_blocks=20)) == "decoder-native-1 w8a8"


def test_frozen_is_another_word_for_compressed(tmp_path: Path) -> None:
    """llm-compressor writes it where it saves without a last step; the tensors are the same."""
    whole = load_spec(write(tmp_path, RELEASED, quantization_config=quantization_config(IGNORED)))
    frozen = load_spec(with_section(tmp_path, RELEASED, "quantization_status", "frozen", IGNORED))
    older = write(tmp_path, RELEASED, compression_config=quantization_config(IGNORED))
    assert whole == frozen == load_spec(older) and whole.quantization
