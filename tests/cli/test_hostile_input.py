"""Commands on files and addresses that are wrong on purpose: one line that names them, and no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.cli import main
from pypto_serving.setup.locate import BUNDLED
from tests.addresses import HOSTILE

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
TOO_DEEP = "nested too deeply"


def run_line(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    """Return the exit code and the only line on stderr."""
    code = main(list(map(str, argv)))
    (line,) = capsys.readouterr().err.splitlines()
    return code, line


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_deep_json_in_a_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text(DEEP)
    code, line = run_line(capsys, "check", checkpoint)
    assert code == 3
    assert line == f"error: {checkpoint / name} is not valid JSON: it is {TOO_DEEP}"


@pytest.mark.parametrize("json", [[], ["--json"]])
@pytest.mark.parametrize("damage", ["{", "[]", "", DEEP, "a folder", "a dangling link"], ids=lambda text: text[:15])
def test_a_damaged_tokenizer(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, damage: str, json: list[str]
) -> None:
    path = checkpoint / "tokenizer.json"
    path.unlink()
    begins, ends = f"error: {path} cannot be read: ", ""
    match damage:
        case "a folder":
            path.mkdir()
        case "a dangling link":
            path.symlink_to("nowhere")
        case _:
            path.write_text(damage)
            begins, ends = f"error: {path} is damaged: ", "; download the checkpoint again"
    code, line = run_line(capsys, "check", checkpoint, *json)
    assert code == 3
    assert line.startswith(begins) and line.endswith(ends)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"],
)
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, name: str, kind: str
) -> None:
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    code, line = run_line(capsys, "check", checkpoint)
    assert code == 3
    assert line.startswith(f"error: {path} ") and "it is not a regular file" in line


@pytest.mark.timeout(60)
def test_a_configuration_that_does_not_end_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    assert main(["check", "--config", str(tmp_path / "fifo.yaml")]) == 0, "it is empty"
    capsys.readouterr()
    code, line = run_line(capsys, "check", "--config", "/dev/zero")
    assert (code, line) == (2, "error: --config /dev/zero cannot be read: it has more than 1048576 characters")


def test_a_configuration_from_a_command_is_read_to_its_end() -> None:
    """The shell's `<(command)` is a FIFO, which may be written to in pieces."""
    command = (
        f"{sys.executable} -m pypto_serving check --json --backend null --config <(echo seed:; sleep 0.2; echo ' 5')"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"name": "seed", "value": 5} in [
        {name: one[name] for name in ("name", "value")} for one in json.loads(done.stdout)["settings"]
    ]


