"""The flags that commands share, in one table, grouped by help panel; their values meet in `Options`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import make_options

MODEL, SERVER, BATCHING, KV, DEVICE = "Model", "Server", "Batching", "KV cache", "Device and process"
ENGINE_PANELS = (MODEL, BATCHING, KV, DEVICE)
ALL_PANELS = (MODEL, SERVER, BATCHING, KV, DEVICE)


class Flag(NamedTuple):
    """One flag: the name of a value in Options. Values are text here; Options parses and checks them."""

    name: str
    panel: str
    metavar: str
    help: str
    alias: str = ""


FLAGS = (
    Flag("model", MODEL, "MODEL", "The same as the argument MODEL."),
    Flag("served_model_name", MODEL, "NAME", "Name that clients use; may repeat. (default: the model's name)"),
    Flag("chat_template", MODEL, "FILE", "Jinja file instead of the model's own chat template."),
    Flag("dtype", MODEL, "DTYPE", "auto, float32 or bfloat16. (default: auto)"),
    Flag("max_model_len", MODEL, "TOKENS", "Longest prompt plus output. (default: the longest that fits)"),
    Flag("seed", MODEL, "N", "Seed of requests that bring none. (default: 0)"),
    Flag("host", SERVER, "HOST", "Address to listen on. (default: 127.0.0.1)"),
    Flag("port", SERVER, "PORT", "Port to listen on; 0 takes a free one. (default: 8000)"),
    Flag("api_key", SERVER, "KEY", "Key that clients must send; --api-key-file keeps it out of the process list."),
    Flag("max_queued_requests", SERVER, "N", "Requests that may wait; more are refused. (default: 4096)"),
    Flag("drain_timeout", SERVER, "SECONDS", "Time to finish what runs when told to stop. (default: 30)"),
    Flag("log_requests", SERVER, "", "Log one line per request. (default: off)"),
    Flag("max_num_seqs", BATCHING, "N", "Most requests in one step. (default: 256)"),
    Flag("max_num_batched_tokens", BATCHING, "TOKENS", "Token budget of one step. (default: 512 on CPU)"),
    Flag(
        "long_prefill_token_threshold",
        BATCHING,
        "TOKENS",
        "Most prompt tokens of one request in one step; 0 is no limit. (default: 0)",
    ),
    Flag("chunked_prefill", BATCHING, "", "Let a prompt spread over several steps. (default: on)"),
    Flag(
        "kv_memory", KV, "SIZE", "2GiB, bytes, or a share of free memory such as 0.3. (default: half of what is free)"
    ),
    Flag(
        "block_size",
        KV,
        "TOKENS",
        "Tokens per KV block, a power of two; the CPU kernels need at least 32. (default: 32; with --kv-remote as many "
        "as make 256 KiB)",
    ),
    Flag("prefix_caching", KV, "", "Reuse the KV of prompts that begin alike. (default: on)"),
    Flag(
        "kv_host_memory",
        KV,
        "SIZE",
        "Keep KV blocks that leave the device in host memory too: 2GiB, or 0.3 of what is free. (default: off)",
    ),
    Flag("kv_disk", KV, "DIR", "Keep KV blocks on disk too, also for later starts. (default: off)"),
    Flag("kv_disk_size", KV, "SIZE", "Size that blocks in DIR may take. (default: 16GiB)"),
    Flag("kv_remote", KV, "URL", "Keep KV blocks in a store that replicas share: mooncake://HOST:PORT. (default: off)"),
    Flag(
        "kv_store",
        KV,
        "WHEN",
        "When blocks go to those: through, once nobody uses them, or eviction, when the device is about to need their "
        "place. (default: through)",
    ),
    Flag(
        "kv_events",
        KV,
        "ENDPOINT",
        "Tell routers what the cache holds, in vLLM's format, at a ZeroMQ endpoint such as tcp://127.0.0.1:5557. "
        "(default: off)",
    ),
    Flag("kv_events_replay", KV, "ENDPOINT", "Where routers ask for events they missed. (default: the next port)"),
    Flag("backend", DEVICE, "NAME", "cpu, or null (no model, for tests). (default: cpu)", "--device"),
    Flag(
        "kernels",
        DEVICE,
        "NAME",
        "Instruction set of the CPU kernels: avx512_bf16, avx512, avx2 or portable; or torch, without kernels. "
        "(default: auto, the best there is)",
    ),
    Flag(
        "packed_cache",
        DEVICE,
        "",
        "Keep the weights as packed for the CPU kernels in ~/.cache/pypto-serving, for later starts. (default: off)",
    ),
    Flag("num_threads", DEVICE, "N", "Threads that compute. (default: one per CPU, fewer for small models)"),
    Flag("step_timeout", DEVICE, "SECONDS", "A step longer than this is a fault. (default: 120)"),
    Flag("log_level", DEVICE, "LEVEL", "debug, info, warning, error or critical. (default: info)"),
)
SWITCHES = {"log_requests", "chunked_prefill", "prefix_caching", "packed_cache"}
LISTS = {"served_model_name"}

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder or hub name of a checkpoint. (default: the bundled one)"),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML or JSON with these options; flags win.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File that holds the API key.", rich_help_panel=SERVER),
]


def takes_options(*panels: str, model_argument: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `panels`; it receives their values as one `options: Options`."""
    parameters = list(_parameters(panels, model_argument))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            shared = {p.name: values.pop(p.name) for p in parameters}
            command(options=_make(shared), **values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "options"]
        run.__signature__ = inspect.Signature([*parameters, *kept])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*parameters, *kept)}
        return run

    return decorate


