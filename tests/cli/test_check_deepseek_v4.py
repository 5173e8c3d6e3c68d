"""What `check` says of DeepSeek V4 checkpoints: of config.json and an index alone, and of whole ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pypto_serving.cli import main
from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import DeepseekV4Inventory
from pypto_serving.model.null_models import FLASH
from tests.api.checkpoint import write_deepseek_v4
from tests.checkpoints import make_checkpoint
from tests.deepseek_v4 import HEAVY
from tests.model.deepseek_v4.configs import PLAIN_FLASH, PRO

GROUPS = ("ori", "cmp", "idx", "hca_state", "csa_state", "csa_inner_state")
SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "n_routed_experts": 8, "vocab_size": 512}
TOO_LARGE = {"vocab_size": 1 << 30, "hidden_size": 4096}
"""Embeddings for which no machine has memory."""


def write(path: Path, config: dict[str, Any], drop: str = "", add: str = "", mtp: bool = True) -> Path:
    """A folder with config.json and the index of a whole checkpoint, but for `drop` and `add`."""
    dtype = config.get("torch_dtype", "bfloat16")
    stored = DeepseekV4Inventory(DeepseekV4Config.from_json(config, "config.json")).stored(dtype, mtp)
    names = {name: "model-00001-of-00001.safetensors" for name in stored if name != drop}
    size = sum(tensor.num_bytes for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": names | ({add: "x.safetensors"} if add else {})}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))
    return path


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["check", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_release(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = check(capsys, str(write(tmp_path, FLASH)))
    assert code == 2 and "too little memory" in err
    for words in (
        "69187",
        "159609485896",
        "284332240471 parameters, 290942289362 with draft layers, read for --spec-method mtp only",
        "index: 69187 tensors",
        "index: its total_size is what these tensors take",
        "0 of 1 weight files are here",
        "6880 bytes for each token and 23478272 bytes for each sequence",
    ):
        assert words in out
    assert all(f"  {group} " in out for group in GROUPS)
    assert re.search(r"mxfp4 +33024 +277025390592 +4.25\n", out)
    assert re.search(r"fp8 128x128 +365 +5857345536 +8\n", out) and "4.389 bits per weight of all" in out
    assert "missing" not in out


@pytest.mark.parametrize(
    ("config", "count", "size", "drafts", "indexed"),
    [
        pytest.param(FLASH, 69_187, 159_609_485_896, 290_942_289_362, False, marks=pytest.mark.soak, id="flash"),
        pytest.param(PRO, 145_116, 864_704_792_696, 1_598_837_347_742, True, marks=pytest.mark.soak, id="pro"),
    ],
)
def test_a_release_as_json(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: dict[str, Any],
    count: int,
    size: int,
    drafts: int,
    indexed: bool,
) -> None:
    write(tmp_path, config)
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    code, out, _ = check(capsys, str(tmp_path), "--json")
    content = json.loads(out)
    assert code == 2 and "too little memory" in content["obstacle"]
    assert sum(tensors["num_bytes"] for tensors in content["tensors"]) == size
    assert sum(tensors["count"] for tensors in content["tensors"]) == count
    assert content["model"]["num_parameters_with_drafts"] == drafts
    assert content["checkpoint"]["source"] == ("index" if indexed else "config.json")
    if config is FLASH:
        check_groups_of_flash(content["memory"])


def check_groups_of_flash(memory: dict[str, Any]) -> None:
    assert [group["name"] for group in memory["groups"]] == list(GROUPS)
    assert [group["block_bytes"] for group in memory["groups"][:2]] == [5_636_096, 708_608]
    assert [group["sequence"]["bytes_per_token"] for group in memory["groups"]] == [0, 5536, 1344, 0, 0, 0]
    assert (memory["sequence"]["bytes_per_token"], memory["sequence"]["fixed_bytes"]) == (6880, 23_478_272)


@pytest.mark.parametrize(
    ("kinds", "per_token"), [({}, 64.5), ({"layer_types": [HEAVY], "num_hidden_layers": 1, "num_hash_layers": 1}, 0.5)]
)
def test_tokens_may_add_less_than_a_byte(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kinds: dict[str, Any], per_token: float
) -> None:
    """One entry of 32 channels for 128 tokens is half a byte for each, and still history."""
    path = make_checkpoint(tmp_path / "model", "deepseek_v4", dtype="bfloat16", **kinds)
    memory = json.loads(check(capsys, str(path), "--json")[1])["memory"]
    assert memory["sequence"]["bytes_per_token"] == per_token
    live = {group["name"]: group["sequence"]["total_bytes"] for group in memory["groups"]}
    assert memory["sequence"]["fixed_bytes"] == sum(live.values()) - live["cmp"] - live.get("idx", 0)


def keys_of(content: Any) -> Any:
    """The layout of a JSON object: keys of objects, of lists those of the first entry."""
    if isinstance(content, list):
        return keys_of(content[0]) if content else None
    return {key: keys_of(value) for key, value in content.items()} if isinstance(content, dict) else None


def test_models_that_are_served_have_the_same_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("served", "large")]
    for folder, config in zip(folders, (FLASH | SMALL, FLASH | SMALL | TOO_LARGE), strict=True):
        folder.mkdir()
        write(folder, config)
    short = ("--max-model-len", "4096", "--max-num-seqs", "2")
    served, large = (json.loads(check(capsys, str(path), "--json", *short)[1]) for path in folders)
    assert served["obstacle"] == "" and "too little memory" in large["obstacle"]
    layout, less = keys_of(served), keys_of(large)
    assert layout.keys() == less.keys()
    assert layout["model"] == less["model"] and layout["checkpoint"] == less["checkpoint"]
    assert layout["memory"].keys() >= less["memory"].keys()
    assert layout["memory"]["groups"].items() >= less["memory"]["groups"].items()


def test_sizes_without_kernels_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing else serves quantised weights."""
    assert main(["serve", str(write(tmp_path, FLASH | SMALL | {"o_lora_rank": 1000}))]) == 2
    found = capsys.readouterr().err
    assert "fp8 with fp4 experts" in found and "o_lora_rank that is a multiple of 32, not 1000" in found


