"""What a user sees: help in groups, one line for every mistake, and what `check` says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pypto_serving import __version__
from pypto_serving.cli import main
from pypto_serving.cli.app import COMMANDS, app
from pypto_serving.cli.config_file import read_config
from pypto_serving.setup import locate
from pypto_serving.setup.locate import BUNDLED, locate_model
from pypto_serving.setup.options import Options

ROOT = Path(__file__).resolve().parents[2]
NULL = ["check", "--backend", "null"]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "hidden_act": "silu",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint's configuration without its weights."""
    folder = tmp_path / "owner-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_process(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pypto_serving", *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"pypto-serving {__version__}\n", "")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert "--install-completion" in out
    assert re.findall(r"─ ([A-Z][\w ]+) ─", out) == ["Options", "Serve", "Use", "Prepare", "Look after"]
    assert sorted(re.findall(r"^│ ([a-z][a-z-]+) ", out, re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_is_grouped(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    for panel in ("Model", "Server", "Batching", "KV cache", "Device and process"):
        assert f"─ {panel} ─" in out


def test_help_of_the_load_generator_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "serve", "--help")
    headings = re.findall(r"─ ([A-Z][\w ]+) ─", out)
    assert (code, headings[1:]) == (0, ["Server", "Prompts", "Traffic", "Sampling", "Result", "Prefix repetition"])
    assert "--help" in out.split("─ Server ─")[0] and out.split("─ Server ─")[0].count("--") == 1


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, groups included."""
    group = group or typer.main.get_command(app)
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


def test_help_cuts_no_option_at_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in commands():
        code, out, _ = run(capsys, *path, "--help")
        visible = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        names = {name for parameter in visible for name in (*parameter.opts, *parameter.secondary_opts)}
        shown = set(re.findall(r"--[\w-]+", out))
        assert code == 0
        assert {name for name in names if name.startswith("--")} <= shown, path


@pytest.mark.parametrize(
    ("command", "has"), [(["serve"], True), (["run-batch"], True), (["chat"], False), (["bench", "latency"], False)]
)
def test_names_are_for_what_answers_requests(capsys: pytest.CaptureFixture[str], command: list[str], has: bool) -> None:
    code, out, _ = run(capsys, *command, "--help")
    assert (code, "--served-model-name" in out) == (0, has)


def test_every_option_has_a_flag() -> None:
    from pypto_serving.setup.option_table import TABLE

    assert {row.name for row in TABLE} == set(Options.__struct_fields__) - {
        "api_key_file",
        "config_file",
        "from_file",
        "from_environment",
        "as_arguments",
        "notes",
    }


def test_generate_has_no_argument_for_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "same as the argument" in run(capsys, "serve", "--help")[1]
    assert "argument MODEL" not in run(capsys, "generate", "--help")[1]


def test_bench_is_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--help")
    assert code == 0
    assert "compare" in out


MISTAKES: list[tuple[list[str], int, str]] = [
    (["chek"], 2, "No such command 'chek'. Did you mean 'check'?"),
    (["check", "--prot", "1"], 2, "No such option: --prot; did you mean --port?"),
    (["serve", "--nope"], 2, "No such option: --nope; --help lists all"),
    (["check", "a", "b"], 2, "unexpected extra argument"),
    (["check", "a", "--model", "b"], 2, "MODEL is a, but --model is b; give one of them"),
    ([*NULL, "--port", "70000"], 2, "--port is 70000, but must be a whole number from 0 to 65535"),
    ([*NULL, "--port", "http"], 2, "--port is http, but must be a whole number from 0 to 65535"),
    ([*NULL, "--max-num-seqs", "0"], 2, "--max-num-seqs is 0, but must be a whole number from 1 to 65536"),
    ([*NULL, "--max-num-batched-tokens", "-5"], 2, "--max-num-batched-tokens is -5, but must be"),
    ([*NULL, "--block-size", "12"], 2, "--block-size is 12, but must be a power of two"),
    ([*NULL, "--block-size="], 2, "--block-size is empty, but must be"),
    ([*NULL, "--kv-memory", "1KiB"], 2, "--kv-memory is 1 KiB, too little"),
    ([*NULL, "--max-model-len", "99999"], 2, "give at most 40960"),
    ([*NULL, "--config", "no/such.yaml"], 2, "--config no/such.yaml cannot be read: No such file"),
    ([*NULL, "deepseek_v4", "--block-size", "32"], 2, "--block-size cannot be chosen for deepseek_v4"),
    (
        ["convert", "a", "b", "--format", "x"],
        2,
        "Invalid value for '--format': 'x' is not one of 'w8a8', 'w4a16', 'mxfp4'.",
    ),
    (["bench", "serve", "--backend", "x"], 2, "Invalid value for '--backend': 'x' is not one of 'openai', 'openai-"),
    (["check", "--backend", "gpu"], 2, "--backend is gpu, but must be one of cpu, npu, cuda, null"),
    (
        [*NULL, "--kv-disk", "/dev/null"],
        2,
        "--kv-disk is /dev/null, which cannot be used: not a directory; give a folder that",
    ),
    (
        ["serve", *NULL[1:], "--kv-disk", "/dev/null/kv"],
        2,
        "--kv-disk is /dev/null/kv, which cannot be used: not a dir",
    ),
    ([*NULL, "--kv-disk", "n" * 300], 2, "nnn, which cannot be used: file name too long; give a folder that can"),
    ([*NULL, "--kv-disk-size", "1.5"], 2, "--kv-disk-size is 1.5, but must be a size with a unit such as 20GiB"),
    (["check", "./no/such/model"], 3, "./no/such/model does not exist; give an existing folder, a hub name"),
    (["check", "n" * 300], 3, "file name too long; give an existing folder or a hub name"),
    (["check", "~no-such-user/model"], 3, "~no-such-user/model does not exist; give an existing folder, a hub name"),
    ([*NULL, "--chat-template", "n" * 300], 2, "nnn, which is no file; give a Jinja file"),
    (["serve", "--backend", "null", "--host", "256.0.0.1"], 2, "--host 256.0.0.1 is not an address of this machine"),
    (["generate", "--temperature", "-1", "x"], 2, "--temperature is -1.0, but must be between 0 and 100"),
    (["generate", "--frequency-penalty", "3", "x"], 2, "--frequency-penalty is 3.0, but must be between -2 and 2"),
    (["generate", "--top-k", "x", "x"], 2, "Invalid value for '--top-k'"),
    (["chat", "--url", "localhost"], 2, "--url is 'localhost', but must be like http://"),
    (["chat", "--api-key", "k"], 2, "--api-key has no effect without --url"),
    (["chat", "--url", "http://h", "--block-size", "8"], 2, "--block-size has no effect with --url"),
]


@pytest.mark.parametrize(("argv", "code", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], code: int, message: str) -> None:
    actual, out, err = run(capsys, *argv)
    assert (actual, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_mistake_in_a_real_process() -> None:
    result = run_process("serve", "--port", "-1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --port is -1, but must be a whole number from 0 to 65535\n"


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_disk_that_is_too_small_is_named(tmp_path: Path, options: list[str]) -> None:
    result = run_process(*NULL, *options, "--kv-disk", str(tmp_path), "--kv-disk-size", "900TiB")
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"--kv-disk-size is 900 TiB, but the disk of {tmp_path} has ")
    assert result.stderr.endswith(" left; blocks are kept until it is full\n")


def test_generate_without_a_prompt() -> None:
    result = run_process("generate", "--backend", "null")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: there is no prompt; give PROMPT... or pipe one prompt per line\n"


def test_check_needs_no_weights(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    code, out, err = run(capsys, "check", str(checkpoint), "--max-num-seqs", "2")
    assert (code, err) == (0, "")
    for line in ("owner-model", "given by --max-num-seqs", "Memory plan", "sequences of 1024 tokens at once"):
        assert line in out
    assert "temperature 0.6, top_p 0.9, top_k 20" in out


def test_check_as_json(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    code, out, _ = run(capsys, "check", str(checkpoint), "--json", "--kv-memory", "1MiB")
    content: dict[str, Any] = json.loads(out)
    memory, (group,) = content["memory"], content["memory"]["groups"]
    assert code == 0
    assert content["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert memory["kv_bytes"] == group["total_bytes"] == group["num_blocks"] * group["block_bytes"] <= 1 << 20
    assert group["block_bytes"] == 3 * 2 * 32 * 2 * 16 * 2  # layers, K and V, tokens, heads, head size, bfloat16
    assert group["num_tokens"] == (group["num_blocks"] - 1) * 32
    assert group["sequence"] == {"bytes_per_token": 384, "num_blocks": 32, "total_bytes": 1024 * 384}
    assert (content["checkpoint"]["source"], content["obstacle"]) == ("config.json", "")
    assert [tensors["dtype"] for tensors in content["tensors"]] == ["BF16"]


def test_check_without_a_model_is_the_bundled_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check")
    assert code == 0
    assert str(BUNDLED) in out


def test_check_shows_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "--tp", "2", "--num-threads", "2")
    assert code == 0
    head, *rows = (line.split() for line in out.split("Ranks\n")[1].splitlines()[:3])
    assert head[:4] == ["rank", "host", "stage", "layers"] and head[-4:] == ["weights", "KV", "workspace", "scoring"]
    assert [row[:9] for row in rows] == [
        ["0", "0", "0", "0-3", "all", "0-3", "0", "0-127", "-"],
        ["1", "0", "0", "0-3", "all", "4-7", "1", "128-255", "-"],
    ]
    code, out, _ = run(capsys, "check", "--tp", "2", "--json")
    memory = json.loads(out)["memory"]
    assert code == 0 and [rank["heads"] for rank in memory["ranks"]] == [[0, 4], [4, 8]]
    assert sum(rank["weight_bytes"] for rank in memory["ranks"]) == memory["weight_bytes"]


def chat_setting(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    code, out, _ = run(capsys, "check", *argv, "--json")
    assert code == 0
    return next((s["value"], s["reason"]) for s in json.loads(out)["settings"] if s["name"] == "chat-template")


def test_check_says_whether_the_model_can_chat(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    assert chat_setting(capsys) == ("tokenizer_config.json", "from the model's files")
    assert chat_setting(capsys, "--backend", "null") == ("off", "this model has no tokenizer.json")
    assert chat_setting(capsys, str(checkpoint)) == ("off", "this model has no tokenizer.json")
    shutil.copy(BUNDLED / "tokenizer.json", checkpoint)
    assert chat_setting(capsys, str(checkpoint)) == ("off", "this model has no chat template")
    own = checkpoint / "own.jinja"
    own.write_text("{{ messages }}")
    assert chat_setting(capsys, str(checkpoint), "--chat-template", str(own)) == (str(own), "given by --chat-template")
    own.write_text("{% if %}")
    code, _, err = run(capsys, "check", str(checkpoint), "--chat-template", str(own))
    assert (code, err.count("\n")) == (3, 1)
    assert "is not valid Jinja" in err
    own.rename(checkpoint / "chat_template.jinja")
    value, reason = chat_setting(capsys, str(checkpoint))
    assert value == "off" and "is not valid Jinja" in reason


def test_check_shows_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *NULL, "deepseek_v4")
    assert code == 0
    for group in ("ori", "cmp", "idx", "hca_state", "csa_state", "csa_inner_state"):
        assert f"  {group} " in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "max-num-seqs: 7\nport: 1234\nchunked_prefill: false\nserved-model-name: [a, b]\n"),
        (
            "c.json",
            '{"max_num_seqs": 7, "port": 1234, "chunked-prefill": false, "served-model-name": ["a", "b"]}',
        ),
    ],
)
def test_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    code, out, _ = run(capsys, *NULL, "--config", str(tmp_path / name), "--port", "99", "--json")
    settings = {s["name"]: (s["value"], s["reason"]) for s in json.loads(out)["settings"]}
    assert code == 0
    assert settings["max-num-seqs"] == (7, f"given in {name}")
    assert settings["chunked-prefill"] == (False, f"given in {name}")
    assert settings["served-model-name"] == ("a, b", f"given in {name}")
    assert settings["port"] == (99, "given by --port")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 7", "unknown option 'max-num-seq' in c.yaml; did you mean max-num-seqs?"),
        ("port: many", "port in c.yaml is many, but must be a whole number"),
        ("- port", "holds a list, but must hold `option: value` pairs"),
        ("port: [", "line 1 is neither YAML nor JSON"),
        ("port: 1\nseed: 2\nport: 3", "c.yaml gives port on line 1 and again on line 3; keep one"),
        ('{"port": 1,\n "port": 1}', "c.yaml gives port on line 1 and again on line 2; keep one"),
        (
            "max-model-len: 99\n\nmax_model_len: 98",
            "c.yaml gives max-model-len on line 1 and max_model_len, the same option, on line 3; keep one",
        ),
        ("api_key: a\napi-key-file: b", "c.yaml gives api-key and api-key-file, on lines 1 and 2; drop one"),
        ("served-model-name: 12", "is 12, but must be one or more texts, none of them empty; put it in quotes"),
        ("model: 12", "model in c.yaml is 12, but must be text on one line, not empty; put it in quotes"),
        ("port: true", "port in c.yaml is True, but must be a whole number"),
        ("port: 80:00", "port in c.yaml is 80:00, but must be a whole number"),
        ("step-timeout: 1:30.5", "step-timeout in c.yaml is 1:30.5, but must be a number of seconds"),
        ("port: 0o17", "port in c.yaml is 0o17, but must be a whole number"),
        (f"port: {'9' * 5000}", "999..., but must be a whole number"),
        ('port: !!int "zz"', "c.yaml is neither YAML nor JSON; mend it"),
        ("seed: !!timestamp zz", "c.yaml is neither YAML nor JSON; mend it"),
        ("[" * 3000, "c.yaml is neither YAML nor JSON; mend it"),
        ('api-key-file: "a\\0b"', "api-key-file in c.yaml must be the path of a file that holds the API key"),
        ("kv-disk: /dev/null", "kv-disk in c.yaml is /dev/null, which cannot be used: not a directory"),
        ("device: cpu\nbackend: cpu", "device and backend in c.yaml are the same option; keep one"),
        (
            "no-prefix-caching: true",
            "unknown option 'no-prefix-caching' in c.yaml; did you mean prefix-caching: false?",
        ),
        ('model: "a\\0b"', "model in c.yaml is a\\x00b, but must be text on one line, not empty"),
        ("api-key-file: ~", "api-key-file in c.yaml must be the path of a file that holds the API key"),
    ],
)
def test_mistakes_in_a_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    code, _, err = run(capsys, *NULL, "--config", str(tmp_path / "c.yaml"))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_plain_values_of_a_config_file_are_what_they_look_like(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "served-model-name: 2024-99-99\nport: 8_000\nseed: 0x10\nmax-num-seqs: 017\nkv-memory: 0.5\n"
        "device: cpu\nprefix-caching: off\nhost: ~\nstep-timeout: 1e3\ndrain-timeout: 1.5e+1\n"
    )
    assert read_config(path) == {
        "served-model-name": "2024-99-99",
        "port": 8000,
        "seed": 16,
        "max-num-seqs": "017",
        "kv-memory": 0.5,
        "device": "cpu",
        "prefix-caching": False,
        "host": None,
        "step-timeout": "1e3",
        "drain-timeout": 15.0,
    }


@pytest.mark.parametrize("command", [["check"], ["generate", "hello"], ["chat"]], ids=lambda argv: argv[0])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv-memory: 1KiB", "kv-memory in c.yaml is 1 KiB, too little for one sequence of 2 tokens"),
        ("max_model_len: 99999", "max-model-len in c.yaml is 99999, but the model's longest sequence is 40960"),
        ("kv-disk-size: 1GiB", "kv-disk-size in c.yaml needs a folder; give kv-disk in c.yaml too, or drop it"),
    ],
)
def test_what_cannot_work_is_named_by_its_key_in_every_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], text: str, message: str
) -> None:
    """Values that only the model or the machine show to be impossible."""
    (tmp_path / "c.yaml").write_text(f"{text}\nbackend: 'null'\n")
    code, out, err = run(capsys, *command, "--config", str(tmp_path / "c.yaml"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


def test_locate_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(None) == BUNDLED
    assert locate_model(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    assert locate_model(".") == tmp_path.resolve()
    monkeypatch.setattr(locate, "_fetch", lambda found, revision, files: Path("cache") / found["name"])
    assert locate_model("owner/name.v1-2") == Path("cache/owner/name.v1-2")
    assert locate_model("bundled") == BUNDLED
    (tmp_path / "bundled").mkdir()
    assert locate_model("bundled") == tmp_path.resolve() / "bundled"


def test_convert_says_what_took_how_long(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, "convert", str(BUNDLED), str(tmp_path / "w8a8"), "--format", "w8a8")
    assert (code, out.count("is complete; serve it with")) == (0, 1)
    assert re.fullmatch(r"converting weights: \d+\.\d\d s\n", err)


def test_convert_refuses_a_bad_target_as_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target, reason in (
        (BUNDLED, "is a complete checkpoint already; give a folder"),
        (tmp_path, "is not empty; give a folder"),
        (tmp_path / "file", "is a file; give a folder"),
        (tmp_path / "file" / "below", "cannot be made: not a directory; give another folder"),
    ):
        code, out, err = run(capsys, "convert", str(BUNDLED), str(target), "--format", "w8a8")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"error: TARGET {target} {reason}" in err
