"""compose.yaml and the Kubernetes manifests: whole, and true of this server."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from pypto_serving.api.status import PROBES
from pypto_serving.setup.option_table import DEFAULTS
from tests.deploy.commands import check_command
from tests.deploy.conftest import kustomized
from tests.deploy.files import DEPLOY, only, read_yaml

END_S = 15
"""The processes have so long to end, when nothing is left to answer."""
KUBERNETES = ("deployment.yaml", "service.yaml")


def value_of(arguments: list[str], flag: str, default: Any = None) -> Any:
    return arguments[arguments.index(flag) + 1] if flag in arguments else default


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text[:-1])


def test_compose_starts_the_server_as_it_can_be_started() -> None:
    compose = read_yaml("compose.yaml")
    server = compose["services"]["server"]
    arguments = [word.replace("${MODEL:-bundled}", "bundled") for word in server["command"]]
    check_command(arguments)
    drain_s = float(value_of(arguments, "--drain-timeout", DEFAULTS["drain_timeout"]))
    assert seconds(server["stop_grace_period"]) >= drain_s + END_S
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    assert server["ports"] == [f"127.0.0.1:{DEFAULTS['port']}:{DEFAULTS['port']}"]
    assert value_of(arguments, "--api-key-file") == "/run/secrets/api-key"


def test_compose_has_all_that_it_names() -> None:
    compose = read_yaml("compose.yaml")
    for service in compose["services"].values():
        assert service["restart"] == "unless-stopped"
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml("grafana/provisioning/dashboards/pypto-serving.yml")["providers"]
    folder = provider["options"]["path"]
    assert any(f":{folder}/" in volume for volume in compose["services"]["grafana"]["volumes"])


def test_kustomize_makes_the_manifests_that_are_there() -> None:
    assert read_yaml("kubernetes/kustomization.yaml")["resources"] == list(KUBERNETES)
    assert {each["kind"] for each in kustomized()} == {"Deployment", "Service"}


def test_a_pod_drains_before_it_is_killed(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    check_command(server["args"])
    drain_s = float(value_of(server["args"], "--drain-timeout", DEFAULTS["drain_timeout"]))
    pause_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + END_S
    assert value_of(server["args"], "--host") == "0.0.0.0"


def test_probes_ask_what_needs_no_key(manifests: dict[str, Any]) -> None:
    (server,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    (port,) = server["ports"]
    asked = {name: server[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {probe["path"] for probe in asked.values()} <= PROBES
    assert {probe["port"] for probe in asked.values()} == {port["name"]} and port["containerPort"] == DEFAULTS["port"]
    (exposed,) = manifests["Service"]["spec"]["ports"]
    assert exposed["targetPort"] == port["name"]


def test_a_pod_can_read_its_key_and_write_its_cache(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(only("USER"))
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert value_of(server["args"], "--api-key-file") == mounts["keys"] + "/api-key"
    assert mounts["cache"] == only("WORKDIR") + "/.cache"


def test_the_operator_scrapes_pods_with_the_key_that_they_have(manifests: dict[str, Any]) -> None:
    monitor = read_yaml("kubernetes/podmonitor.yaml")
    pods = manifests["Deployment"]["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert [port["name"] for port in pods["spec"]["containers"][0]["ports"]] == [endpoint["port"]]
    (keys,) = [volume["secret"] for volume in pods["spec"]["volumes"] if "secret" in volume]
    assert endpoint["authorization"]["credentials"]["name"] == keys["secretName"]


def test_the_manifests_match_the_schemas_of_kubernetes(manifests: dict[str, Any]) -> None:
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, "1.34", strict=True)
