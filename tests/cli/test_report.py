"""What `serve` prints of a configuration, in a few lines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pypto_serving.cli import main
from pypto_serving.cli.report import summarize
from pypto_serving.setup.host import DiskFacts
from pypto_serving.setup.options import make_options
from pypto_serving.setup.resolver import resolve
from tests.setup.small import FULL, STATE, WINDOW, WITH_KERNELS, make_model

HOST = msgspec.structs.replace(WITH_KERNELS, kv_disk=DiskFacts(free_bytes=1 << 40))


def summary(capsys: pytest.CaptureFixture[str], given: dict[str, Any], filed: dict[str, Any]) -> dict[str, str]:
    """Return the lines by their first word or words."""
    model = make_model((FULL, WINDOW, STATE))
    summarize(resolve(make_options(given, filed, "c.yaml"), model, HOST), model)
    out, err = capsys.readouterr()
    assert out == ""
    return dict(line.strip().split("  ", 1) for line in err.splitlines())


def test_at_most_nine_lines_say_what_differs_and_what_was_decided(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"port": 0, "api_key": "secret", "kv_host_memory": "1GiB", "kv_disk": "/kv", "max_model_len": 128}
    lines = summary(capsys, given | {"backend": "null"}, {"seed": 7, "port": 1})
    assert len(lines) <= 9
    assert list(lines) == ["model", "given", "decided", "device KV", "host KV", "disk KV", "memory", "room", "reasons"]
    assert lines["model"].strip() == "small: Small, 1 M parameters, 2 layers; from models/small"
    assert "max-model-len 128, seed 7 (in c.yaml), port 0, api-key set, " in lines["given"]
    assert "secret" not in str(lines)
    for tier in ("device KV", "host KV", "disk KV"):
        assert all(f"{group.name} " in lines[tier] for group in (FULL, WINDOW, STATE))


def test_defaults_and_what_has_no_use_here_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = summary(capsys, {}, {})
    assert lines["given"].strip() == "nothing"
    decided = [each.split()[0] for each in lines["decided"].split(", ")]
    assert {"dtype", "max-model-len", "kv-memory", "kernels", "num-threads"} <= set(decided)
    assert not {"seed", "max-num-seqs", "npu-platform", "kv-disk", "activations", "api-key"} & set(decided)


def test_an_error_of_check_comes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kv-memory", "1KiB"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --kv-memory is 1 KiB, too little")


def test_check_says_what_it_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bundled"]) == 0
    out = capsys.readouterr().out
    lines = [
        line.strip().split("  ", 1) for line in out[out.index("Model\n") : out.index("Settings\n")].splitlines()[2:]
    ]
    assert {name: value.strip() for name, value in lines} == {
        "weights": "bf16",
        "vocabulary": "byte-level BPE, 640 tokens",
        "chats": "tokenizer_config.json",
        "tool calls": "hermes",
        "reasoning": "none",
    }