def test_odd_names_in_an_index(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN_FLASH | SMALL, drop="layers.1.ffn.gate.weight", add="layers.1.odd")
    code, out, err = check(capsys, str(path), "--max-model-len", "4096", "--max-num-seqs", "2")
    assert (code, err) == (0, "")
    assert "index: layers.1.ffn.gate.weight: missing" in out
    assert "index: layers.1.odd: not part of this model" in out
    assert "index: its total_size is 4096 bytes more than these tensors take" in out
    assert "Memory plan" in out and "mtp." not in out


def test_chats_have_an_encoding_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, options = write_deepseek_v4(write(tmp_path, PLAIN_FLASH | SMALL)), ["--max-model-len", "4096"]
    line = next(line for line in check(capsys, str(path), *options)[1].splitlines() if "chat-template" in line)
    assert line.split(maxsplit=3)[1:] == ["its", "own", "DeepSeek V4 has an encoding instead of a template"]
    (path / "x.jinja").touch()
    code, _, err = check(capsys, str(path), *options, "--chat-template", str(path / "x.jinja"))
    assert code == 2 and "the option chat-template has no effect" in err


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
@pytest.mark.parametrize("mtp", [True, False])
def test_an_index_of_a_plain_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str, stored: str, mtp: bool
) -> None:
    path = write(tmp_path, PLAIN_FLASH | SMALL | {"torch_dtype": dtype}, mtp=mtp)
    content = json.loads(check(capsys, str(path), "--json", "--max-model-len", "4096", "--max-num-seqs", "2")[1])
    assert {tensors["dtype"] for tensors in content["tensors"]} == {stored, "F32", "I64"}
    assert sum(tensors["count"] for tensors in content["tensors"]) == content["checkpoint"]["index"]["num_tensors"]
    assert content["checkpoint"]["verdicts"] == ["index: its total_size is what these tensors take"]
    assert bool(content["checkpoint"]["draft_tensors"]) is mtp
    with_drafts, without = (content["model"][f"num_parameters{end}"] for end in ("_with_drafts", ""))
    assert (with_drafts > without) is mtp


def test_headers_say_what_is_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "deepseek_v4_fast", dtype="bfloat16")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    held = load_file(path / "model.safetensors")
    content = json.loads(check(capsys, str(path), "--json")[1])
    names = {"torch.bfloat16": "BF16", "torch.float32": "F32", "torch.int64": "I64"}
    wanted: dict[str, list[int]] = {}
    for tensor in held.values():
        count = wanted.setdefault(names[str(tensor.dtype)], [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + tensor.nbytes
    assert {t["dtype"]: [t["count"], t["num_bytes"]] for t in content["tensors"]} == wanted
    drafts = {name for name in held if name.startswith("mtp.")}
    assert config["num_nextn_predict_layers"] == 1 and content["checkpoint"]["draft_tensors"] == len(drafts) > 0
    assert content["checkpoint"]["source"] == "files" and not content["checkpoint"]["verdicts"]

    held = {name: tensor for name, tensor in held.items() if name not in drafts}
    held["mtp.0.norm.weight"] = held.pop("norm.weight")
    held["hc_head_base"] = held["hc_head_base"][:3].clone()
    held["odd"] = held["hc_head_scale"].clone()
    save_file(held, path / "model.safetensors")
    out = check(capsys, str(path))[1]
    assert "files: norm.weight: missing" in out and "files: odd: not part of this model" in out
    assert "files: hc_head_base has shape [3], but config.json makes it [4]" in out
    assert "of draft layers  1 " in out


def test_files_that_are_none_leave_the_index(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN_FLASH | SMALL)
    (path / "model-00001-of-00001.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    out = check(capsys, str(path), "--max-model-len", "4096", "--max-num-seqs", "2")[1]
    assert "files: " in out and "no safetensors file" in out
    assert "index: its total_size is what these tensors take" in out and "Memory plan" in out


def test_what_does_not_fit_is_told_after_what_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = check(capsys, str(write(tmp_path, PLAIN_FLASH)))
    assert code == 2 and "too little memory" in err
    assert "284332240471 parameters" in out and all(f"  {group} " in out for group in GROUPS)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--block-size", "64", "--block-size cannot be chosen"),
        ("--kv-dtype", "int8", "--kv-dtype is int8, but the KV cache of this model has a form of its own; drop it"),
    ],
)
def test_the_kv_cache_has_a_form_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, value: str, words: str
) -> None:
    code, _, err = check(capsys, str(write(tmp_path, PLAIN_FLASH | SMALL)), option, value)
    assert code == 2 and words in err and len(err.splitlines()) == 1
