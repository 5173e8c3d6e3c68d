"""Messages name an option as the user gave it: by its key in the configuration file, its flag or its argument."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pypto_serving.cli import main
from pypto_serving.cli.serve import check_address
from pypto_serving.errors import ConfigError
from pypto_serving.offline.llm import LLM
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
        with pytest.raises(ConfigError, match=rf"^host in serve.yaml {host} is not an address of this machine"):
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


ADVICE: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    (
        {},
        {"kv_disk_size": "1GiB"},
        "kv-disk-size in serve.yaml needs a folder; give kv-disk in serve.yaml too, or drop it",
        "--kv-disk-size needs a folder; give --kv-disk too, or drop it",
        "kv_disk_size needs a folder; give kv_disk too, or drop it",
    ),
    (
        {},
        {"kv_events_replay": "tcp://a:1"},
        "kv-events-replay in serve.yaml needs kv-events in serve.yaml; give it",
        "--kv-events-replay needs --kv-events; give it",
        "kv_events_replay needs kv_events; give it",
    ),
    (
        {},
        {"kv_events": "tcp://a:1", "prefix_caching": False},
        "kv-events in serve.yaml shows what the prefix cache holds, which is off; drop it or prefix-caching: false in ",
        "--kv-events shows what the prefix cache holds, which is off; drop it or --no-prefix-caching",
        "kv_events shows what the prefix cache holds, which is off; drop it or prefix_caching=False",
    ),
    (
        {},
        {"kv_events": "tcp://a:65535"},
        "so give kv-events-replay in serve.yaml as well",
        "so give --kv-events-replay as well",
        "so give kv_events_replay as well",
    ),
    (
        {},
        {"kv_host_memory": "1GiB", "prefix_caching": False},
        "drop kv-host-memory in serve.yaml, or drop prefix-caching: false in serve.yaml",
        "drop --kv-host-memory, or drop --no-prefix-caching",
        "drop kv_host_memory, or drop prefix_caching=False",
    ),
    (
        {},
        {"long_prefill_token_threshold": 8, "chunked_prefill": False},
        "drop it or give chunked-prefill: true in serve.yaml",
        "drop it or give --chunked-prefill",
        "drop it or give chunked_prefill=True",
    ),
    (
        {},
        {"max_num_batched_tokens": 512, "max_model_len": 600, "chunked_prefill": False},
        "give at least 600, or chunked-prefill: true in serve.yaml",
        "give at least 600, or --chunked-prefill",
        "give at least 600, or chunked_prefill=True",
    ),
    (
        {},
        {"kv_memory": "1MiB", "max_model_len": 4000},
        "give max-model-len: 2032 or less in serve.yaml or kv-memory: 2008KiB or more in serve.yaml",
        "give --max-model-len 2032 or less or --kv-memory 2008KiB or more",
        "give max_model_len=2032 or less or kv_memory=2008KiB or more",
    ),
    (
        {"weight_bytes": 20 << 30, "dtype": "float32"},
        {"seed": 1},
        "give dtype: bfloat16 in serve.yaml, choose a smaller model in serve.yaml, or free memory",
        "give --dtype bfloat16, choose a smaller MODEL, or free memory",
        "give dtype=bfloat16, choose a smaller model, or free memory",
    ),
]


@pytest.mark.parametrize(("model", "values", "in_file", "by_flag", "by_argument"), ADVICE)
def test_advice_names_options_as_the_user_gives_them(
    model: dict[str, Any], values: dict[str, Any], in_file: str, by_flag: str, by_argument: str
) -> None:
    spec = make_model(**model)
    for options, message in (
        (make_options({}, values, "serve.yaml"), in_file),
        (make_options(values), by_flag),
        (make_options(values, as_arguments=True), by_argument),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(options, spec, WITH_KERNELS)
        assert message in str(caught.value)
        assert ("--" in str(caught.value)) == (message == by_flag)


def test_advice_about_a_flag_beside_a_file_is_a_flag() -> None:
    options = make_options({"kv_disk_size": "1GiB"}, {"port": 1}, "serve.yaml")
    with pytest.raises(ConfigError, match=r"^--kv-disk-size needs a folder; give --kv-disk too, or drop it$"):
        resolve(options, make_model(), WITH_KERNELS)


def test_arguments_of_the_offline_api_are_named_as_arguments() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seqs is 0, but must be a whole number from 1"):
        LLM(max_num_seqs=0)
    with pytest.raises(ConfigError, match=r"^max_model_len is a value of type int, but must be a whole number from 2"):
        LLM(max_model_len=10**5000)
    with pytest.raises(ConfigError, match=r"^unknown option 'max_num_seq'; did you mean max_num_seqs\?$"):
        LLM(max_num_seq=1)
    with pytest.raises(ConfigError, match=r"^max-model-len and max_model_len are the same option; keep one$"):
        LLM(**{"max-model-len": 64, "max_model_len": 128})
    with pytest.raises(ConfigError, match=r"did you mean prefix_caching=False\?$"):
        LLM(no_prefix_caching=True)
    with pytest.raises(ConfigError, match=r"^LLM starts no server; leave out host and port, which only a"):
        LLM(host="0.0.0.0", port=8000)
    with pytest.raises(ConfigError, match=r"^LLM starts no server; leave out api_key, which only a server"):
        LLM(**{"api-key": 12345})
    with pytest.raises(
        ConfigError, match=r"known are: model, chat_template, tool_call_parser, (?!.*\b(port|trust_request)\b)"
    ):
        LLM(zzz=1)
    with pytest.raises(ConfigError, match=r"^kv_disk_size needs a folder; give kv_disk too, or drop it$"):
        LLM("plain", backend="null", kv_disk_size="1GiB")
