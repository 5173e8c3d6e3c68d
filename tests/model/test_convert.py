"""Conversion to W8A8: what is written, that nothing shows how often it was interrupted, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pypto_serving import __version__
from pypto_serving.cli import EXIT_INTERRUPTED
from pypto_serving.errors import ConfigError, ModelError, PyptoError
from pypto_serving.kernels import runnable
from pypto_serving.model.checkpoint import INDEX_FILE, SINGLE_FILE, UNFINISHED_FILE, Checkpoint
from pypto_serving.model.convert.conversion import convert as convert_checkpoint
from pypto_serving.model.convert.rounding import Encoding, w8a8
from pypto_serving.model.registry import Serving, load_spec, read_config
from tests.model.conftest import MakeCheckpoint
from tests.model.sequences import Array, Sequences, load_program
from tests.needs import needs_kernels
from tests.thinning import some

INT8 = w8a8()
TOKENS = np.random.default_rng(0).integers(0, 256, 50)

KILLED = """
import os, signal, sys
from pathlib import Path
from pypto_serving.model.checkpoint import Checkpoint, INDEX_FILE, SINGLE_FILE
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import w8a8
source, target, calls = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def progress(*_):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
convert(source, target, w8a8(), progress)
"""

MEASURED = """
import os, sys
from pathlib import Path
from pypto_serving.model.convert.conversion import convert
from pypto_serving.model.convert.rounding import w4a16, w8a8, mxfp4

