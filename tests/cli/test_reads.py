"""How often commands open a model's files."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from pypto_serving.cli import main
code = main(sys.argv[1:])
print(sum(name.endswith("/config.json") for name in opened), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("argv", [["check"], ["check", "--json"], ["generate", "--max-tokens", "1", "x"]], ids=" ".join)
def test_a_process_reads_the_configuration_once(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", COUNT, *argv], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "1"
