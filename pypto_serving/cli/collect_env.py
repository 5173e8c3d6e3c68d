"""`collect-env`: print the facts needed in a report of a problem."""

from __future__ import annotations

import json as jsonlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

from pypto_serving.setup.host import read_host_facts
from pypto_serving.util import counted, format_size

DISTRIBUTION = "pypto-serving"
Sections = dict[str, dict[str, str]]
_SHOWN = re.compile(
    r"(PYPTO|OMP|KMP|GOMP|MKL|OPENBLAS|HF|ASCEND|CUDA|NVIDIA)_\w+|XDG_CACHE_HOME|LD_PRELOAD|LD_LIBRARY_PATH"
)
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD")


def collect_env(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, machine and variables, for a report of a problem. Values of keys and secrets are left out."""
    from pypto_serving.cli.report import columns, echo

    found = read_environment()
    if json:
        typer.echo(jsonlib.dumps(found))
        return
    for title, facts in found.items():
        if facts:
            typer.secho(title, bold=True)
            echo(columns(list(facts.items())), indent=2)


def read_environment(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> Sections:
    """Return facts by section and name; `root` and `variables` are for tests."""
    host = read_host_facts(root, cards=True)
    distribution = _field(root / "etc/os-release", "PRETTY_NAME", "=").strip('"') or "unknown distribution"
    return {
        "Installation": {
            "pypto-serving": _version(DISTRIBUTION),
            "Python": f"{platform.python_version()}, {sys.executable}",
            "CPU kernels": ", ".join(host.kernels) or "none",
            "cache": host.cache_dir or "none",
        },
        "Machine": {
            "system": f"{distribution}, {platform.system()} {platform.release()}, {platform.machine()}",
            "libc": " ".join(platform.libc_ver()) or "unknown",
            "processor": _field(root / "proc/cpuinfo", "model name") or platform.processor() or "unknown",
            "CPUs": f"{host.num_cpus} may be used, on {counted(len(host.nodes), 'NUMA node')}",
            "free memory": format_size(host.available_bytes),
            "Ascend device": "yes" if host.npu else "no",
            "NVIDIA cards": ", ".join(f"{card.name}, {format_size(card.free_bytes)} free" for card in host.cards)
            or "none",
        },
        "Packages": _packages(),
        "Variables": {name: _shown(name, variables[name]) for name in sorted(variables) if _SHOWN.fullmatch(name)},
    }


def _packages() -> dict[str, str]:
    """Return the version of each package that this package or one of its extras requires."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return {}
    names = sorted({re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines} - {DISTRIBUTION})
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _shown(name: str, value: str) -> str:
    return "set, not shown" if _SECRET.search(name) else value


def _field(file: Path, key: str, mark: str = ":") -> str:
    """Return the value of the first line of `file` that begins with `key`; "" if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(mark) for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