def _parameters(panels: Iterable[str], model_argument: bool) -> Iterable[inspect.Parameter]:
    def parameter(name: str, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    if model_argument:
        yield parameter("model_argument", ModelArgument)
    yield parameter("config", ConfigFile)
    for flag in FLAGS:
        if flag.panel in panels:
            yield parameter(flag.name, _annotation(flag))
    if SERVER in panels:
        yield parameter("api_key_file", KeyFile)


def _annotation(flag: Flag) -> Any:
    name = "--" + flag.name.replace("_", "-")
    if flag.name in SWITCHES:
        switch = typer.Option(f"{name}/--no-{name[2:]}", help=flag.help, rich_help_panel=flag.panel)
        return Annotated[bool | None, switch]
    kind = list[str] | None if flag.name in LISTS else str | None
    names = (name, flag.alias) if flag.alias else (name,)
    return Annotated[kind, typer.Option(*names, metavar=flag.metavar, help=flag.help, rich_help_panel=flag.panel)]


def _make(values: dict[str, Any]) -> Any:
    argument = values.pop("model_argument", None)
    config, key_file = values.pop("config", None), values.pop("api_key_file", None)
    if argument is not None:
        if values.get("model") not in (None, argument):
            raise ConfigError(f"MODEL is {argument}, but --model is {values['model']}; give one of them")
        values["model"] = argument
    if key_file is not None:
        if values.get("api_key") is not None:
            raise ConfigError("--api-key and --api-key-file are both given; drop one")
        values["api_key"] = _read_text(key_file, "--api-key-file").strip()
    given = {name: value for name, value in values.items() if value is not None and value != []}
    return make_options(given, _read_config_values(config), config.name if config else "")


def _read_config_values(config: Path | None) -> dict[str, Any] | None:
    """What a configuration file gives, with the key that its `api-key-file` names."""
    if config is None:
        return None
    values = read_config(config)
    for name in ("api-key-file", "api_key_file"):
        if name in values:
            values["api-key"] = _read_text(Path(str(values.pop(name))), f"{name} in {config.name}").strip()
    return values


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; raises ConfigError, in one line."""
    import yaml

    text = _read_text(path, "--config")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"--config {path}{place} is neither YAML nor JSON; mend it") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} holds a {type(values).__name__}, but must hold `option: value` pairs")
    return values


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from None
