"""The flags that commands share, in one table by help panel. Their values make `Options`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.errors import ConfigError
from pypto_serving.setup.blocks import REMOTE_BLOCK_BYTES
from pypto_serving.setup.defaults import DEFAULTS, shown_default
from pypto_serving.setup.options import ENVIRONMENT, KEY_FILE, flag, make_options
from pypto_serving.setup.rules import (
    KERNELS,
    LOG_LEVELS,
    REASONING_PARSERS,
    RULES,
    TOOL_CALL_PARSERS,
    ChoiceRule,
)
from pypto_serving.setup.text_file import read_keys
from pypto_serving.types.hosts import SECRET_VARIABLE
from pypto_serving.util import format_size, one_of

MODEL, SERVER, BATCHING, KV, DEVICE = "Model", "Server", "Batching", "KV cache", "Device and process"
ENGINE_PANELS = (MODEL, BATCHING, KV, DEVICE)
ALL_PANELS = (MODEL, SERVER, BATCHING, KV, DEVICE)


class Flag(NamedTuple):
    """One flag. Values are text here; Options parses and checks them.

    name: the value in Options.
    help: the help text, without the default.
    default: the default as people read it; empty for the fixed default of setup/defaults.py.
    """

    name: str
    panel: str
    metavar: str
    help: str
    default: str = ""
    alias: str = ""

    @property
    def help_text(self) -> str:
        """Return the help text with the default."""
        return f"{self.help} (default: {self.default or shown_default(self.name)})"


_CPU = BACKEND_DEFAULTS["cpu"]
FLAGS = (
    Flag("model", MODEL, "MODEL", "The same as the argument MODEL.", "the bundled one"),
    Flag("chat_template", MODEL, "FILE", "Jinja file that replaces the model's own chat template.", "the model's own"),
    Flag(
        "tool_call_parser",
        MODEL,
        "NAME",
        f"How the model writes tool calls: {one_of(TOOL_CALL_PARSERS[1:])}.",
        "auto, by the chat template",
    ),
    Flag(
        "reasoning_parser",
        MODEL,
        "NAME",
        f"How the model marks its reasoning: {one_of(REASONING_PARSERS[1:])}.",
        "auto, by the chat template",
    ),
    Flag("dtype", MODEL, "DTYPE", "auto, float32 or bfloat16."),
    Flag(
        "activations",
        MODEL,
        "FORM",
        "What 4-bit weights are multiplied by: int8, with a scale per 128 inputs, or bf16, slower and closer.",
        "int8",
    ),
    Flag(
        "head", MODEL, "FORM", "int8 rounds an output layer of bf16, which halves its bytes.", "auto, as it is stored"
    ),
    Flag("max_model_len", MODEL, "TOKENS", "Maximum length of prompt plus output.", "the longest that fits"),
    Flag("seed", MODEL, "N", "Seed of requests that bring none."),
    Flag("served_model_name", SERVER, "NAME", "Name that requests use; may repeat.", "the model's name"),
    Flag("host", SERVER, "HOST", "Address to listen on."),
    Flag("port", SERVER, "PORT", "Port to listen on; 0 takes a free one."),
    Flag("uds", SERVER, "PATH", "Unix socket to listen on, in place of host and port."),
    Flag("ssl_certfile", SERVER, "FILE", "Certificate, to serve HTTPS; SIGHUP reads it again."),
    Flag(
        "ssl_keyfile",
        SERVER,
        "FILE",
        "Its private key, without a password; not needed if the certificate's file has it.",
    ),
    Flag(
        "api_key",
        SERVER,
        "KEY",
        f"Key that clients may send; may repeat; --api-key-file or {ENVIRONMENT['api_key']} keeps it out of the "
        "process list.",
        "none",
    ),
    Flag(
        "allowed_origins",
        SERVER,
        "URL",
        "Origin whose web pages may call the server from a browser, as in http://localhost:3000; may repeat; * is any.",
        "none",
    ),
    Flag("max_queued_requests", SERVER, "N", "Maximum requests that wait for a row; more are refused."),
    Flag("max_queued_tokens", SERVER, "TOKENS", "Maximum prompt tokens that wait or are prefilled; 0 is no limit."),
    Flag("max_body_bytes", SERVER, "SIZE", "Largest body of a request, such as 64MiB."),
    Flag("batch_dir", SERVER, "DIR", "Serve /v1/files and /v1/batches, kept in this folder.", "none"),
    Flag("drain_timeout", SERVER, "SECONDS", "Time to finish admitted requests when told to stop."),
    Flag("access_log", SERVER, "", "Log one line per HTTP answer."),
    Flag(
        "log_requests",
        SERVER,
        "",
        "Log one line per request for tokens when it ends: its tokens, its times and why it ended.",
        alias="--enable-log-requests",
    ),
    Flag("max_log_len", SERVER, "CHARS", "Characters of each prompt in that line; 0 leaves prompts out."),
    Flag(
        "otlp_traces_endpoint",
        SERVER,
        "URL",
        "Where OpenTelemetry traces are sent, by gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is http/protobuf.",
    ),
    Flag("client_priority", SERVER, "", "Let requests choose their priority."),
    Flag("trust_request_chat_template", SERVER, "", "Let requests bring a chat template."),
    Flag("max_num_seqs", BATCHING, "N", "Maximum requests in one step.", str(_CPU.max_num_seqs)),
    Flag("max_num_batched_tokens", BATCHING, "TOKENS", "Token budget of one step.", str(_CPU.max_num_batched_tokens)),
    Flag(
        "long_prefill_token_threshold",
        BATCHING,
        "TOKENS",
        "Maximum prompt tokens of one request in one step; 0 is no limit.",
    ),
    Flag("chunked_prefill", BATCHING, "", "Let a prompt spread over several steps."),
    Flag(
        "speculative_config",
        BATCHING,
        "JSON",
        """How drafts are made, with vLLM's keys: {"method": "ngram", "num_speculative_tokens": 4}.""",
    ),
    Flag(
        "spec_method",
        BATCHING,
        "NAME",
        "Guess next tokens, and verify several in one step: ngram takes what followed the last tokens before, mtp asks "
        "the model's draft layer.",
    ),
    Flag("spec_tokens", BATCHING, "N", "Maximum drafts of a request in one step."),
    Flag("fair_scheduling", BATCHING, "", "Start requests by the tokens their cache_salt got, not by arrival."),
    Flag(
        "kv_dtype",
        KV,
        "FORM",
        "bf16, or int8, with a scale per token and head: half the memory.",
        "auto, as the model computes",
    ),
    Flag("kv_memory", KV, "SIZE", "2GiB, bytes, or a share of free memory such as 0.3.", "half of what is free"),
    Flag(
        "block_size",
        KV,
        "TOKENS",
        "Tokens per KV block, a power of two; the CPU kernels need at least 32.",
        f"{DEFAULTS['block_size']}; with --kv-remote as many as make {format_size(REMOTE_BLOCK_BYTES)}",
    ),
    Flag("prefix_caching", KV, "", "Reuse the KV of prompts that begin alike."),
    Flag(
        "kv_host_memory",
        KV,
        "SIZE",
        "Also keep KV blocks that leave the device in host memory: 2GiB, or 0.3 of what is free.",
    ),
    Flag("kv_disk", KV, "DIR", "Also keep KV blocks on disk, for later starts too."),
    Flag("kv_disk_size", KV, "SIZE", "Maximum size of the blocks in DIR."),
    Flag("kv_remote", KV, "URL", "Also keep KV blocks in a store that replicas share: mooncake://HOST:PORT."),
    Flag(
        "kv_store",
        KV,
        "WHEN",
        "When blocks go to these tiers: through, once no request uses them, or eviction, when the device is about to "
        "need their place.",
    ),
    Flag(
        "kv_events",
        KV,
        "ENDPOINT",
        "Publish the content of the cache for routers, in vLLM's format, at a ZeroMQ endpoint such as "
        "tcp://127.0.0.1:5557.",
    ),
    Flag("kv_events_replay", KV, "ENDPOINT", "Where routers ask for events that they missed.", "the next port"),
    Flag("backend", DEVICE, "NAME", f"{one_of([*BACKEND_DEFAULTS])} (no model, for tests).", alias="--device"),
    Flag(
        "npu_platform",
        DEVICE,
        "NAME",
        f"What the npu backend runs on: {one_of(BACKEND_DEFAULTS['npu'].platforms)}.",
        "a2a3 with an Ascend device, else its simulator",
    ),
    Flag(
        "kernels",
        DEVICE,
        "NAME",
        f"Instruction set of the CPU kernels: {one_of(KERNELS[1:-1])}; or {KERNELS[-1]}, without kernels.",
        "auto, the best this machine runs",
    ),
    Flag(
        "packed_cache",
        DEVICE,
        "",
        "Keep the weights as packed for the CPU kernels in ~/.cache/pypto-serving, for later starts.",
    ),
    Flag("num_threads", DEVICE, "N", "Threads that compute.", "one per CPU, fewer for small models"),
    Flag(
        "data_parallel_size",
        DEVICE,
        "N",
        "Replicas of the model; with --ep, ranks that share experts and split rows.",
        alias="--dp",
    ),
    Flag(
        "tensor_parallel_size",
        DEVICE,
        "N",
        "Processes that split each layer; auto: one per NUMA node.",
        alias="--tp",
    ),
    Flag("pipeline_parallel_size", DEVICE, "N", "Stages of processes that split the layers.", alias="--pp"),
    Flag(
        "expert_parallel_size",
        DEVICE,
        "N",
        "Groups of the tensor- or data-parallel processes that split experts.",
        alias="--ep",
    ),
    Flag(
        "join_address",
        DEVICE,
        "HOST:PORT",
        "Where another host joins with `pypto-serving join`, for half of the ranks.",
    ),
    Flag("join_secret_file", DEVICE, "FILE", "Secret that both hosts know.", SECRET_VARIABLE),
    Flag("step_timeout", DEVICE, "SECONDS", "A step that takes longer is a fault."),
    Flag("log_level", DEVICE, "LEVEL", f"{one_of(LOG_LEVELS)}."),
    Flag("log_format", DEVICE, "FORM", "text, or json: one object on each line, also of cores and workers."),
)
SWITCHES = {
    "access_log",
    "log_requests",
    "client_priority",
    "trust_request_chat_template",
    "chunked_prefill",
    "fair_scheduling",
    "prefix_caching",
    "packed_cache",
}
OPT_INS = {"trust_request_chat_template"}
"""Switches whose flag only turns them on; help has no room for more."""
LISTS = {"served_model_name", "allowed_origins", "api_key"}