def test_a_damaged_tokenizer_ends_a_start(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    for command in (["serve", str(checkpoint), "--port", "0"], ["generate", "--model", str(checkpoint), "x"]):
        done = subprocess.run(
            [sys.executable, "-m", "pypto_serving", *command], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.splitlines()[-1].startswith(f"error: {checkpoint / 'tokenizer.json'} is damaged: ")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("depth", [10, 400, 900])
def test_deep_values_are_named_in_short(capsys: pytest.CaptureFixture[str], checkpoint: Path, depth: int) -> None:
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    nested = "[" * depth + "]" * depth
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": "DEEP"}).replace('"DEEP"', nested))
    code, line = run_line(capsys, "check", checkpoint)
    assert code == 3
    assert "hidden_size is " in line and "but must be a positive whole number" in line
    assert len(line) < 300 + len(str(checkpoint))


def with_header(checkpoint: Path, header: str) -> Path:
    data = header.encode()
    (checkpoint / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(100))
    return checkpoint


def entry(shape: Any, offsets: Any) -> str:
    return json.dumps({"t": {"dtype": "BF16", "shape": shape, "data_offsets": offsets}})


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (DEEP, TOO_DEEP),
        ("[" * 100_000, TOO_DEEP),
        (entry(["a"], [0, 2]), "is damaged"),
        (entry([[1]], [0, 2]), "is damaged"),
        (entry([-1], [2, 0]), "is damaged"),
        (entry([1], [-2, 0]), "is damaged"),
        (entry([1.0], [0, 2]), "is damaged"),
        (entry([1], [0, "2"]), "is damaged"),
        (entry([1] * 9, [0, 2]), "is damaged"),
        (entry([0, 10**400], [0, 0]), "is damaged"),
        (entry([1], [0, 2]).replace("BF16", "\\ud800"), "is damaged"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hostile_header_is_a_verdict(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, header: str, reason: str
) -> None:
    assert main(["check", str(with_header(checkpoint, header)), "--json"]) == 3
    (verdict,) = json.loads(capsys.readouterr().out)["checkpoint"]["verdicts"]
    assert verdict.startswith(f"files: {checkpoint / 'model.safetensors'}: the ") and verdict.endswith(reason)


def test_an_offset_of_thousands_of_digits(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    with_header(checkpoint, '{"t": {"dtype": "C64", "shape": [1], "data_offsets": [0, %s]}}' % ("9" * 4300))
    code, line = run_line(capsys, "convert", checkpoint, checkpoint.parent / "new", "--format", "w8a8")
    assert (code, len(line) < 400, "is truncated: tensor t ends at" in line) == (3, True, True)


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "\x1b[31m", "\0", "", "x" * 1000], ids=repr)
def test_names_that_are_none(capsys: pytest.CaptureFixture[str], checkpoint: Path, name: str) -> None:
    """Of tensors, in a header and in an index."""
    wanted = "has the name " + repr(name)[:90]
    with_header(checkpoint, json.dumps({name: {"dtype": "BF16", "shape": [50], "data_offsets": [0, 100]}}))
    assert main(["check", str(checkpoint), "--json"]) == 3
    (verdict,) = json.loads(capsys.readouterr().out)["checkpoint"]["verdicts"]
    assert wanted in verdict and len(verdict) < 200 + len(str(checkpoint))
    index = {"weight_map": {name: "model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    code, line = run_line(capsys, "check", checkpoint)
    assert code == 3 and wanted in line


def test_a_file_that_cannot_be_read(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.unlink()
    file.symlink_to("/proc/self/mem")
    code, line = run_line(capsys, "convert", checkpoint, checkpoint.parent / "new", "--format", "w8a8")
    assert (code, line) == (3, f"error: {file} cannot be read: Input/output error")


@pytest.mark.parametrize(
    "file", ["n" * 300, "a\nb", "\ud800", "../x.safetensors", "/x.safetensors", "", ".", "..", 3, None]
)
def test_an_index_names_files_of_its_folder(capsys: pytest.CaptureFixture[str], checkpoint: Path, file: Any) -> None:
    index = {"weight_map": {"norm.weight": file}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    code, line = run_line(capsys, "check", checkpoint)
    assert code == 3 and "for 'norm.weight', but must have the name of a file beside it" in line and len(line) < 600


def test_convert_names_a_hostile_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    convert = ("convert", checkpoint, checkpoint.parent / "new", "--format", "w8a8")
    with_header(checkpoint, DEEP)
    code, line = run_line(capsys, *convert)
    assert (code, line.endswith(f"header is not valid JSON: it is {TOO_DEEP}")) == (3, True)
    (checkpoint / "config.json").write_text(DEEP)
    assert run_line(capsys, *convert)[0] == 3


@pytest.mark.parametrize(
    "argv",
    [
        ("check", "--backend", "null", "--config", "FILE"),
        ("bench", "trace", "FILE", "--virtual"),
        ("bench", "serve", "--dataset-name", "custom", "--dataset-path", "FILE", "--model", "x"),
        ("bench", "compare", "FILE", "FILE"),
        ("bench", "serve", "--extra-body", DEEP),
    ],
    ids=lambda argv: " ".join(argv)[:60],
)
@pytest.mark.parametrize("content", [DEEP.encode(), b"\xff\xfe{}", b"\0", b"1" * 5000], ids=lambda text: str(text[:6]))
def test_hostile_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: tuple[str, ...], content: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    code, line = run_line(capsys, *(path if part == "FILE" else part for part in argv))
    assert code == 2
    assert len(line) < 400


@pytest.mark.parametrize("url", HOSTILE)
@pytest.mark.parametrize(
    "argv",
    [
        ("chat", "--url"),
        ("bench", "serve", "--num-prompts", "1", "--base-url"),
        ("bench", "trace", "--requests", "1", "--base-url"),
    ],
    ids=" ".join,
)
def test_hostile_addresses(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], url: str) -> None:
    code, line = run_line(capsys, *argv, url)
    assert code == 2
    assert line.startswith(f"error: {argv[-1]} ") and "http://" in line and len(line) < 250


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "[", "a b"])
def test_hostile_hosts(capsys: pytest.CaptureFixture[str], host: str) -> None:
    code, line = run_line(capsys, "serve", "--backend", "null", "--host", host)
    assert code == 2
    assert line.startswith("error: --host ") and "is not an address of this machine" in line
    assert main(["bench", "serve", "--host", host, "--num-prompts", "1"]) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("key", ["a\nb", "a\r\nX: y", "\0"])
def test_hostile_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    wrong = "is not one line of characters that can be printed, but must be"
    assert run_line(capsys, "chat", "--url", "http://127.0.0.1:1", "--api-key", key) == (2, f"error: --api-key {wrong}")
    if "\0" not in key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
        for command in (("chat", "--url"), ("bench", "serve", "--num-prompts", "1", "--base-url")):
            assert run_line(capsys, *command, "http://127.0.0.1:1") == (2, f"error: OPENAI_API_KEY {wrong}")


@pytest.mark.parametrize("address", ["", "7000", ":7000", "here:0", "here:99999", "here:-1", "a b:7000"])
def test_joining_where_no_host_can_be(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, line = run_line(capsys, "join", address)
    assert code == 2
    assert line == f"error: HOST:PORT is {address}, but must be an address and a port, such as 10.0.0.1:7000"


@pytest.mark.parametrize("host", ["a..b", "a" * 300])
def test_joining_a_host_whose_name_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("PYPTO_JOIN_SECRET", "the secret of these two hosts")
    code, line = run_line(capsys, "join", f"{host}:7000")
    assert code == 2
    assert line == f"error: {host}:7000 is not the address of a host: Name or service not known"
