"""The Helm chart, by the real helm."""

from __future__ import annotations

import pytest

from pypto_serving import __version__
from tests.deploy.conftest import kustomized
from tests.deploy.files import read_yaml
from tests.deploy.helm import CHART, Helm, rendered


def test_helm_finds_nothing_to_complain_of(helm: Helm) -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0 and "[WARNING]" not in done.stdout, done.stdout + done.stderr


def test_its_version_is_that_of_the_server() -> None:
    chart = read_yaml("helm/Chart.yaml")
    assert chart["version"] == chart["appVersion"] == __version__


def test_it_makes_what_the_plain_manifests_have(helm: Helm) -> None:
    assert rendered(helm) == kustomized()


def test_values_reach_the_pod(helm: Helm) -> None:
    chosen = ("model=Qwen/Qwen3-0.6B", "drainTimeout=600", "options={--kv-memory,2GiB}", "cacheClaim=disk")
    _, deployment = rendered(helm, *chosen, "secret=mine", "pod.nodeSelector.zone=a", "resources.limits.memory=16Gi")
    pod = deployment["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert server["args"][:2] == ["serve", "Qwen/Qwen3-0.6B"] and server["args"][-2:] == ["--kv-memory", "2GiB"]
    assert server["args"][server["args"].index("--drain-timeout") + 1] == "600"
    assert pod["terminationGracePeriodSeconds"] == 630
    assert server["resources"] == {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "16Gi"}}
    assert pod["nodeSelector"] == {"zone": "a"}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["cache"] == {"persistentVolumeClaim": {"claimName": "disk"}}
    assert volumes["keys"] == {"secret": {"secretName": "mine"}}


def test_its_pod_monitor_is_the_plain_one(helm: Helm) -> None:
    monitor, plain = rendered(helm, "podMonitor=true")[-1], read_yaml("kubernetes/podmonitor.yaml")
    assert plain["spec"]["selector"]["matchLabels"].items() <= monitor["spec"].pop("selector")["matchLabels"].items()
    del plain["spec"]["selector"], monitor["metadata"]["labels"]
    assert monitor == plain


@pytest.mark.parametrize("value", ["modle=x", "replicas=two", "options=--kv-memory", "drainTimeout=-1"])
def test_a_value_that_cannot_work_is_refused(helm: Helm, value: str) -> None:
    done = helm("template", "pypto-serving", str(CHART), "--set", value)
    assert done.returncode != 0 and value.partition("=")[0] in done.stderr
