"""Messages about values of a configuration file name the file's key, never the flag."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.cli import main
from pypto_serving.cli.serve import check_address
from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import make_options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.types.kv import KVCacheGroupSpec
from tests.setup.small import FULL, WINDOW, WITH_KERNELS, make_model

NO_TORCH = msgspec.structs.replace(WITH_KERNELS, torch=False)
POOL = "mooncake://a:1"


def resolved(host: HostFacts = WITH_KERNELS, model: dict[str, Any] | None = None, /, **values: Any) -> Resolved:
    return resolve(make_options({}, values, "serve.yaml"), make_model(**(model or {})), host)


def test_an_address_that_cannot_be() -> None:
    for host in ("256.0.0.1", "192.0.2.1"):
        options = make_options({}, {"host": host}, "serve.yaml")
        with pytest.raises(ConfigError, match=rf"^host in serve.yaml {host} is no address of this machine"):
            check_address(options, resolved(host=host).server)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port in serve.yaml {port} on 127.0.0.1 cannot be used"):
            check_address(make_options({}, {"port": port}, "serve.yaml"), resolved(port=port).server)


@pytest.mark.parametrize(
    ("groups", "values", "start"),
    [
        ((FULL, WINDOW), {}, "kv-remote in serve.yaml moves blocks of 256 KiB"),
        ((FULL,), {"block_size": 16}, "block-size in serve.yaml 16 makes blocks of 8 KiB; kv-remote in serve.yaml"),
    ],
)
def test_blocks_that_a_remote_store_moves_slowly(
    groups: tuple[KVCacheGroupSpec, ...], values: dict[str, Any], start: str
) -> None:
    options = make_options({}, {"kv_remote": POOL, **values}, "serve.yaml")
    (warning,) = resolve(options, make_model(groups), WITH_KERNELS).warnings
    assert warning.startswith(start) and "--" not in warning


@pytest.mark.parametrize(
    ("values", "reason", "key"),
    [
        ({"dtype": "float32"}, "the kernels serve bfloat16 only, not float32", "dtype"),
        (
            {"block_size": 16},
            "the kernels need blocks of a multiple of 32 tokens, not 16",
            "block-size",
        ),
    ],
)
def test_what_the_kernels_refuse(
    values: dict[str, Any], reason: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model says why; only setup knows where the value came from."""
    path = tmp_path / "serve.yaml"
    path.write_text("kernels: portable\n" + "".join(f"{key}: {value}\n" for key, value in values.items()))
    assert main(["check", "--config", str(path)]) == 2
    line = f"kernels in serve.yaml is portable, but {reason} (see {key} in serve.yaml); change that"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "values", "line"),
    [
        ({"needs_torch": ""}, {"kernels": "torch"}, "kernels in serve.yaml is torch, but torch is not installed"),
        (
            {"dtype": "float32", "needs_torch": "odd", "needs_torch_option": "dtype"},
            {"dtype": "float32"},
            "dtype in serve.yaml is float32, which needs torch, and torch is not installed; give bfloat16",
        ),
        ({"needs_torch": "odd", "needs_torch_option": "block_size"}, {"block_size": 16}, "odd (see block-size in serv"),
    ],
)
def test_what_needs_torch(model: dict[str, Any], values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(NO_TORCH, model, **values)
    assert str(caught.value).startswith(line) and "--" not in str(caught.value)
