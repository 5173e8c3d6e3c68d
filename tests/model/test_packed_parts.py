"""Packed weights of some outputs, as a rank has them: the panels of the whole matrix, and no bytes of other outputs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.backend.native import NativeLoader
from pypto_serving.errors import ModelError
from pypto_serving.kernels import Engine, Matrix, NativeCollectives, SharedMemory, hashes, runnable
from pypto_serving.model.decoder.inventory import DecoderInventory
from pypto_serving.model.packed_weights import PackedWeights
from pypto_serving.model.packed_weights_file import PackedFile
from pypto_serving.model.products import cut
from pypto_serving.model.registry import read_config
from pypto_serving.parallel.topology import Placement, Rank, Topology
from tests.checkpoints import make_checkpoint
from tests.model.conftest import MakeCheckpoint
from tests.model.cpu_backend import config_for
from tests.model.ranks import RankedProgram
from tests.needs import needs_kernels
from tests.quantised import FORMATS, quantise

pytestmark = needs_kernels

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 384}
LAYER = "model.layers.0."
PANEL = 32


def open_weights(path: Path, file: PackedFile | None = None) -> PackedWeights:
    weights = PackedWeights(path, Engine(), lambda *_: None, file)
    inventory = DecoderInventory(read_config(path).model, weights.headers)
    weights.require(inventory.expected(), inventory.ignores, inventory.schemes, inventory.sizes())
    return weights


def assert_panels(part: Matrix, whole: Matrix, panels: slice) -> None:
    """Compare a part with these panels of the whole."""
    assert (part.form, part.k) == (whole.form, whole.k)
    for name in ("words", "scales", "compensation", "bias"):
        found, wanted = getattr(part, name), getattr(whole, name)
        if wanted is None:
            assert found is None
        else:
            assert np.array_equal(found, wanted.reshape(-(-whole.n // PANEL), -1)[panels].ravel()), name


@pytest.mark.parametrize("format", [*FORMATS, "bfloat16", "float32"])
def test_a_part_has_the_panels_of_the_whole(tmp_path: Path, format: str) -> None:
    path = make_checkpoint(tmp_path, dtype="float32" if format == "float32" else "bfloat16", **SIZES)
    if format in FORMATS:
        quantise(path, format)
    weights = open_weights(path)
    names = [f"{LAYER}self_attn.{name}_proj" for name in "qk"]
    (whole,) = weights.matrix(names)
    (part,) = weights.matrix(names, [range(96, 128), range(32)])
    assert_panels(part, whole, slice(3, 5))
    assert weights.matrix(names, [range(0), range(64, 64)]) == []
    gate_up = [f"{LAYER}mlp.gate_proj"], [f"{LAYER}mlp.up_proj"]
    ((whole,),) = weights.gate_up(*gate_up)
    ((part,),) = weights.gate_up(*gate_up, [range(16, 64)])
    assert_panels(part, whole, slice(1, 4))


def test_biases_tables_and_the_rounded_head(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint(dtype="bfloat16", attention_bias=True, vocab_size=131, bos_token_id=0, eos_token_id=2)
    weights = open_weights(path)
    names, embedding = [f"{LAYER}self_attn.{name}_proj" for name in "qkv"], "model.embed_tokens"
    (whole,), (part,) = (weights.matrix(names, outputs, bias=True) for outputs in (None, [range(64)] * 3))
    assert part.bias is not None and whole.bias is not None
    assert np.array_equal(part.bias, np.concatenate([whole.bias[:64], whole.bias[128:]]))
    table = weights.table(f"{embedding}.weight")
    assert np.array_equal(weights.table(f"{embedding}.weight", range(96, 131)), table[96:131])
    (whole,), (part,) = weights.rounded(embedding), weights.rounded(embedding, range(96, 131))
    assert_panels(part, whole, slice(3, 5))
    assert weights.rounded(embedding, range(131, 131)) == []


def test_bytes_of_other_outputs_are_not_read(tmp_path: Path) -> None:
    """A weight that is no number is found by the rank that has it, which names the output."""
    path = make_checkpoint(tmp_path, dtype="bfloat16", **SIZES)
    quantise(path, "fp8_channel")
    module, file = f"{LAYER}self_attn.o_proj", path / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    tensors[f"{module}.weight"][70, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    weights = open_weights(path)
    assert all(weights.matrix([module], [outputs]) for outputs in (range(64), range(96, 128)))
    with pytest.raises(ModelError, match="a weight of output 70 is not a number"):
        weights.matrix([module], [range(64, 96)])


def test_parts_in_a_file_have_names_of_their_own(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path, names = checkpoint(dtype="bfloat16"), [f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"]
    parts: list[list[range] | None] = [None, [range(64), range(32)], [range(64), range(64)], [range(32, 64)] * 2]
    found = []
    for _ in range(2):
        file = PackedFile(tmp_path, b"key", Engine())
        weights = open_weights(path, file)
        found.append([hashes(weights.matrix(names, part)[0].words).tolist() for part in parts])
        saving = file.save()
        if saving is not None:
            saving.join()
    assert saving is None, "the second time all came from the file"
    assert found[0] == found[1] and len({str(each) for each in found[0]}) == len(parts)
    assert not [thread for thread in threading.enumerate() if thread.name == "packed-file"]


def load_ranks(path: Path, folder: Path, topology: Topology) -> dict[Path, int]:
    """Load all ranks of a model with a packed cache. Returns its files with their inodes: those written anew differ."""
    places = (Placement(num_threads=1),) * topology.num_ranks
    changes = {"topology": topology, "placements": places, "packed_cache": str(folder)}
    config, memory = config_for(path, "bfloat16", kernels=runnable()[0], **changes), SharedMemory.create()
    for rank in topology.ranks:
        peers = NativeCollectives(rank, SharedMemory(memory.fd)) if topology.num_ranks > 1 else NativeCollectives()
        NativeLoader(config, rank).load(peers, lambda *_: None)
    for thread in threading.enumerate():
        if thread.name == "packed-file":
            thread.join()
    return {file: file.stat().st_ino for file in folder.iterdir()}


def test_each_rank_has_a_file_of_its_part(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Together as large as that of one rank, but for what ranks repeat; ranks of other sizes have other files."""
    path, sizes = checkpoint(dtype="bfloat16", vocab_size=4096, tie_word_embeddings=False), []
    for topology in (Topology(), Topology(2), Topology(pipeline=2)):
        folder = tmp_path / f"{topology.tensor} x {topology.pipeline}"
        folder.mkdir()
        files = load_ranks(path, folder, topology)
        assert len(files) == topology.num_ranks
        assert load_ranks(path, folder, topology) == files
        sizes.append(sum(file.stat().st_size for file in files))
        for file in files:
            file.rename(tmp_path / file.name)
    assert len(list(tmp_path.glob("*.packed"))) == 1 + 2 + 2
    assert sizes[1:] == pytest.approx([sizes[0]] * 2, rel=0.02)


def test_progress_ends_with_what_others_read(checkpoint: MakeCheckpoint) -> None:
    seen: list[tuple[str, int, int]] = []
    topology = Topology(2, pipeline=2, expert=2)
    RankedProgram(checkpoint("qwen3_moe", dtype="bfloat16"), topology, progress=lambda *state: seen.append(state))
    assert sum(done == total for _, done, total in seen) >= topology.num_ranks
    assert seen[-1][1] == seen[-1][2] > 0


def test_outputs_of_matrices_one_behind_the_other() -> None:
    sizes = [64, 32, 96]
    assert cut(sizes, range(40, 100)) == [range(40, 64), range(32), range(4)]
    for size in (1, 2, 3, 8):
        parts = [cut(sizes, Rank(Topology(size), index).columns(sum(sizes))) for index in range(size)]
        for matrix, count in enumerate(sizes):
            assert [output for part in parts for output in part[matrix]] == list(range(count))
