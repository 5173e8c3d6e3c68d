"""GGUF files of every architecture, unpacked and served: logits of transformers on the weights that were written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from safetensors.torch import save_file

from pypto_serving.errors import ModelError
from pypto_serving.kernels import runnable
from pypto_serving.model.checkpoint import BLOCKS, Checkpoint
from pypto_serving.model.convert.rounding import mxfp4, w4a16, w8a8
from pypto_serving.model.gguf.container import Gguf
from pypto_serving.model.gguf.unpack import unpack
from pypto_serving.model.loader import TorchWeights
from pypto_serving.model.registry import read_config
from pypto_serving.setup.locate import locate_model
from tests.checkpoints import PHI3, random_model
from tests.model.converting import converted, tensors_of
from tests.model.gguf import files
from tests.model.gguf.files import ARCHITECTURES, write_model
from tests.model.gguf.random_blocks import random_blocks
from tests.model.sequences import Sequences, load_program


def unpacked(path: Path) -> Path:
    return unpack(path, path.parent / "cache", lambda *_: None)


SIZES: dict[str, dict[str, Any]] = {"llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}
SIZES["smollm3"] = {"num_hidden_layers": 4, "no_rope_layer_interval": 4}  # the interval is in no key
SIZES["phi3"] = {
    "rope_parameters": PHI3["rope_parameters"] | {"original_max_position_embeddings": 64},
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        *((kind, SIZES.get(kind, {})) for kind in ARCHITECTURES),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False, "mlp_bias": True}),
    ],
)
def test_logits(tmp_path: Path, kind: str, overrides: dict[str, Any]) -> None:
    """Matrices become bfloat16, so the model's are rounded first."""
    model = random_model(kind, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16().float())
    folder = unpacked(write_model(tmp_path / "model.gguf", kind, model))
    assert len(read_config(folder).contents().obstacle) == 0
    tokens = np.random.default_rng(0).integers(0, 256, 100)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens)[None]).logits[0].numpy()
    sequence = (sequences := Sequences(load_program(folder, threads=1))).add(tokens)
    sequences.run(sequence, [60, 40])
    assert max(np.abs(row - wanted[at]).max() for at, row in sequence.logits.items()) < 1e-4


@pytest.mark.parametrize("type", [Type.Q8_0, Type.Q4_0, Type.Q5_1])
def test_weights_are_those_of_the_file(tmp_path: Path, type: Type) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"), type)
    (tensor,) = (t for name, t in Gguf.open(path).tensors.items() if name == "blk.1.ffn_down.weight")
    stored = Checkpoint.open(unpacked(path)).tensors["model.layers.1.mlp.down_proj.weight"]
    with stored.file.open("rb") as file:
        file.seek(stored.begin)
        assert file.read(stored.num_bytes) == tensor.blocks(0, stored.shape[0]).tobytes()
    assert (stored.dtype, stored.shape) == (type.name, tensor.shape)


SMALL = {name: block for name, block in BLOCKS.items() if block.weights < 256}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "attn_q": "Q3_K", "ffn_gate": "Q2_K", "attn_output": "IQ4_XS"}
"""What Q4_K_M and its like mix; other matrices are Q4_K."""


