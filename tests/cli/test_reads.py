"""How often commands open a model's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.setup.locate import BUNDLED

COUNT = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from pypto_serving.cli import main
code = main(sys.argv[1:])
names = "/config.json", "/generation_config.json"
print(*(sum(path.endswith(name) for path in opened) for name in names), file=sys.stderr)
sys.exit(code)
"""


def opens(argv: list[str]) -> str:
    done = subprocess.run([sys.executable, "-c", COUNT, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("argv", [["check"], ["check", "--json"], ["generate", "--max-tokens", "1", "x"]], ids=" ".join)
def test_a_process_reads_the_configuration_once(argv: list[str]) -> None:
    assert opens(argv) == "1 1"


def test_also_without_a_generation_config(tmp_path: Path) -> None:
    """Then the ids that end a sequence are those of config.json."""
    for file in BUNDLED.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    assert opens(["generate", "--model", str(tmp_path), "--max-tokens", "1", "x"]) == "1 0"
