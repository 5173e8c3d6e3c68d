"""The Helm chart, by the real helm."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest

from pypto_serving import __version__
from pypto_serving.errors import ConfigError
from pypto_serving.model.registry import load_spec
from pypto_serving.setup.resolver import Resolved
from pypto_serving.util import GIB, parse_size
from tests.deploy.conftest import kustomized
from tests.deploy.files import DEPLOY, read_yaml
from tests.deploy.helm import CHART, Helm, rendered
from tests.deploy.vllm_dashboards import GAUGES
from tests.setup.small import WITH_KERNELS, make_resolved


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


SETS: dict[str, tuple[str, ...]] = {
    "default": (),
    "environment": (
        "env[0].name=HF_TOKEN",
        "env[0].valueFrom.secretKeyRef.name=hub",
        "env[0].valueFrom.secretKeyRef.key=token",
        "envFrom[0].configMapRef.name=proxy",
    ),
    "volumes": (
        "volumes[0].name=models",
        "volumes[0].persistentVolumeClaim.claimName=models",
        "volumeMounts[0].name=models",
        "volumeMounts[0].mountPath=/models",
        "volumeMounts[0].readOnly=true",
    ),
    "service": ("service.type=LoadBalancer", "service.port=443", "service.annotations.zone=a"),
    "disruption": ("podDisruptionBudget.maxUnavailable=1", "replicas=3"),
    "autoscaling": ("keda.maxReplicas=4", "keda.serverAddress=http://prometheus:9090", "keda.waiting=8"),
    "network": ("networkPolicy.from[0].podSelector.matchLabels.app=gateway",),
    "ingress": (
        "ingress.ingressClassName=nginx",
        "ingress.annotations.kind=internal",
        "ingress.defaultBackend.service.name=pypto-serving",
        "ingress.defaultBackend.service.port.name=http",
    ),
    "claim": ("strategy=Recreate", "cacheClaim=disk", "startTimeout=3600", "progressDeadline=4000"),
    "https": ("tlsSecret=certificate", "serviceMonitor=true", "podMonitor=true", "drainTimeout=300"),
}
EXTRA = {
    "disruption": "PodDisruptionBudget",
    "autoscaling": "ScaledObject",
    "network": "NetworkPolicy",
    "ingress": "Ingress",
    "https": "ServiceMonitor",
}
"""What a set of values has beside a Deployment and a Service."""


@pytest.mark.parametrize("name", SETS)
def test_sets_of_values_make_whole_manifests(helm: Helm, name: str) -> None:
    done = helm("lint", "--strict", str(CHART), *(word for value in SETS[name] for word in ("--set", value)))
    assert done.returncode == 0, done.stdout + done.stderr
    made = {each["kind"]: each for each in rendered(helm, *SETS[name])}
    assert {"Deployment", "Service"} | ({EXTRA[name]} if name in EXTRA else set()) <= made.keys()
    for kind, manifest in made.items():
        if kind not in ("ScaledObject", "ServiceMonitor", "PodMonitor"):
            kubernetes_validate.validate(manifest, "1.34", strict=True)
    spec = made["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    names = [volume["name"] for volume in pod["volumes"]]
    assert len(set(names)) == len(names) and {mount["name"] for mount in server["volumeMounts"]} == set(names)
    startup = server["startupProbe"]
    assert spec["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    probes = [
        server[f"{probe}Probe"]["httpGet"].get("scheme", "HTTP") for probe in ("startup", "readiness", "liveness")
    ]
    assert set(probes) == {"HTTPS" if name == "https" else "HTTP"}
    assert ("--ssl-certfile" in server["args"]) == (name == "https")
    assert ("replicas" in spec) == (name != "autoscaling")
    assert (spec["strategy"].get("type") == "Recreate") == (name == "claim")


def test_what_a_set_of_values_says_is_there(helm: Helm) -> None:
    made = {name: {each["kind"]: each for each in rendered(helm, *values)} for name, values in SETS.items()}
    (server,) = made["environment"]["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["env"] == [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    assert server["envFrom"] == [{"configMapRef": {"name": "proxy"}}]
    service = made["service"]["Service"]
    assert service["spec"]["type"] == "LoadBalancer" and service["metadata"]["annotations"] == {"zone": "a"}
    assert service["spec"]["ports"][0] == {"name": "http", "port": 443, "targetPort": "http"}
    (rule,) = made["network"]["NetworkPolicy"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}] and rule["from"][0]["podSelector"] == {"matchLabels": {"app": "gateway"}}
    assert made["ingress"]["Ingress"]["metadata"]["annotations"] == {"kind": "internal"}
    (trigger,) = made["autoscaling"]["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == "8"
    assert "vllm:num_requests_waiting{" in "".join(GAUGES)
    assert trigger["metadata"]["query"].startswith("sum(vllm:num_requests_waiting{pod=~")
    for kind, endpoints in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        assert made["https"][kind]["spec"][endpoints][0]["scheme"] == "https"
    pods = made["disruption"]["Deployment"]["spec"]["selector"]
    assert made["disruption"]["PodDisruptionBudget"]["spec"] == {"maxUnavailable": 1, "selector": pods}


def test_its_notes_name_what_to_do_next(helm: Helm) -> None:
    done = helm("install", "pypto-serving", str(CHART), "--dry-run=client", "--set", "model=Qwen/Qwen3-8B")
    assert "loads Qwen/Qwen3-8B" in done.stdout and "rollout status deployment/pypto-serving" in done.stdout, (
        done.stderr
    )


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960, "vocab_size": 151936,
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip


def resolve_qwen3_8b(folder: Path, available_bytes: int) -> Resolved:
    """What the server would decide where so much memory is free."""
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    facts = msgspec.structs.replace(WITH_KERNELS, available_bytes=available_bytes)
    return make_resolved(load_spec(folder), facts)


def test_the_example_of_the_docs_has_memory_to_start_in(helm: Helm, tmp_path: Path) -> None:
    """The planner, for a machine with the memory that the example's pod may use."""
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    command = next(line for line in text.splitlines() if line.startswith("helm install") and "Qwen3-8B" in line)
    values = [word for word in shlex.split(command) if "=" in word]
    _, deployment = rendered(helm, *values)
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    resources = server["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    room = parse_size(resources["limits"]["memory"].replace("Gi", "GiB"))
    planned = resolve_qwen3_8b(tmp_path, room)
    assert planned.memory.weight_bytes > 15 * GIB and planned.engine.limits.max_model_len >= 32768
    with pytest.raises(ConfigError):
        resolve_qwen3_8b(tmp_path, parse_size("8GiB"))
