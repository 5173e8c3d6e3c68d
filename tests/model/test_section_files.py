"""Sections of quantisation beside config.json, or nowhere; and `check` of files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving.cli import main
from pypto_serving.errors import ModelError
from pypto_serving.model.fingerprint import checkpoint_digest, checkpoint_state
from pypto_serving.model.registry import load_spec, read_config
from tests.checkpoints import make_checkpoint
from tests.quantised import quantise

WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}
DOWN = "model.layers.0.mlp.down_proj"


def without_section(path: Path, format: str) -> dict[str, Any]:
    """Quantise the checkpoint at `path`, and return the section taken out of its config.json."""
    quantise(make_checkpoint(path, **WIDE), format)
    config = json.loads((path / "config.json").read_text())
    section: dict[str, Any] = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    return section


def old_gptq(section: dict[str, Any]) -> dict[str, Any]:
    """As AutoGPTQ wrote it before it named its method."""
    return {key: value for key, value in section.items() if key != "quant_method"} | {"damp_percent": 0.01}


def old_awq(section: dict[str, Any]) -> dict[str, Any]:
    """As AutoAWQ wrote it before transformers read its method."""
    return {key: value for key, value in section.items() if key != "quant_method"}


def modelopt(section: dict[str, Any]) -> dict[str, Any]:
    names = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    return {"producer": {"name": "modelopt"}, "quantization": names | {"exclude_modules": section["ignore"]}}


BESIDE = [
    ("gptq", "quantize_config.json", old_gptq),
    ("gptq_v2", "quantize_config.json", dict),
    ("awq", "quantize_config.json", dict),
    ("awq", "quantize_config.json", old_awq),
    ("awq", "quant_config.json", old_awq),
    ("modelopt", "hf_quant_config.json", modelopt),
]


@pytest.mark.parametrize(("format", "name", "written"), BESIDE)
def test_a_section_beside_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, name: str, written: Any
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "apart"
    quantise(make_checkpoint(whole, **WIDE), format)
    (path / name).write_text(json.dumps(written(without_section(path, format))))
    assert read_config(path).model == read_config(whole).model
    assert load_spec(path).quantization == load_spec(whole).quantization != ""
    assert read_config(path).contents() == read_config(whole).contents()
    assert main(["check", str(path)]) == 0 and "missing" not in capsys.readouterr().out


def test_the_section_of_the_config_counts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", **WIDE)
    quantise(path, "awq")
    wanted = read_config(path).model
    (path / "quantize_config.json").write_text('{"bits": 3}')
    assert read_config(path).model == wanted


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        ("modelopt", ("k_proj.k_scale", "v_proj.v_scale")),
        ("fp8_channel", ("q_scale", "k_scale", "v_scale")),
        ("int4_g32", ("k_proj.output_scale", "v_proj.output_scale")),
        ("w8a8", ()),
    ],
)
def test_how_others_round_their_kv_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, scales: tuple[str, ...]
) -> None:
    """Blocks are stored as the server's options say: the scheme is not followed, and its scales are left alone."""
    quantise(path := make_checkpoint(tmp_path / "model", **WIDE), format)
    wanted, config = read_config(path).model, json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(file := path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{scale}": torch.ones(()) for scale in scales}
    save_file(tensors, file)
    assert read_config(path).model == wanted
    assert main(["check", str(path)]) == 0
    assert ("left alone" in capsys.readouterr().out) == bool(scales)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("quantize_config.json", '{"bits": 3, "group_size": 32}', "quantization_config.bits is 3, but must be 4"),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}', 'quant_algo is "FP8", but must be NVFP4'),
        ("hf_quant_config.json", '{"quantization": 4}', "quantization is 4, but must be an object"),
        ("quantize_config.json", "[]", "holds a JSON list, but must hold an object"),
    ],
)
def test_what_cannot_be_read_names_the_file(tmp_path: Path, name: str, content: str, words: str) -> None:
    path = make_checkpoint(tmp_path / "model", **WIDE)
    (path / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert str(caught.value).startswith(str(path / name)) and words in str(caught.value)


@pytest.mark.parametrize("identity", [lambda path: checkpoint_digest(path, "", lambda *_: None), checkpoint_state])
def test_it_is_a_part_of_the_checkpoint(tmp_path: Path, identity: Any) -> None:
    """Packed weights and KV blocks of another meaning are not taken for these."""
    path = tmp_path / "model"
    section, found = without_section(path, "gptq"), []
    for version in ("gptq", "gptq_v2"):
        (path / "quantize_config.json").write_text(json.dumps(section | {"checkpoint_format": version}))
        found.append(identity(path))
    assert found[0] != found[1]


def checked(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    """Return the only line on stderr, which --json tells too, of a `check` that fails."""
    capsys.readouterr()
    assert main(["check", str(path)]) == 3
    captured = capsys.readouterr()
    assert "Memory plan" in captured.out
    assert main(["check", str(path), "--json"]) == 3
    obstacle = json.loads(capsys.readouterr().out)["obstacle"]
    (line,) = captured.err.splitlines()
    assert line == f"error: {obstacle}"
    return obstacle


@pytest.mark.parametrize(("format", "codes"), [("gptq", "qweight"), ("awq", "qweight"), ("int4_g32", "weight_packed")])
def test_check_fails_without_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str, codes: str
) -> None:
    path = tmp_path / "model"
    without_section(path, format)
    found = checked(capsys, path)
    assert ".weight is missing; model.layers.0." in found
    assert f".{codes} is there, but config.json has no quantization_config that says how it is stored" in found


@pytest.mark.parametrize("change", ["missing", "surplus", "truncated"])
def test_check_fails_for_files_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str) -> None:
    path = make_checkpoint(tmp_path / "model", **WIDE)
    file, tensors = path / "model.safetensors", load_file(path / "model.safetensors")
    match change:
        case "missing":
            del tensors[f"{DOWN}.weight"]
            words = f"tensor {DOWN}.weight is missing"
        case "surplus":
            tensors["odd"] = tensors[f"{DOWN}.weight"].clone()
            words = "tensor odd is not part of this model"
        case _:
            words = f"{file} is truncated"
    save_file(tensors, file, {"format": "pt"})
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    found = checked(capsys, path)
    assert words in found and "quantization_config" not in found