def stored_in(name: str, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a type about as large as `value`, and what they stand for: where gguf cannot quantize, at random."""
    type, number = BLOCKS[name], Type[name]
    try:
        rows = gguf.quants.quantize(value, number)
    except NotImplementedError:
        blocks = random_blocks(type, value.size // type.weights)
        for at in type.halves:
            halves = blocks[:, at : at + 2].copy().view("<f2") * np.float16(1e-3)
            blocks[:, at : at + 2] = halves.view(np.uint8)
        if name == "NVFP4":
            blocks[:, :4] %= 16
        rows = blocks.reshape(len(value), -1)
    return rows, gguf.quants.dequantize(rows, number).reshape(value.shape)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        *(("qwen3", dict.fromkeys(("attn_v", "ffn_up", "token_embd"), name)) for name in SMALL),
        ("llama", dict.fromkeys(("attn_q", "attn_k", "ffn_down", "token_embd", "output"), "Q8_0")),
        ("qwen3_moe", dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "Q5_1")),
        ("qwen3", MIXED),
    ],
)
def test_logits_of_blocks(tmp_path: Path, kind: str, types: dict[str, str]) -> None:
    """Torch computes as transformers does with the values of the blocks; kernels are no further from it than bf16."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64} if kind != "llama" else SIZES["llama"]
    if types is MIXED:
        types = MIXED | dict.fromkeys(("attn_k", "ffn_up", "token_embd"), "Q4_K")
    model = random_model(kind, **sizes, tie_word_embeddings="output" not in types)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16().float())
    path = write_model(tmp_path / "model.gguf", kind, model, types=types, stored_in=stored_in)
    folder, tokens = unpacked(path), np.random.default_rng(0).integers(0, 256, 60)
    values = TorchWeights(folder, "float32", lambda *_: None)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if parameter.dim() == 2 and values.has(name):
                parameter.copy_(values.read(name))
        for index, layer in enumerate(model.model.layers):
            if kind == "qwen3_moe" and hasattr(layer.mlp, "experts"):
                for expert in range(model.config.num_experts):
                    prefix = f"model.layers.{index}.mlp.experts.{expert}."
                    parts = [values.read(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down")]
                    layer.mlp.experts.gate_up_proj[expert].copy_(torch.cat(parts[:2]))
                    layer.mlp.experts.down_proj[expert].copy_(parts[2])
        wanted = model(torch.tensor(tokens)[None]).logits[0].numpy()
        rounded = model.bfloat16()(torch.tensor(tokens)[None]).logits[0].float().numpy()
    torch_logits, kernels = (
        logits_of(load_program(folder, dtype, threads=1, kernels=kernels, activations="bf16"), tokens)
        for dtype, kernels in (("float32", "torch"), ("bfloat16", runnable()[0]))
    )
    assert max(np.abs(row - wanted[at]).max() for at, row in torch_logits.items()) < 1e-4 * max(1, np.abs(wanted).max())
    ours = np.mean([np.abs(row - wanted[at]).mean() for at, row in kernels.items()])
    theirs = np.mean([np.abs(rounded[at] - wanted[at]).mean() for at in kernels])
    assert ours <= theirs * (3 if "moe" in kind else 1)  # experts may change near a tie


def logits_of(program: Any, tokens: np.ndarray) -> dict[int, np.ndarray]:
    sequence = (sequences := Sequences(program)).add(tokens)
    sequences.run(sequence, [40, 20])
    return sequence.logits


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_conversion(tmp_path: Path, kind: str) -> None:
    """A file becomes what a checkpoint with the values of its blocks becomes, in every format."""
    model = random_model(kind, **({"num_hidden_layers": 1} | SIZES.get(kind, {})))
    folder, plain = unpacked(write_model(tmp_path / "model.gguf", kind, model, Type.Q8_0)), tmp_path / "plain"
    values = TorchWeights(folder, "float32", lambda *_: None)
    plain.mkdir()
    save_file({name: values.read(name) for name in Checkpoint.open(folder).tensors}, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    for encoding in (w8a8(), w4a16(32), mxfp4()):
        found, wanted = (
            tensors_of(converted(source, tmp_path / f"{source.name}-{encoding.name}", encoding))
            for source in (folder, plain)
        )
        assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in wanted.items()}
        assert all(
            torch.equal(value.view(torch.uint8), wanted[name].view(torch.uint8)) for name, value in found.items()
        )


def test_a_folder_is_unpacked_once(tmp_path: Path) -> None:
    """Its name may hold any bytes."""
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"))
    path = path.rename(tmp_path / os.fsdecode(b"m\xff.gguf"))
    folder = unpacked(path)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpacked(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_model(path, "qwen3", random_model("qwen3", seed=1))
    assert unpacked(path) != folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": ("clip", Value.STRING)}, "vision encoder"),
        (
            {"general.architecture": ("nomic-bert", Value.STRING)},
            r"is an encoder, which makes no text \('nomic-bert'\)",
        ),
        ({"general.architecture": ("gemma-embedding", Value.STRING)}, "is an encoder, which makes no text"),
        ({"general.architecture": ("t5", Value.STRING)}, "is an encoder-decoder model"),
        ({"general.type": ("adapter", Value.STRING)}, r"is an adapter \(LoRA\) of a qwen3 model"),
        ({"adapter.type": ("lora", Value.STRING)}, r"is an adapter \(LoRA\) of a qwen3 model"),
        ({"qwen3.pooling_type": (3, Value.UINT32)}, "is an embedding model"),
        ({"qwen3.pooling_type": (4, Value.UINT32)}, "is a reranker"),
        ({"general.architecture": ("rwkv", Value.STRING)}, "llama, mistral3, phi3, qwen2"),
        ({"tokenizer.ggml.model": ("bert", Value.STRING)}, "gpt2 and llama"),
        ({"tokenizer.ggml.pre": ("elvish", Value.STRING)}, "elvish"),
        ({"qwen3.rope.dimension_count": (8, Value.UINT32)}, "rope.dimension_count"),
        ({"qwen3.attention.head_count": (0, Value.UINT32)}, "attention.head_count"),
        ({"qwen3.rope.scaling.type": ("longrope", Value.STRING)}, "longrope"),
        ({"qwen3.block_count": (10**9, Value.UINT32)}, "block_count"),
        ({"qwen3.block_count": (4, Value.UINT32)}, "layers.3.*'none'"),
        ({"qwen3.attention.value_length": (64, Value.UINT32)}, "value_length"),
        ({"qwen3.logit_scale": (4.0, Value.FLOAT32)}, "logit_scale"),
        ({"qwen3.attention.temperature_scale": (0.1, Value.FLOAT32)}, "temperature_scale"),
        ({"general.architecture": ("a\nb" * 999, Value.STRING)}, "architecture 'a"),
        ({"tokenizer.ggml.pre": ("a\nb" * 999, Value.STRING)}, "splits texts as 'a"),
        ({"tokenizer.chat_template": (5, Value.UINT32)}, "chat_template"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"), **changes)
    with pytest.raises(ModelError, match=words) as caught:
        unpacked(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not list((tmp_path / "cache").glob("gguf/*/model*"))


def test_a_factor_of_queries_without_yarn_is_refused(tmp_path: Path) -> None:
    kind = {"mistral3.rope.scaling.type": ("none", Value.STRING)}
    path = write_model(tmp_path / "model.gguf", "ministral3", random_model("ministral3"), **kind)
    with pytest.raises(ModelError, match=r"temperature_scale is 0\.1"):
        unpacked(path)


def test_a_file_of_many_layers_takes_no_time(tmp_path: Path) -> None:
    count = {"qwen3moe.block_count": (10**9, Value.UINT32)}
    path = write_model(tmp_path / "model.gguf", "qwen3_moe", random_model("qwen3_moe"), **count)
    with pytest.raises(ModelError, match="block_count"):
        unpacked(path)


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("blk.0.attn_v.weight", np.ones((64, 1, 64)), "v_proj"),
        ("blk.0.attn_v.weight", np.ones((61, 64)), "v_proj"),
        ("blk.0.attn_q.weight", np.ones(128), "q_proj"),
        ("blk.0.attn_norm.weight", np.ones((1, 64)), "layernorm"),
        ("blk.7.attn_norm.weight", np.ones(64), r"layers\.7"),
        ("blk.0.attn_norm.weight", np.full(64, np.inf), "finite"),
        ("blk.0.attn_v.weight", np.full((64, 64), np.nan), "finite"),
        ("blk.0.attn_v.weight", np.full((64, 64), 3.4e38), "finite"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, values: Any, words: str
) -> None:
    made = files.tensors_of
    monkeypatch.setattr(files, "tensors_of", lambda *given: made(*given) | {key: values.astype(np.float32)})
    path = write_model(tmp_path / "model.gguf", "llama", random_model("llama", **SIZES["llama"]))
    with pytest.raises(ModelError, match=words):
        unpacked(path)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        (
            {
                **{"scaling.type": "yarn", "scaling.factor": 16.0, "scaling.original_context_length": 256},
                **{"scaling.yarn_beta_fast": 48.0, "scaling.yarn_log_multiplier": 1.0},
            },
            {
                **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
                **{"beta_fast": 48.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, changes: dict[str, Any], wanted: Any) -> None:
    types = {str: Value.STRING, float: Value.FLOAT32, int: Value.UINT32}
    keys = {f"qwen3.rope.{key}": (value, types[type(value)]) for key, value in changes.items()}
    folder = unpacked(write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"), **keys))
    assert read_config(folder).raw.get("rope_scaling") == wanted


def test_files_by_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links as the hub's client makes them, capitals, and names that only look like those of parts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blob = write_model(tmp_path / "0123abcd", "qwen3", random_model("qwen3"))
    for name in ("a Q8_0.gguf", "b.GGUF", "c-00001-of-00000.gguf", "..gguf", "...gguf"):
        (tmp_path / f"of {name}").mkdir()
        (tmp_path / f"of {name}" / name).symlink_to(blob)
        for given in (tmp_path / f"of {name}", tmp_path / f"of {name}" / name):
            assert locate_model(str(given)).name == (Path(name).stem.strip(".") or "model")
    monkeypatch.chdir(tmp_path / "of b.GGUF")
    assert locate_model("b.GGUF").name == "b"
    with pytest.raises(ModelError, match=r"b\.GGUF is a file"):
        locate_model("b.GGUF", revision="main")


def test_a_folder_with_no_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, words in (("pipe", "regular file"), ("folder", "regular file"), ("link", "No such file")):
        path = tmp_path / name / "x.gguf"
        path.parent.mkdir()
        {"pipe": os.mkfifo, "folder": Path.mkdir, "link": lambda path: path.symlink_to("nowhere")}[name](path)
        with pytest.raises(ModelError, match=words):
            locate_model(str(path.parent))


def test_quantizations_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a repository is served, whatever else of it was fetched before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub, fetched = tmp_path / "hub", []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **more: fetched.append(more) or hub)
    for name in ("m-Q4_K.gguf", "m-Q4_K_M.gguf", "UD-IQ4_NL/m-UD-IQ4_NL.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"):
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        write_model(hub / name, "qwen3", random_model("qwen3"))
    (hub / "config.json").write_text("{}")
    for wanted in ("Q4_K", "Q4_K_M", "UD-IQ4_NL", "Q8_0"):
        assert locate_model(f"owner/m-GGUF:{wanted}").name == f"m-{wanted}"
    for wanted, words in (("Q6_K", "one GGUF model"), ("Q4", "m-Q4_K.gguf, m-Q4_K_M.gguf")):
        with pytest.raises(ModelError, match=words):
            locate_model(f"owner/m-GGUF:{wanted}")


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"))
    with pytest.raises(ModelError, match="changed"):
        unpack(path, tmp_path / "cache", lambda *_: os.utime(path, (1, 1)))
    assert unpacked(path).exists()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "model.gguf", kind, random_model(kind, **SIZES.get(kind, {})))
    with pytest.raises(ModelError, match="was cut off while it was read"):
        unpack(path, tmp_path / "cache", lambda *_: os.truncate(path, 50_000))
    assert not list((tmp_path / "cache").glob("gguf/*/model*"))


def test_an_unpacked_file_needs_no_writable_cache(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "qwen3", random_model("qwen3"))
    lock = unpacked(path).parent / "lock"
    lock.unlink()
    lock.mkdir()
    assert unpacked(path).exists()
