"""docs/reference.md names every option of `serve` and every endpoint, and no others."""

from __future__ import annotations

import re

import typer

from pypto_serving.api.routes import BATCH_ROUTES, ROUTES
from pypto_serving.cli.app import app
from tests.docs.documents import text_of


def section(title: str) -> str:
    return text_of("docs/reference.md").split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_option_of_a_server_is_listed() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [each.opts[0] for each in command.params if each.param_type_name == "option" and not each.hidden]
    rows = "".join(line for line in section("Options").splitlines() if line.startswith("| "))
    assert sorted(re.findall(r"`(--[\w-]+)`", rows)) == sorted(set(options) - {"--config"})


def test_every_endpoint_is_listed() -> None:
    listed = set(re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", section("Endpoints")))
    assert listed == {route.path.replace(":path", "") for route in (*ROUTES, *BATCH_ROUTES)} | {"/openapi.json"}