def kib(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # every thread converts rows of its own
before = kib("VmRSS")
convert(Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3]), lambda *_: None)
print((kib("VmHWM") - before) * 1024)
"""


def convert(source: Path, target: Path, encoding: Encoding = INT8) -> Path:
    convert_checkpoint(source, target, encoding, lambda *_: None)
    return target


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def check_int8(weights: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """int8 [n, k] is weights / scales, to the nearest; the largest of each output is 127."""
    wanted = weights.float().numpy()
    scale = np.abs(wanted).max(1, keepdims=True) / np.float32(127)
    assert scales.dtype == torch.float32 and np.array_equal(scales.numpy(), scale)
    assert values.dtype == torch.int8 and np.array_equal(values.numpy(), np.rint(wanted / scale))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "phi3"])
def test_what_is_written(checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, dtype: str) -> None:
    source = checkpoint(kind, dtype=dtype, sharded=True)
    before, after = tensors_of(source), tensors_of(convert(source, tmp_path / "target"))
    before.setdefault("lm_head.weight", before["model.embed_tokens.weight"])
    linear = [name for name in before if name.endswith("_proj.weight") or name == "lm_head.weight"]
    assert set(after) == {*before, *(f"{name}_scale" for name in linear)}
    for name, weights in before.items():
        if name in linear:
            check_int8(weights, after[name], after[f"{name}_scale"])
        else:
            assert torch.equal(after[name], weights.bfloat16())


def test_files_beside_the_weights(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint("qwen3_moe", sharded=True), tmp_path / "source")
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    target = convert(source, tmp_path / "target")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = sorted(file.name for file in target.glob("*.safetensors"))
    assert shards == sorted(file.name for file in source.glob("*.safetensors")) and len(shards) > 2
    held = {name: shard for shard in shards for name in load_file(target / shard)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(target).values())
    others = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in target.iterdir()} == {*shards, *others, "model.safetensors.index.json"}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixtral", "phi3"])
def test_the_config_says_what_it_is(checkpoint: MakeCheckpoint, tmp_path: Path, kind: str) -> None:
    target = convert(checkpoint(kind), tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", False)
    section = config["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "int-quantized")
    spec, before = load_spec(target), load_spec(checkpoint(kind), Serving("bfloat16"))
    assert (spec.quantization, spec.dtype, before.quantization) == ("w8a8", "bfloat16", "")
    packed = {name: tensor for name, tensor in tensors_of(target).items() if not name.endswith("_scale")}
    outputs = sum(tensor.shape[0] for tensor in packed.values() if tensor.dtype == torch.int8)
    vectors = sum(2 * tensor.nbytes for tensor in packed.values() if tensor.dim() == 1)
    matrices = sum(-(-len(t) // 32) * 32 * t.nbytes // len(t) for t in packed.values() if t.dim() > 1)
    assert spec.packed_bytes == vectors + matrices + 8 * outputs


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "qwen2", "phi3"])
def test_logits_stay_near(checkpoint: MakeCheckpoint, tmp_path: Path, kind: str) -> None:
    source = checkpoint(kind)
    found, wanted = (logits(path) for path in (convert(source, tmp_path / "target"), source))
    assert np.corrcoef(found, wanted)[0, 1] > 0.99


def logits(path: Path) -> Array:
    sequence = (sequences := Sequences(load_program(path, "bfloat16", kernels=runnable()[0]))).add(TOKENS)
    sequences.run(sequence, [len(TOKENS)])
    return sequence.logits[len(TOKENS) - 1]


def run_killed(source: Path, target: Path, calls: int) -> None:
    """Convert in a process that is killed at its `calls`-th report of progress."""
    process = subprocess.run([sys.executable, "-c", KILLED, source, target, str(calls)], check=False)
    assert process.returncode == -signal.SIGKILL


def test_a_killed_conversion_goes_on(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The result is the same, byte by byte, and finished files are not written again."""
    source = checkpoint("qwen3_moe", sharded=True)
    wanted = contents(convert(source, tmp_path / "whole"))
    target = tmp_path / "target"
    for calls in (2, 25, 50, 70):
        finished = {file: file.stat().st_ino for file in target.glob("*.safetensors")}
        run_killed(source, target, calls)
        assert all(file.stat().st_ino == inode for file, inode in finished.items())
        with pytest.raises(ModelError, match="is an unfinished conversion; run the same `pypto-serving convert` again"):
            read_config(target)
    assert len(finished) > 2
    command = [sys.executable, "-m", "pypto_serving", "convert", source, target, "--format", "w8a8"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "complete" in done.stdout
    assert contents(target) == wanted


def test_a_finished_file_that_was_damaged_meanwhile(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """All files are checked at the end, and config.json is not written."""
    source, target = checkpoint("qwen3_moe", sharded=True), tmp_path / "target"
    run_killed(source, target, 50)
    file = min(target.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    assert f"{file.name} is truncated" in refused(source, target)
    assert not (target / "config.json").exists()


def test_a_kill_before_anything_is_written(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """What it was is not on disk yet."""
    target = tmp_path / "target"
    target.mkdir()
    (target / UNFINISHED_FILE).touch()
    assert contents(convert(checkpoint(), target)) == contents(convert(checkpoint(), tmp_path / "other"))


def test_another_conversion_that_has_just_ended(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A process that found it unfinished makes a new, empty state file, and leaves the checkpoint as it is."""
    target = convert(checkpoint(), tmp_path / "target")
    wanted = contents(target)
    (target / UNFINISHED_FILE).touch()
    assert "is a complete checkpoint already" in refused(checkpoint(seed=1), target)
    assert contents(target) == wanted


@needs_kernels
def test_a_single_file_that_has_an_index(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The index says what the file is called, in the result as well."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint(), source)
    single, file = source / SINGLE_FILE, "model-00001-of-00001.safetensors"
    names = list(Checkpoint.open(source).tensors)
    single.rename(source / file)
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
    target = convert(source, tmp_path / "target")
    assert [path.name for path in target.glob("*.safetensors")] == [file]
    assert np.array_equal(logits(target), logits(convert(checkpoint(), tmp_path / "plain")))


def test_a_file_of_weights_with_any_name(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """It is none of the files that are copied."""
    source = Path(shutil.copytree(checkpoint(), tmp_path / "source"))
    (source / SINGLE_FILE).rename(source / "weights.st")
    (source / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": "weights.st"}}))
    target, plain = convert(source, tmp_path / "target"), convert(checkpoint(), tmp_path / "plain")
    assert (target / "weights.st").read_bytes() == (plain / SINGLE_FILE).read_bytes()


def test_a_source_that_changes_meanwhile(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint(), source)
    with pytest.raises(ModelError, match="changed meanwhile"):
        convert_checkpoint(source, tmp_path / "target", INT8, lambda *_: os.utime(source / SINGLE_FILE, (0, 0)))
    assert not (tmp_path / "target" / "config.json").exists()


def test_a_full_disk(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """What did not fit is taken away again, and the same command goes on."""
    source, target = checkpoint(), tmp_path / "target"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert "goes on" in refused(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(target.glob("*.part"))
    assert contents(convert(source, target)) == contents(convert(source, tmp_path / "other"))


def refused(source: Path, target: Path) -> str:
    """The message; whoever named a bad target gets the exit code of bad usage, any other fault is the model's."""
    with pytest.raises(PyptoError) as caught:
        convert(source, target)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is (ConfigError if str(caught.value).startswith("TARGET ") else ModelError)
    return str(caught.value)


def test_targets_that_hold_something(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = checkpoint()
    assert "is a complete checkpoint already" in refused(source, source)
    target = convert(source, tmp_path / "target")
    assert "is a complete checkpoint already" in refused(source, target)
    (other := tmp_path / "other").mkdir()
    (other / "notes.txt").touch()
    assert "is not empty" in refused(source, other)
    assert "is a file" in refused(source, target / "config.json")
    assert "file name too long" in refused(source, tmp_path / ("x" * 300))
    assert "quantised already" in refused(target, tmp_path / "again")


def test_a_target_of_another_conversion(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, target = Path(shutil.copytree(checkpoint(sharded=True), tmp_path / "source")), tmp_path / "target"
    run_killed(source, target, 10)
    whose = f"holds a part of another conversion, of {source} to w8a8 by pypto-serving {__version__}; delete it"
    assert whose in refused(checkpoint(seed=1, sharded=True), target)
    (source / "config.json").touch()
    assert f"of {source}, before that changed, to w8a8" in refused(source, target)


def test_a_target_of_another_version(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """It may have rounded otherwise."""
    source, target = checkpoint(sharded=True), tmp_path / "target"
    run_killed(source, target, 10)
    state = target / UNFINISHED_FILE
    state.write_text(state.read_text().replace(f'"{__version__}"', '"0.0.9"'))
    assert "to w8a8 by pypto-serving 0.0.9; delete it" in refused(source, target)
    state.write_text("{}")
    assert "is damaged; delete the folder" in refused(source, target)


def test_a_source_that_was_moved(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, target = Path(shutil.copytree(checkpoint(sharded=True), tmp_path / "source")), tmp_path / "target"
    run_killed(source, target, 10)
    assert contents(convert(source.rename(tmp_path / "moved"), target))


def test_ctrl_c_says_how_to_go_on(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 4096}
    source, target = checkpoint(dtype="bfloat16", **sizes), tmp_path / "target"
    command = [sys.executable, "-m", "pypto_serving", "convert", source, target, "--format", "mxfp4"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have made its children ignore
    for _ in range(20):  # it may be faster than this process
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not list(target.glob("*.part")):
                os.sched_yield()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
        if process.returncode:
            break
        shutil.rmtree(target)
    assert process.returncode == EXIT_INTERRUPTED
    assert errors.endswith("interrupted; the same command goes on, and keeps the files that are complete\n")
    assert [file.name for file in target.iterdir()] == [UNFINISHED_FILE]


def test_a_target_that_is_being_written(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    target = tmp_path / "target"
    run_killed(checkpoint(sharded=True), target, 10)
    with (target / UNFINISHED_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "by another process" in refused(checkpoint(sharded=True), target)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_target_without_permission(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused(checkpoint(), tmp_path / "target")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38])
def test_weights_that_are_not_finite(checkpoint: MakeCheckpoint, tmp_path: Path, value: float) -> None:
    """Or would not be when they are rounded; encoded ones, and those that become bfloat16."""
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"):
        source = shutil.copytree(checkpoint(), tmp_path / "source", dirs_exist_ok=True)
        tensors = load_file(source / "model.safetensors")
        tensors[name].view(-1)[5] = value
        save_file(tensors, source / "model.safetensors")
        assert f"{name} has numbers that are not finite" in refused(source, tmp_path / name)


def test_outputs_without_weights(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A row of zeros has a scale that can be divided by."""
    source = shutil.copytree(checkpoint(), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name][7] = 0
    save_file(tensors, source / "model.safetensors")
    written = tensors_of(convert(source, tmp_path / "target"))
    assert not written[name][7].any() and written[f"{name}_scale"][7] == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("encoding", some(["w8a8()", "w4a16(32)", "mxfp4()"], "w4a16(32)"))
def test_the_memory_of_a_few_tensors(checkpoint: MakeCheckpoint, tmp_path: Path, encoding: str) -> None:
    """Neither what was read nor what was written stays, however many tensors a file has."""
    source = checkpoint(dtype="bfloat16", num_hidden_layers=8, hidden_size=512, intermediate_size=4096)
    sizes = [tensor.num_bytes for tensor in Checkpoint.open(source).tensors.values()]
    assert sum(sizes) > 20 * max(sizes) and max(sizes) == 4 << 20
    command = [sys.executable, "-c", MEASURED, source, tmp_path / "target", encoding]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert taken < 8 * max(sizes), f"{taken / (1 << 20):.1f} MiB"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM"),
        ({"hidden_size": 128}, "config.json makes it"),
    ],
)
def test_sources_that_are_no_checkpoint(
    checkpoint: MakeCheckpoint, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    source = shutil.copytree(checkpoint(), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    assert words in refused(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
