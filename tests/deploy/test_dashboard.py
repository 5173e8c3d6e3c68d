"""The dashboard against Grafana's own schema, of the version that compose.yaml runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, read_yaml

VERSION = read_yaml("compose.yaml")["services"]["grafana"]["image"].partition(":")[2]
PACKAGES = (f"@grafana/schema@{VERSION}", "typescript@5.9")
STAT = "./node_modules/@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen"
HEAD = f"""
import type {{ Dashboard }} from '@grafana/schema';
import type {{ Options }} from '{STAT}';
type Plain<T> = T extends string ? `${{T}}` : T extends object ? {{ [K in keyof T]: Plain<T[K]> }} : T;
type Some<T> = T extends object ? {{ [K in keyof T]?: Some<T[K]> }} : Plain<T>;
"""
"""Plain<T> has the values of an enumeration, as JSON has them, in place of its names."""
CHECK = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler")


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and a compiler."""
    if shutil.which("npm") is None:
        pytest.skip("no Node: install Debian's packages nodejs and npm")
    folder = tmp_path_factory.mktemp("grafana")
    install = ["npm", "install", "--silent", "--ignore-scripts", "--legacy-peer-deps", "--prefix", str(folder)]
    if subprocess.run([*install, *PACKAGES], capture_output=True, timeout=120).returncode:
        pytest.skip(f"npm cannot fetch {' '.join(PACKAGES)}: it needs a registry")
    return folder


def complaints(types: Path, dashboard: dict[str, Any]) -> str:
    """Return what the compiler finds wrong with a dashboard as a literal, in which it refuses unknown names."""
    options = [panel["options"] for panel in dashboard["panels"] if panel["type"] == "stat"]
    values = {"dashboard: Plain<Dashboard>": dashboard, "options: Some<Options>[]": options}
    code = [f"export const {name} = {json.dumps(value)};\n" for name, value in values.items()]
    (types / "dashboard.ts").write_text(HEAD + "".join(code))
    command = [str(types / "node_modules/.bin/tsc"), *CHECK, "dashboard.ts"]
    return subprocess.run(command, cwd=types, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return found


def test_it_has_the_types_of_grafana(types: Path, dashboard: dict[str, Any]) -> None:
    assert complaints(types, dashboard) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gridpos": {}}, "gridpos"),
        pytest.param({"type": 1}, "number", marks=pytest.mark.soak),
        ({"options": {"colorMode": "red"}}, '"red"'),
    ],
)
def test_what_is_wrong_is_found(types: Path, dashboard: dict[str, Any], change: dict[str, Any], words: str) -> None:
    stat = next(panel for panel in dashboard["panels"] if panel["type"] == "stat")
    dashboard["panels"] = [stat | change]
    assert words in complaints(types, dashboard)
