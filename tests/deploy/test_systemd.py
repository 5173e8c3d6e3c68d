"""The units of systemd: valid, and true of this server."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pypto_serving.errors import EXIT_MODEL, EXIT_USAGE
from pypto_serving.setup.option_table import DEFAULTS
from tests.deploy.commands import check_command

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
NAMES = ("pypto-serving.service", "pypto-serving.socket")


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (systemd)")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = unit(NAMES[0])["Service"]["ExecStart"].split()[0]
    for name in NAMES:
        (tmp_path / name).write_text((UNITS / name).read_text().replace(program, sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "pypto-serving" in line]
    assert (done.returncode, said) == (0, [])


def test_the_service_does_what_the_server_needs() -> None:
    service = unit(NAMES[0])["Service"]
    check_command(service["ExecStart"].split()[1:])
    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) > DEFAULTS["drain_timeout"] + 10
    assert service["OOMPolicy"] == "continue"  # the server replaces a worker or a core
    assert service["RestartPreventExitStatus"].split() == [str(EXIT_USAGE), str(EXIT_MODEL)]


def test_the_socket_is_where_the_server_listens_by_default() -> None:
    assert unit(NAMES[1])["Socket"]["ListenStream"] == f"{DEFAULTS['host']}:{DEFAULTS['port']}"
