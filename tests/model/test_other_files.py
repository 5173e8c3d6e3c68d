"""Checkpoints as other programs write them, each edited in one respect: the same logits, or words that help."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pypto_serving.cli import main
from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from pypto_serving.model.registry import Serving, load_spec, read_config
from tests.checkpoints import random_model
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequences, load_program

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors, dict[str, Any]], object]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits(path: Path, dtype: str = "float32", kernels: str = "torch") -> Array:
    """Logits of 24 tokens."""
    sequences = Sequences(load_program(path, dtype, threads=1, num_blocks=8, max_model_len=64, kernels=kernels))
    sequence = sequences.add(np.arange(24) * 7 % 256)
    sequences.run(sequence, [1] * 24)
    return np.stack([sequence.logits[i] for i in range(24)])


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """A copy whose tensors and config.json `edit` changes in place."""
    shutil.copytree(source, target)
    tensors, config = load_file(target / SINGLE_FILE), json.loads((target / "config.json").read_text())
    edit(tensors, config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / SINGLE_FILE)
    (target / "config.json").write_text(json.dumps(config))
    return target


def rename(how: Callable[[str], str]) -> Edit:
    def edit(tensors: Tensors, _: object) -> None:
        renamed = {how(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return edit


def add(**extra: tuple[int, ...]) -> Edit:
    return lambda tensors, _: tensors.update({name: torch.ones(shape) for name, shape in extra.items()})


def nest(tensors: Tensors, config: dict[str, Any]) -> None:
    """The form of models with eyes, whose decoder has a section of its own."""
    outer = {key: config.pop(key) for key in ("architectures", "transformers_version")}
    inner = dict(config)
    config.clear()
    config.update(outer | {"model_type": "seeing", "text_config": inner, "vision_config": {"hidden_size": 7}})
    rename(lambda name: name.replace("model.", "model.language_model.", 1))(tensors, config)
    add(**{"model.visual.blocks.0.attn.qkv.weight": (4, 4), "model.visual.layers.0.self_attn.q.weight": (2,)})(
        tensors, config
    )


def without(*keys: str) -> Edit:
    def edit(_: object, config: dict[str, Any]) -> None:
        for key in keys:
            config.pop(key)

    return edit


def _keep_the_head(tensors: Tensors, _: object) -> None:
    tensors[HEAD] = tensors.pop(TABLE)


EDITS: dict[str, tuple[str, Edit]] = {
    "language_model": ("qwen3", rename(lambda name: name.replace("model.", "model.language_model.", 1))),
    "llava": ("mistral", rename(lambda name: f"language_model.{name}")),
    "bare": ("llama", rename(lambda name: name.removeprefix("model."))),
    "transformer": ("qwen2", rename(lambda name: name.replace("model.", "transformer.", 1))),
    "wrapped": ("mistral", rename(lambda name: f"_orig_mod.module.{name}")),
    "peft": ("llama", rename(lambda name: f"base_model.model.{name}")),
    "nested": ("qwen3", nest),
    "layers": ("llama", add(**{"model.layers.3.self_attn.q_proj.weight": (4, 4), "model.layers.7.odd": (1,)})),
    "buffers": (
        "llama",
        add(
            **{
                "model.layers.0.self_attn.rotary_emb.inv_freq": (16,),
                "model.layers.1.self_attn.rotary_emb.cos_cached": (16,),
                "model.rotary_emb.inv_freq": (16,),
                "model.layers.0.self_attn.masked_bias": (1,),
                "model.layers.0.self_attn.bias": (1, 1, 4, 4),
                "model.layers.2.self_attn.attn.k_scale": (1,),
            }
        ),
    ),
    "vision": ("qwen2", add(**{"visual.patch_embed.proj.weight": (4, 4), "multi_modal_projector.linear_1.bias": (2,)})),
    "drafts": ("qwen3", add(**{"mtp.layers.0.self_attn.q_proj.weight": (4, 4), "mtp.norm.weight": (2,)})),
    "only the head": ("qwen3", _keep_the_head),
    "tie unsaid": ("qwen3", without("tie_word_embeddings")),
    "head unsaid": ("mistral", without("tie_word_embeddings")),
    "torch_dtype": ("llama", lambda _, config: config.update(torch_dtype=config.pop("dtype"))),
    "rope_scaling": (
        "llama",
        lambda _, config: config.update(
            rope_theta=config["rope_parameters"].pop("rope_theta"),
            rope_scaling={
                "type" if key == "rope_type" else key: value for key, value in config.pop("rope_parameters").items()
            },
        ),
    ),
    "no architectures": ("qwen3_moe", without("architectures")),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_checkpoints_have_the_same_logits(checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    kind, edit = EDITS[name]
    source = checkpoint(kind)
    path = edited(source, tmp_path / "edited", edit)
    np.testing.assert_array_equal(logits(path), logits(source))
    contents = read_config(path).contents()
    assert not contents.obstacle and not any("missing" in line or "not part" in line for line in contents.verdicts)


def test_layers_after_the_last_are_told(
    checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = edited(checkpoint("llama"), tmp_path / "edited", EDITS["layers"][1])
    with caplog.at_level(logging.WARNING):
        load_program(path, threads=1)
    told = "has 3 layers in config.json; 2 tensors of later layers, such as model.layers.3.self_attn.q_proj.weight"
    assert told in caplog.text


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_part_of_mistral3(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """As transformers saves it, and with one scale of FP8 a matrix, as Ministral 3 is published."""
    text, tokens = random_model(kind), np.arange(100) * 7 % 256
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    seeing = {"model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14} | sizes
    model = transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text.config, vision_config=seeing, tie_word_embeddings=False)
    ).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "whole")
    assert load_spec(tmp_path / "whole").max_position_embeddings == 4096
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)[None]).logits[0].numpy()
    with caplog.at_level(logging.WARNING):
        sequence = (sequences := Sequences(load_program(tmp_path / "whole", threads=1))).add(tokens)
    sequences.run(sequence, [60, 40])
    assert max(np.abs(row - wanted[at]).max() for at, row in sequence.logits.items()) < 1e-4
    assert caplog.text.count("is served for text alone; ") == 1
    assert "such as multi_modal_projector.linear_1.weight, are left out" in caplog.text

    def round_matrices(tensors: Tensors, config: dict[str, Any]) -> None:
        left_out = ["vision_tower", "multi_modal_projector", "lm_head"]
        section = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
        config["quantization_config"] = section | {"modules_to_not_convert": left_out}
        for name in [name for name in tensors if name.endswith("_proj.weight") and "language_model" in name]:
            module, scale = name.removesuffix(".weight"), tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            text.get_parameter(name.removeprefix("language_model.")).data.copy_(tensors[name].float() * scale)
            tensors[f"{module}.weight_scale_inv"] = scale
            tensors[f"{module}.activation_scale"] = torch.tensor(1.0)

    path = edited(tmp_path / "whole", tmp_path / "rounded", round_matrices)
    assert not read_config(path).contents().obstacle
    kernels = load_program(path, "bfloat16", threads=1, kernels=runnable()[0])
    sequence = (sequences := Sequences(kernels)).add(tokens)
    sequences.run(sequence, [60, 40])
    with torch.no_grad():
        wanted = text(torch.tensor(tokens)[None]).logits[0].numpy()
    differences = [np.abs(row - wanted[at]).mean() for at, row in sequence.logits.items()]
    assert np.mean(differences) < 0.03 * np.abs(wanted).mean()


def fuse(tensors: Tensors, _: object, across: bool = False, layers: tuple[int, ...] = (0, 2)) -> None:
    """Put all experts of a layer into two tensors, as transformers has them in memory."""
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        }
        both = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{prefix}gate_up_proj"] = both.transpose(1, 2) if across else both
        tensors[f"{prefix}down_proj"] = parts["down"].transpose(1, 2) if across else parts["down"]


@pytest.mark.parametrize("across", [False, True])
def test_fused_experts(checkpoint: MakeCheckpoint, tmp_path: Path, across: bool) -> None:
    source = checkpoint("qwen3_moe")
    path = edited(source, tmp_path / "fused", lambda *both: fuse(*both, across=across))
    for kernels in ("torch", *runnable()[:1]):
        dtype = "float32" if kernels == "torch" else "bfloat16"
        np.testing.assert_array_equal(logits(path, dtype, kernels), logits(source, dtype, kernels))
    np.testing.assert_array_equal(logits(path), logits(source))
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path / SINGLE_FILE), SINGLE_FILE)}
    (path / INDEX_FILE).write_text(json.dumps(index))
    assert not any("missing" in line or "not part" in line for line in read_config(path).contents().verdicts)


@pytest.mark.parametrize("across", [False, True])
def test_mixtral_as_transformers_has_it_in_memory(checkpoint: MakeCheckpoint, tmp_path: Path, across: bool) -> None:
    def edit(tensors: Tensors, _: object) -> None:
        rename(released_names_replaced)(tensors, _)
        fuse(tensors, _, across, layers=(0, 1, 2))

    source = checkpoint("mixtral")
    path = edited(source, tmp_path / "fused", edit)
    np.testing.assert_array_equal(logits(path), logits(source))


def released_names_replaced(name: str) -> str:
    for old, new in {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def test_a_head_of_its_own_is_not_tied(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """As in transformers: config.json of a model that was tied before it was trained on."""
    source = checkpoint("mistral")
    path = edited(source, tmp_path / "edited", lambda _, config: config.update(tie_word_embeddings=True))
    np.testing.assert_array_equal(logits(path), logits(source))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_unsaid_dtype_is_that_of_the_tensors(checkpoint: MakeCheckpoint, tmp_path: Path, dtype: str) -> None:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        config["dtype"] = None
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float32 if "norm" in name else getattr(torch, dtype))

    path = edited(checkpoint("llama"), tmp_path / "edited", edit)
    assert read_config(path).stored_dtype() == dtype
    assert load_spec(path, Serving()).dtype == ("float32" if dtype == "float32" else "bfloat16")


def test_parts_without_an_index(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint("qwen3", sharded=True)
    path = Path(shutil.copytree(source, tmp_path / "parts"))
    (path / INDEX_FILE).unlink()
    (path / "consolidated.safetensors").write_bytes(b"the same again, for other programs")
    np.testing.assert_array_equal(logits(path), logits(source))
    lost = sorted(path.glob("model-*"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"has no {lost.name}"):
        Checkpoint.open(path)


def test_an_index_of_parts_that_were_joined(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "joined"))
    shutil.copy(checkpoint("qwen3", sharded=True) / INDEX_FILE, path)
    np.testing.assert_array_equal(logits(path), logits(checkpoint("qwen3")))


def test_a_byte_order_mark(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "marked"))
    for file in path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    np.testing.assert_array_equal(logits(path), logits(checkpoint("qwen3")))


ODD: dict[str, tuple[dict[str, str], str]] = {
    "empty": ({}, "it is empty"),
    "adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "owner/base"}', "adapter_model.safetensors": ""},
        "it holds an adapter (LoRA) of owner/base; merge it into that model and give the result",
    ),
    "pickled": (
        {"pytorch_model.bin": ""},
        "its weights are pickled (pytorch_model.bin); save_pretrained of transformers writes safetensors",
    ),
    "eyes": ({"mmproj-f16.gguf": ""}, "it holds a vision encoder of GGUF; give the file of the language model"),
    "several": ({"a.gguf": "", "b.gguf": "", "mmproj-a.gguf": ""}, "it holds GGUF files; give the path of one"),
    "consolidated": (
        {"params.json": "{}", "consolidated.safetensors": ""},
        "it has the form of Mistral's own tools (consolidated.safetensors); give the one of Hugging Face",
    ),
    "parameters": (
        {"params.json": "{}"},
        "it has the form of Mistral's own tools (params.json); give the one of Hugging Face",
    ),
    "above": ({"merged/config.json": "{}"}, "give the folder merged in it"),
    "cache": ({"snapshots/12ab/config.json": "{}"}, "give the folder snapshots/12ab in it"),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("configured", [False, True])
def test_folders_that_hold_something_else(tmp_path: Path, name: str, configured: bool) -> None:
    files, says = ODD[name]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a checkpoint: it has no config.json; {says}"
    if configured and files and not any("config.json" in file for file in files):
        with pytest.raises(ModelError) as caught:
            Checkpoint.open(tmp_path)
        assert str(caught.value) == f"{tmp_path} is not a complete checkpoint: it has no {SINGLE_FILE}; {says}"


QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SEEING = {"architectures": ["SeeingForConditionalGeneration"], "vision_config": {"depth": 2}}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "embeddings": (QWEN, ("modules.json",), "an embedding model (it has the files of sentence-transformers)"),
    "pooled": (QWEN, ("1_Pooling/config.json",), "an embedding model (it has the files of sentence-transformers)"),
    "no head": ({"architectures": ["Qwen3Model"]}, (), "a model without an output layer, such as one of embeddings"),
    "bert": ({"architectures": ["BertModel"]}, (), "an encoder"),
    "modern bert": ({"architectures": ["ModernBertForMaskedLM"]}, (), "an encoder"),
    "e5": ({"architectures": ["XLMRobertaModel"]}, (), "an encoder"),
    "reranker": (
        {"architectures": ["Qwen3ForSequenceClassification"]},
        (),
        "a classifier, reranker or reward model",
    ),
    "bert reranker": (
        {"architectures": ["XLMRobertaForSequenceClassification"]},
        (),
        "a classifier, reranker or reward model",
    ),
    "t5": (
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        (),
        "an encoder-decoder model",
    ),
    "whisper": ({"architectures": ["WhisperModel"]}, (), "a model of sounds"),
    "audio": (
        {"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {"num_mel_bins": 128}},
        (),
        "a model of text with sounds",
    ),
    "siglip": ({"architectures": ["SiglipModel"]}, (), "a model of images"),
    "eyes": (SEEING | {"text_config": {"model_type": "other"}}, (), "a model of text with images"),
    "eyes and ears": (SEEING | {"audio_config": {"depth": 1}}, (), "a model of text with images and sounds"),
    "eyes of a known model": (
        SEEING | {"model_type": "seeing", "text_config": {"model_type": "mistral"}},
        (),
        "a model of text with images",
    ),
}
HINT = """; hf-overrides '{"architectures": ["MistralForCausalLM"]}' serves its part for text alone"""


@pytest.mark.parametrize("name", KINDS)
def test_models_that_make_no_text_say_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config, files, says = KINDS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("[]")
    assert main(["check", str(tmp_path)]) == 3
    hint = HINT if "known" in name else ""
    told = f"error: {tmp_path} is {says}, which is not served: {config['architectures'][0]}{hint}\n"
    assert capsys.readouterr().err == told


def test_the_text_of_a_model_with_eyes(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """As the refusal says: under the name of the architecture of its text."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        nest(tensors, config)
        config["architectures"] = ["SeeingForConditionalGeneration"]

    path, source = edited(checkpoint("qwen3"), tmp_path / "edited", edit), checkpoint("qwen3")
    with pytest.raises(ModelError, match="Qwen3ForCausalLM"):
        read_config(path)
    assert read_config(path, {"architectures": ["Qwen3ForCausalLM"]}).model == read_config(source).model


def test_an_adapter_with_the_configuration_of_its_model(
    checkpoint: MakeCheckpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(checkpoint("qwen3") / "config.json", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("")
    assert main(["check", str(tmp_path)]) == 3
    assert "it holds an adapter (LoRA)" in capsys.readouterr().err
