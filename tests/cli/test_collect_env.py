"""What `collect-env` tells, and what not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pypto_serving import __version__
from pypto_serving.cli import main
from pypto_serving.cli.collect_env import read_environment


def test_facts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    assert __version__ in out and "CPU kernels" in out and "starlette" in out
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["Installation", "Machine", "Packages", "Variables"]
    assert found["Packages"]["msgspec"][0].isdigit() and "pypto-serving" not in found["Packages"]


def test_secrets_are_not_shown() -> None:
    variables = {"PYPTO_SERVING_API_KEY": "sesame", "HF_TOKEN": "sesame", "OMP_NUM_THREADS": "4", "HOME": "/sesame"}
    found = read_environment(variables=variables)["Variables"]
    assert found == {"HF_TOKEN": "set, not shown", "OMP_NUM_THREADS": "4", "PYPTO_SERVING_API_KEY": "set, not shown"}


def test_a_machine_that_tells_nothing_is_described_too(tmp_path: Path) -> None:
    found = read_environment(tmp_path, {})
    assert found["Machine"]["Ascend device"] == "no" and "unknown distribution" in found["Machine"]["system"]


def test_a_machine_is_read(tmp_path: Path) -> None:
    for name, text in {
        "etc/os-release": 'NAME="Small"\nPRETTY_NAME="Small Linux 3"\n',
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast 9000\n",
        "dev/davinci0": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_environment(tmp_path, {})["Machine"]
    assert found["system"].startswith("Small Linux 3, ") and found["processor"] == "Fast 9000"
    assert found["Ascend device"] == "yes"
