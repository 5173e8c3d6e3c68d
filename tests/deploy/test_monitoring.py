"""The dashboard and the alerts: every query is answered by a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.files import DEPLOY, alert_rules, dashboard_queries, metric_names, read_yaml
from tests.deploy.vllm_dashboards import expressions
from tests.e2e.server import Server

WAIT_S = 60.0
POLL_S = 0.1
NEEDS = "needs Prometheus on PATH (Debian: apt-get install prometheus)"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=NEEDS)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=NEEDS)


class Scraped:
    """A server, and a Prometheus that scrapes it each second with the configuration of deploy/."""

    def __init__(self, server: Server, prometheus: str) -> None:
        self.server = server
        self._http = httpx.Client(base_url=f"{prometheus}/api/v1/", timeout=WAIT_S)

    def get(self, path: str, **params: str) -> Any:
        answer = self._http.get(path, params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, query: str) -> float:
        """A finite value that a query has, if it has any, else nan."""
        values = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return next(filter(math.isfinite, values), math.nan)

    def ask(self) -> None:
        """Have the model answer something long enough for drafts."""
        chat = {"messages": [{"role": "user", "content": "Count from 1 to 30."}], "seed": time.monotonic_ns()}
        assert self.server.http.post("/v1/chat/completions", json=chat, headers=KEY).status_code == 200
        prompt = {"prompt": "Once", "max_tokens": 2}
        assert self.server.http.post("/v1/completions", json=prompt, headers=KEY).status_code == 200
        assert self.server.http.get("/none", headers=KEY).status_code == 404


KEY = {"Authorization": "Bearer secret"}


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "in vain"
        time.sleep(POLL_S)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "api-key").write_text("secret\n")
    options = ("--spec-method", "ngram", "--kv-memory", "64MiB", "--kv-host-memory", "64MiB")
    with Server(*options, "--api-key-file", folder / "api-key") as server:
        (folder / "prometheus.yml").write_text(configuration(server.ready["port"], folder / "api-key"))
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        files = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
        command = ["prometheus", *files, f"--web.listen-address={address}"]
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
            try:
                until(lambda: is_ready(f"http://{address}", prometheus, folder / "log"))
                yield Scraped(server, f"http://{address}")
            finally:
                prometheus.terminate()


def configuration(port: int, key: Path) -> str:
    """That of deploy/, for a server on `port`, and fast."""
    config = read_yaml("prometheus/prometheus.yml")
    config["global"] = dict.fromkeys(config["global"], "1s")
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(key)
    job["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    return yaml.safe_dump(config)


def is_ready(url: str, prometheus: subprocess.Popen[bytes], log: Path) -> bool:
    assert prometheus.poll() is None, log.read_text()
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.e2e
@needs_prometheus
def test_every_query_of_the_dashboard_has_a_value(scraped: Scraped) -> None:
    assert len(dashboard_queries()) > 50
    assert_answered(scraped, dashboard_queries())


@pytest.mark.e2e
@needs_prometheus
def test_every_query_of_vllms_dashboards_has_a_value(scraped: Scraped) -> None:
    assert_answered(scraped, expressions())


def assert_answered(scraped: Scraped, unanswered: list[str]) -> None:
    def answered() -> bool:
        scraped.ask()
        unanswered[:] = [query for query in unanswered if math.isnan(scraped.value(query))]
        return not unanswered

    try:
        until(answered)
    finally:
        assert unanswered == []


@pytest.mark.e2e
@needs_prometheus
def test_every_alert_can_be_evaluated_and_is_silent(scraped: Scraped) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = scraped.get("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["name"]: (rule["health"], rule["state"]) for rule in rules()} == {
        rule["alert"]: ("ok", "inactive") for rule in alert_rules()
    }


@pytest.mark.e2e
@needs_prometheus
def test_metrics_exist(scraped: Scraped) -> None:
    scraped.ask()
    text = scraped.server.http.get("/metrics", headers=KEY).text
    known = set(re.findall(r"^([\w:]+)(?={| )", text, re.MULTILINE)) | {"up"}
    queries = dashboard_queries() + [rule["expr"] for rule in alert_rules()]
    for query in queries:
        assert metric_names(query) and metric_names(query) <= known, query


@pytest.mark.e2e
@needs_prometheus
def test_the_end_of_a_server_is_noticed(scraped: Scraped) -> None:
    until(lambda: scraped.value("up") == 1)
    assert scraped.server.stop() == 0
    until(lambda: [alert["labels"]["alertname"] for alert in scraped.get("alerts")["alerts"]] == ["PyptoServingDown"])


LABELS = 'instance="a",job="pypto-serving"'
BUSY = {f'pypto:http_responses_total{{{LABELS},status="200"}}': "0+60x60", f"up{{{LABELS}}}": "1+0x60"}
CASES: dict[str, dict[str, str]] = {
    "": {
        f'pypto:engine_ok{{{LABELS},engine="0"}}': "1x10 0x3 1x60",
        f'pypto:worker_respawns_total{{{LABELS},engine="0"}}': "0x10 1x60",
        f'pypto:http_responses_total{{{LABELS},status="500"}}': "0x10 1x60",
        f'pypto:kv_tier_writable{{{LABELS},engine="0",tier="disk"}}': "1x60",
        f'vllm:request_queue_time_seconds_bucket{{{LABELS},le="10"}}': "0+60x60",
        f'vllm:request_queue_time_seconds_bucket{{{LABELS},le="+Inf"}}': "0+60x60",
    },
    "PyptoServingDown": {f"up{{{LABELS}}}": "1x10 0x60"},
    "PyptoServingNoProgress": {f'pypto:engine_ok{{{LABELS},engine="0"}}': "1x10 0x60"},
    "PyptoServingWorkersDie": {f'pypto:worker_respawns_total{{{LABELS},engine="0"}}': "0x10 0+1x60"},
    "PyptoServingErrors": {f'pypto:http_responses_total{{{LABELS},status="500"}}': "0+6x60"},
    "PyptoServingRefuses": {f'pypto:http_responses_total{{{LABELS},status="429"}}': "0+1x60"},
    "PyptoServingQueues": {
        f'vllm:request_queue_time_seconds_bucket{{{LABELS},le="10"}}': "0+1x60",
        f'vllm:request_queue_time_seconds_bucket{{{LABELS},le="20"}}': "0+60x60",
        f'vllm:request_queue_time_seconds_bucket{{{LABELS},le="+Inf"}}': "0+60x60",
    },
    "PyptoServingPreempts": {f'vllm:num_preemptions_total{{{LABELS},engine="0"}}': "0+60x60"},
    "PyptoServingTierFails": {f'pypto:kv_tier_writable{{{LABELS},engine="0",tier="disk"}}': "0x60"},
}
"""Series of an hour, by the alert that fires in the end; none does in the first case."""


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_in_its_case_only(alert: str, tmp_path: Path) -> None:
    series = [{"series": name, "values": values} for name, values in (BUSY | CASES[alert]).items()]
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "45m", "exp_samples": firing}
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert [name for name in CASES if name] == [rule["alert"] for rule in alert_rules()]


def test_the_dashboard_is_laid_out_without_gaps() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    assert {x for x, _ in taken} == set(range(24)) and len(taken) == 24 * len({y for _, y in taken})
