"""What `check` says of DeepSeek V4 checkpoints of which only config.json and the index are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.cli import main
from pypto_serving.model.deepseek_v4.spec import DeepseekV4Config
from tests.api.checkpoint import write_deepseek_v4
from tests.model.deepseek_v4.configs import FLASH, PLAIN_FLASH

GROUPS = ("ori", "cmp", "idx", "hca_state", "csa_state", "csa_inner_state")
SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "n_routed_experts": 8, "vocab_size": 512}


def write(path: Path, config: dict[str, Any], drop: str = "", add: str = "") -> Path:
    """A folder with config.json and the index of a whole checkpoint, but for `drop` and `add`."""
    stored = DeepseekV4Config.from_json(config, "config.json").stored()
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
    assert (code, err) == (0, "")
    for words in (
        "69187",
        "159609485896",
        "284332240471 parameters",
        "index: 69187 tensors",
        "6880 bytes for each token and 23478272 bytes for each sequence",
    ):
        assert words in out
    assert all(f"  {group} " in out for group in GROUPS)
    assert "Cannot be served: its weights are fp8 with fp4 experts" in out and "bfloat16 or float32" in out
    assert "missing" not in out


def test_a_release_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = check(capsys, str(write(tmp_path, FLASH)), "--json")
    content = json.loads(out)
    assert code == 0 and "not served yet" in content["obstacle"]
    assert sum(tensors["num_bytes"] for tensors in content["tensors"]) == 159_609_485_896
    assert [group["name"] for group in content["memory"]["groups"]] == list(GROUPS)
    assert [group["block_bytes"] for group in content["memory"]["groups"][:2]] == [5_636_096, 708_608]


def test_a_quantised_model_is_not_served(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(write(tmp_path, FLASH | SMALL))]) == 3
    assert "cannot be served: its weights are fp8" in capsys.readouterr().err


def test_a_plain_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN_FLASH | SMALL, drop="layers.1.ffn.gate.weight", add="layers.9.odd")
    code, out, err = check(capsys, str(path), "--max-model-len", "4096", "--max-num-seqs", "2")
    assert (code, err) == (0, "")
    assert "index: layers.1.ffn.gate.weight: missing" in out
    assert "index: layers.9.odd: not part of this model" in out
    assert "Memory plan" in out and "mtp." not in out


def test_chats_have_an_encoding_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, options = write_deepseek_v4(write(tmp_path, PLAIN_FLASH | SMALL)), ["--max-model-len", "4096"]
    line = next(line for line in check(capsys, str(path), *options)[1].splitlines() if "chat-template" in line)
    assert line.split(maxsplit=3)[1:] == ["its", "own", "DeepSeek V4 has an encoding instead of a template"]
    (path / "x.jinja").touch()
    code, _, err = check(capsys, str(path), *options, "--chat-template", str(path / "x.jinja"))
    assert code == 2 and "--chat-template has no effect" in err


def test_what_does_not_fit_is_told_after_what_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = check(capsys, str(write(tmp_path, PLAIN_FLASH)))
    assert code == 2 and "too little memory" in err
    assert "284332240471 parameters" in out and all(f"  {group} " in out for group in GROUPS)


def test_block_sizes_cannot_be_chosen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = check(capsys, str(write(tmp_path, PLAIN_FLASH | SMALL)), "--block-size", "64")
    assert code == 2 and "--block-size cannot be chosen" in err
