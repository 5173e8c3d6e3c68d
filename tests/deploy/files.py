"""What tests read from files of deploy/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order, with what follows them."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def only(instruction: str) -> str:
    """What follows an instruction that is there once."""
    (found,) = [rest for name, rest in instructions() if name == instruction]
    return found


def dashboard_queries() -> list[str]:
    """The queries of all panels, for all servers and a rate interval of ten seconds."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [query.replace("$instance", ".*").replace("$__rate_interval", "10s") for query in found]


def alert_rules() -> list[dict[str, Any]]:
    (group,) = read_yaml("prometheus/alerts.yml")["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def metric_names(query: str) -> set[str]:
    """The names in a query that only metrics can have."""
    return set(re.findall(r"\b(?:vllm|pypto):\w+|\bprocess_\w+|\bup\b", query))
