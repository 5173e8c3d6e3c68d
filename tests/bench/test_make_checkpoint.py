"""The DeepSeek V4 checkpoint that benchmarks make, with smaller layers: complete, and counted as its bytes are read."""

from __future__ import annotations

from pathlib import Path

import deepseek_v4
import make_checkpoint
import pytest

from pypto_serving.model.registry import load_config, read_config

SMALL = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 64, "q_lora_rank": 32, "o_lora_rank": 32}


def test_a_deepseek_v4_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_checkpoint, "DEEPSEEK_V4_1B", make_checkpoint.DEEPSEEK_V4_1B | SMALL)
    make_checkpoint.main("deepseek-v4-1b", tmp_path)
    contents = read_config(str(tmp_path)).contents()
    assert contents is not None and contents.source == "files" and contents.verdicts == ()
    read = deepseek_v4.active_bytes(load_config(str(tmp_path))[1])
    assert 0 < read < sum(tensors.num_bytes for tensors in contents.tensors)