CHECKPOINT = "Folder or hub name of a checkpoint."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{CHECKPOINT} (default: the bundled one)")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML or JSON with these options; flags win.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with an API key on each line; SIGHUP reads it again.", rich_help_panel=SERVER
    ),
]


def takes_options(
    *panels: str, also: Sequence[str] = (), model_argument: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `panels` and the options `also`; it receives their values as `options: Options`."""
    parameters = list(_parameters(panels, also, model_argument))

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


def _parameters(panels: Iterable[str], also: Sequence[str], model_argument: bool) -> Iterable[inspect.Parameter]:
    def parameter(name: str, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    if model_argument:
        yield parameter("model_argument", ModelArgument)
    yield parameter("config", ConfigFile)
    for entry in FLAGS:
        if entry.panel in panels or entry.name in also:
            alone = entry.name == "model" and not model_argument
            yield parameter(entry.name, _annotation(entry._replace(help=CHECKPOINT) if alone else entry))
    if SERVER in panels:
        yield parameter(KEY_FILE, KeyFile)


def _annotation(entry: Flag) -> Any:
    name = "--" + flag(entry.name)
    shown: dict[str, Any] = {"help": entry.help_text, "rich_help_panel": entry.panel}
    if entry.name in SWITCHES:
        off = "" if entry.name in OPT_INS else f"/--no-{name[2:]}"
        return Annotated[bool | None, typer.Option(*filter(None, (name + off, entry.alias)), **shown)]
    rule = RULES[entry.name]
    if isinstance(rule, ChoiceRule):
        shown["autocompletion"] = _completion(rule.names)
    kind = list[str] | None if entry.name in LISTS else str | None
    names = (name, entry.alias) if entry.alias else (name,)
    return Annotated[kind, typer.Option(*names, metavar=entry.metavar, **shown)]


def _completion(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Make the function that lists what shells offer for an unfinished value."""

    def beginning_with(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return beginning_with


def _make(values: dict[str, Any]) -> Any:
    argument = values.pop("model_argument", None)
    config, key_file = values.pop("config", None), values.pop(KEY_FILE, None)
    if argument is not None:
        if values.get("model") not in (None, argument):
            raise ConfigError(f"MODEL is {argument}, but --model is {values['model']}; give one of them")
        values["model"] = argument
    given = {name: value for name, value in values.items() if value is not None and value != []}
    if key_file is not None:
        if "api_key" in given:
            raise ConfigError("--api-key and --api-key-file are both given; drop one")
        given |= {"api_key": read_keys(key_file, "--api-key-file"), KEY_FILE: str(key_file)}
    environment = os.environ if "api_key" in values else None  # commands that start no server need no key
    if config is None:
        return make_options(given, environment=environment)
    from pypto_serving.cli.config_file import read_config  # yaml takes time to import

    return make_options(given, read_config(config), config.name, environment=environment)
