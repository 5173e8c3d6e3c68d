"""A command line, a configuration file and keyword arguments that were written for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.cli import main
from pypto_serving.errors import ConfigError
from pypto_serving.setup.option_table import ALIASES, RULES
from pypto_serving.setup.options import make_options
from pypto_serving.setup.vllm_options import REFUSED, VALUES, VLLM_ONLY

LINE = """
    --host 127.0.0.1 --port 8123 -tp 2 -dp 1 --pipeline-parallel-size 1 --dtype half --max_model_len 2K
    --gpu-memory-utilization 0.9 --max-num-seqs 16 --max-num-batched-tokens 1k --no-enable-prefix-caching
    --enable-chunked-prefill --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3
    --api-key k1 k2 --trust-remote-code --disable-log-requests --enforce-eager --swap-space 4 --load-format auto
    --seed 7 --block-size 32 --kv-cache-dtype auto --tokenizer bundled --root-path /v -O3 -q fp8 --shutdown-timeout 9
    --disable-uvicorn-access-log --max-num-queued-reqs 99 --kv-cache-memory-bytes 8388608 --compilation-config {}
    --served-model-name small other
"""


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main(["check", *argv, "--json"])
    out, err = capsys.readouterr()
    settings = json.loads(out)["settings"] if out else []
    return code, {setting["name"]: setting["value"] for setting in settings}, err


def test_a_command_line_of_vllm_is_taken(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    code, settings, err = check(capsys, "bundled", *LINE.split())
    expected = {
        "port": 8123,
        "tensor-parallel-size": 2,
        "dtype": "bfloat16",
        "max-model-len": 2048,
        "gpu-memory-utilization": 0.9,
        "kv-memory": "8 MiB",
        "max-num-seqs": 16,
        "max-num-batched-tokens": 1000,
        "prefix-caching": False,
        "chunked-prefill": True,
        "tool-call-parser": "hermes",
        "reasoning-parser": "qwen3",
        "api-key": "2 keys",
        "log-requests": False,
        "access-log": False,
        "seed": 7,
        "block-size": 32,
        "drain-timeout": 9.0,
        "max-queued-requests": 99,
        "served-model-name": "small, other",
    }
    assert code == 0, err
    assert {name: settings[name] for name in expected} == expected
    (line,) = [line for line in caplog.messages if "options of vLLM" in line]
    assert "dtype half (here bfloat16), " in line
    for name in ("trust-remote-code", "enable-auto-tool-choice", "enforce-eager", "swap-space", "root-path"):
        assert f"{name} (no effect)" in line
    assert "tokenizer" not in line and "prefix-caching" not in line


def test_the_older_form_with_model_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, settings, err = check(capsys, "--served-model-name", "a", "b", "--model", "bundled")
    assert (code, settings["served-model-name"]) == (0, "a, b"), err


DOTTED = """
    --hf_overrides.rope_parameters.factor 2 --hf-overrides.rope_parameters.rope_type=yarn
    --hf-overrides.eos_token_id+ 1,2 --hf-overrides.eos_token_id+=3 --hf-overrides.use_cache false
    --override-generation-config.temperature 0.5 -cc.mode 3
"""


def test_keys_of_objects(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    code, settings, err = check(capsys, "bundled", *DOTTED.split())
    assert code == 0, err
    assert json.loads(settings["hf-overrides"]) == {
        "rope_parameters": {"factor": 2, "rope_type": "yarn"},
        "eos_token_id": [1, 2, 3],
        "use_cache": False,
    }
    assert json.loads(settings["override-generation-config"]) == {"temperature": 0.5}
    assert "compilation-config (no effect)" in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hf-overrides.a", "--hf-overrides.a needs one value"),
        ("--hf-overrides.a 1 --hf-overrides.a 2", "--hf-overrides.a needs one value"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a.b needs one value"),
        ("--hf-overrides.a 1 --hf-overrides {}", "--hf-overrides is given whole and by its keys"),
        ("--hf-overrides={} --hf-overrides.a 1", "--hf-overrides is given whole and by its keys"),
        ("--hf-overridez.a 1", "No such option: --hf-overridez.a"),
    ],
)
def test_keys_of_objects_that_are_wrong(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    code, _, err = check(capsys, "bundled", *flags.split())
    assert code == 2 and words in err and err.count("\n") == 1


def test_model_may_follow_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, settings, err = check(capsys, "--served-model-name", "a", "bundled")
    assert (code, settings["served-model-name"], settings["model"].split("/")[-1]) == (0, "a", "bundled"), err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enable-lora"], "LoRA adapters are not served"),
        (["--num-gpu-blocks-override", "5"], "give kv-memory"),
        (["--rope-theta", "1e6"], "give hf-overrides, such as"),
        (["--scheduling-policy", "priority"], "give client-priority"),
        (["--tool-call-parser", "glm45"], "--tool-call-parser is glm45, but must be one of auto, none, hermes"),
        (["--gpu-memory-utilization", "1.5"], "but must be a share above 0 to 1"),
    ],
)
def test_what_would_change_answers_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, _, err = check(capsys, *flags)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err and flags[0] in err


@pytest.mark.parametrize("flags", [["--no-enable-lora"], ["--scheduling-policy", "fcfs"], ["--cpu-offload-gb", "0"]])
def test_values_that_change_nothing_are_taken(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert check(capsys, *flags)[0] == 0


def test_files_and_keyword_arguments_take_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"tensor_parallel_size": 2, "dtype": "half", "trust_remote_code": True, "enable_prefix_caching": False}
    options = make_options(given, as_arguments=True)
    assert (options.dtype, options.prefix_caching, len(options.notes)) == ("bfloat16", False, 2)
    with pytest.raises(ConfigError, match=r"^enable_lora is an option of vLLM"):
        make_options({"enable_lora": True}, as_arguments=True)
    file = tmp_path / "vllm.yaml"
    file.write_text("model: bundled\nenforce-eager: true\ndisable-log-requests: true\nkv_cache_dtype: fp8\n")
    code, settings, err = check(capsys, "--config", str(file))
    assert (code, settings["log-requests"], settings["kv-dtype"]) == (0, False, "int8"), err
    file.write_text("rope-theta: 5.0\n")
    assert "rope-theta in vllm.yaml is an option of vLLM" in check(capsys, "--config", str(file))[2]


def test_an_option_and_its_name_in_vllm_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = check(capsys, "--kv-dtype", "bf16", "--kv-cache-dtype", "auto")
    assert code == 2 and "are the same option; keep one" in err


def test_the_tables_do_not_contradict_each_other() -> None:
    assert not VLLM_ONLY.keys() & (RULES.keys() | ALIASES.keys())
    assert REFUSED.keys() <= VLLM_ONLY.keys() and VALUES.keys() <= RULES.keys()
    for name, values in VALUES.items():
        for ours in values.values():
            RULES[name].parse(ours)
