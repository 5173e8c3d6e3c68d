"""Whose name the lines of a process bear."""

from __future__ import annotations

import subprocess
import sys


def test_a_copy_writes_each_line_once_in_its_own_name_from_its_own_level_on() -> None:
    program = """
import logging
from pypto_serving.logs import configure

configure("worker", "info", "text")
logging.info("one")
configure("rank 1", "warning", "text")
logging.info("two")
logging.warning("three")
"""
    written = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True).stderr
    assert [line.split(" ", 1)[1] for line in written.splitlines()] == ["INFO worker: one", "WARNING rank 1: three"]
