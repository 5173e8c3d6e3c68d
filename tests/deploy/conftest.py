"""Helm, and the manifests of Kubernetes from both sources."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.files import DEPLOY
from tests.deploy.helm import Helm, find_helm, rendered

KUSTOMIZE = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]


@pytest.fixture(scope="session")
def helm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    assert pytestconfig.cache is not None
    program = find_helm(pytestconfig.cache.mkdir("helm"), tmp_path_factory.mktemp("helm"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture(params=["kustomize", "helm"])
def manifests(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The manifests by kind, as kubectl makes them, and as the chart does."""
    made = rendered(request.getfixturevalue("helm")) if request.param == "helm" else kustomized()
    return {each["kind"]: each for each in made}


def kustomized() -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl on PATH")
    text = subprocess.run(KUSTOMIZE, check=True, capture_output=True, text=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))
