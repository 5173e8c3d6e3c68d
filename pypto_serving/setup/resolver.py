"""Resolve a configuration: decide every value from the user's options, the model and the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from pypto_serving.backend.defaults import BACKEND_DEFAULTS, BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.model.null_models import NULL_MODELS
from pypto_serving.parallel.topology import Placement, Topology
from pypto_serving.setup.catalog import catalog
from pypto_serving.setup.compute import (
    check_cards,
    choose_drafts,
    choose_kernels,
    choose_packed_cache,
    choose_platform,
    choose_precision,
    choose_threads,
    require_torch,
)
from pypto_serving.setup.host import HostFacts, is_loopback
from pypto_serving.setup.kv_cache import check_ports, choose_block_size, choose_events, choose_tiers, endpoint_of
from pypto_serving.setup.kv_shares import MemoryPlan, group_plan
from pypto_serving.setup.memory_planner import MemoryPlanner
from pypto_serving.setup.option_table import DEFAULTS, ENVIRONMENT
from pypto_serving.setup.options import Options, Setting, Settings
from pypto_serving.setup.ranks import RankPlan, choose_placements, choose_topology, num_row_shares, plan_ranks
from pypto_serving.types.config import (
    CacheConfig,
    EngineConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    UnmetError,
    WorkerConfig,
)
from pypto_serving.types.model import ModelSpec, default_model_name
from pypto_serving.types.tier import TierConfig
from pypto_serving.util import format_size, install_extra

_OBJECTS = ("hf_overrides", "override_generation_config", "default_chat_template_kwargs")
"""Options whose values are objects of JSON."""


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved configuration, before anything is loaded.

    engines: one for each data-parallel replica; memory, ranks: of the first replica.
    ranks: parts of the memory plan, if there are several ranks; warnings: lines for the user.
    """

    engines: tuple[EngineConfig, ...]
    server: ServerConfig
    settings: tuple[Setting, ...]
    memory: MemoryPlan
    ranks: tuple[RankPlan, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def engine(self) -> EngineConfig:
        """The configuration of the first replica; the others differ only in placement, folders and addresses."""
        return self.engines[0]


def resolve(
    options: Options, model: ModelSpec, host: HostFacts, defaults: Mapping[str, Any] = DEFAULTS, serves: bool = True
) -> Resolved:
    """Decide every value, without I/O. `defaults`: DEFAULTS of setup/option_table.py, perhaps with changes.

    `serves`: there will be an HTTP server, whose address must not clash with others.

    Raises ConfigError, in one line that names the option to change, for values that cannot work together.
    """
    settings = Settings(options, defaults)
    data_parallel = settings.pick_fixed("data_parallel_size")
    num_replicas = data_parallel // num_row_shares(options)
    machine, host = host, host_share(host, num_replicas)
    name = settings.pick_fixed("backend")
    backend = BACKEND_DEFAULTS[name]
    platform, backend = choose_platform(settings, model, host, backend)
    if backend.cards:
        check_cards(settings, model, host)
    kernels, model = _as_served(settings, model, host, backend)
    topology, model = _over_ranks(settings, model, host, backend, kernels)
    backend = backend.in_stages(topology.pipeline)
    max_num_seqs = settings.pick("max_num_seqs", backend.max_num_seqs, f"default for {name}")
    drafts = choose_drafts(settings, host, backend, topology, kernels)
    processes = Topology() if backend.devices else topology
    planner = MemoryPlanner(options, model, host, backend, max_num_seqs, processes, kernels, drafts)
    memory, model_len = _plan_memory(settings, planner)
    num_threads = choose_threads(settings, model, host)
    tiers = choose_tiers(settings, model, host, backend, planner.host_bytes)
    with _options_named(options):
        engine = EngineConfig(
            model=_model(settings, model, kernels),
            limits=planner.limits(model_len),
            scheduler=_scheduler(settings, name, planner.step_tokens(model_len)),
            cache=_cache(settings, model, memory, tiers, num_replicas),
            parallel=ParallelConfig(
                topology=topology,
                num_threads=num_threads,
                join_address=options.join_address or "",
                join_secret_file=options.join_secret_file or "",
            ),
            worker=WorkerConfig(
                backend=name,
                kernels=kernels,
                ngram=planner.ngram,
                cache_dir=host.cache_dir,
                packed_cache=choose_packed_cache(settings, host, kernels),
                backend_options=_backend_options(platform, host, backend),
            ),
            faults=FaultConfig(**settings.pick_fields(FaultConfig)),
            **settings.pick_fields(EngineConfig),
        )
    placements = choose_placements(settings, processes, num_replicas, machine, num_threads * num_replicas)
    engines = replicate(engine, num_replicas, placements)
    server = _server(settings, model)
    if serves:
        _check_server(settings, engines, server, host)
    return Resolved(
        engines=engines,
        server=server,
        settings=settings.in_order(),
        memory=_with_tiers(memory, model, tiers),
        ranks=() if backend.devices else plan_ranks(engines[0], model, memory, planner.rank_workspace(model_len)),
        warnings=tuple(settings.warnings),
    )


@contextmanager
def _options_named(options: Options) -> Iterator[None]:
    """Turn an UnmetError of a backend's programs into a ConfigError that names the user's option."""
    try:
        yield
    except UnmetError as error:
        raise ConfigError(f"{options.label(error.name)} {error.problem}") from None


def _backend_options(platform: str, host: HostFacts, backend: BackendDefaults) -> dict[str, Any]:
    """Return what the backend must know before it opens a device."""
    if backend.cards:
        return {"capability": host.cards[0].capability}
    return {"platform": platform} if platform else {}


def _as_served(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults
) -> tuple[str, ModelSpec]:
    """Choose the kernels, and return the model with its weights and KV groups in the form that they use."""
    kernels = choose_kernels(settings, model, host) if backend.cpu_kernels else ""
    if kernels == "torch":
        require_torch(settings.options, model, host)
        model = msgspec.structs.replace(model, parts=model.torch_parts)
    elif kernels:
        model = msgspec.structs.replace(model, weight_bytes=model.packed_bytes)
    elif backend.cards:
        model = msgspec.structs.replace(model, weight_bytes=model.card_bytes)
    return kernels, choose_block_size(settings, model, backend)


def _over_ranks(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults, kernels: str
) -> tuple[Topology, ModelSpec]:
    """Choose the ranks, and return the model with the weights of the host whose ranks hold the most bytes."""
    topology = choose_topology(settings, model, host, backend, kernels)
    if topology.num_ranks > 1 and model.parts is not None:
        hosts = map(topology.on_host, range(topology.hosts))
        held = max(sum(map(model.parts.weight_bytes, ranks)) for ranks in hosts)
        model = msgspec.structs.replace(model, weight_bytes=held)
    return topology, model


def _plan_memory(settings: Settings, planner: MemoryPlanner) -> tuple[MemoryPlan, int]:
    """Decide the blocks of each group and the length of the longest sequence."""
    model_len, reason = planner.model_len()
    settings.record("max_model_len", model_len, reason)
    settings.pick("gpu_memory_utilization", False, "default: kv-memory decides")
    settings.warnings += planner.warnings
    memory, reason = planner.plan(model_len)
    settings.record("kv_memory", format_size(memory.kv_bytes), reason)
    return memory, model_len


def _with_tiers(memory: MemoryPlan, model: ModelSpec, tiers: tuple[TierConfig, ...]) -> MemoryPlan:
    """Add the lower tiers whose size we decide."""
    sized = [tier for tier in tiers if tier.tier != "remote"]
    groups = [(group, tier.tier, n) for tier in sized for group, n in zip(model.kv_groups, tier.num_slots, strict=True)]
    lower = tuple(group_plan(*each) for each in groups)
    return msgspec.structs.replace(memory, lower=lower)


def _model(settings: Settings, model: ModelSpec, kernels: str) -> ModelConfig:
    settings.record("dtype", model.dtype, settings.origin_or("dtype", "from the model's files"))
    rounded = choose_precision(settings, model, kernels)
    return ModelConfig(
        path=model.path,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        tokenizer=model.tokenizer,
        hf_overrides=model.hf_overrides,
        **rounded,
    )


def _scheduler(settings: Settings, backend: str, step_tokens: int) -> SchedulerConfig:
    chunked = settings.pick_fixed("chunked_prefill")
    reason = f"default for {backend}" if chunked else "holds a whole prompt, because chunked prefill is off"
    settings.pick("max_num_batched_tokens", step_tokens, reason)
    scheduler = SchedulerConfig(enable_chunked_prefill=chunked, **settings.pick_fields(SchedulerConfig))
    if scheduler.long_prefill_token_threshold and not chunked:
        name, on = "long_prefill_token_threshold", settings.options.giving("chunked_prefill", True)
        problem = f"is {getattr(scheduler, name)}, but chunked prefill is off; drop it or give {on}"
        raise settings.options.refusal(name, problem)
    return scheduler


def _cache(
    settings: Settings, model: ModelSpec, memory: MemoryPlan, tiers: tuple[TierConfig, ...], num_replicas: int
) -> CacheConfig:
    endpoint, replay = choose_events(settings, num_replicas)
    return CacheConfig(
        groups=model.kv_groups,
        num_blocks=tuple(group.num_blocks for group in memory.groups),
        enable_prefix_caching=settings.pick_fixed("prefix_caching"),
        tiers=tiers,
        kv_store=settings.pick_fixed("kv_store"),
        kv_events=endpoint,
        kv_events_replay=replay,
    )


def _server(settings: Settings, model: ModelSpec) -> ServerConfig:
    """Decide the HTTP server's part of the configuration. Raises ConfigError for options that exclude each other."""
    options, origin_or = settings.options, settings.origin_or
    path = options.model or model.path or NULL_MODELS[0]
    settings.record("model", path, origin_or("model", "the default model"))
    settings.pick("revision", "main", "default: the hub's")
    short = options.model if options.model in catalog() else None
    names = options.served_model_name or (short or default_model_name(model.path or path),)
    settings.record("served_model_name", ", ".join(names), origin_or("served_model_name", "the model's name"))
    keys, template = options.api_key or (), options.chat_template
    shown = f"{len(keys)} keys" if len(keys) > 1 else "set" if keys else "none"
    settings.record("api_key", shown, origin_or("api_key", "default: open"))
    origins = options.allowed_origins or ()
    settings.record("allowed_origins", ", ".join(origins) or "none", origin_or("allowed_origins", "default: no others"))
    settings.record("batch_dir", options.batch_dir or "none", origin_or("batch_dir", "default: no batches"))
    settings.record("tokenizer", options.tokenizer or "its own", origin_or("tokenizer", "from the model's files"))
    objects = {name: getattr(options, name) or {} for name in _OBJECTS}
    for name, value in objects.items():
        settings.record(
            name, json.dumps(value) if value else "none", origin_or(name, "default: as the model's files say")
        )
    settings.record("chat_template", template or "its own", origin_or("chat_template", "from the model's files"))
    for name in ("host", "port"):
        if options.uds and getattr(options, name) is not None:
            raise ConfigError(f"{options.label(name)} and {options.label('uds')} are both given; drop one")
    if options.ssl_keyfile and not options.ssl_certfile:
        raise ConfigError(f"{options.label('ssl_keyfile')} needs {options.label('ssl_certfile', beside='ssl_keyfile')}")
    return ServerConfig(
        served_model_names=names,
        api_keys=keys,
        api_key_file=options.api_key_file,
        allowed_origins=origins,
        batch_dir=options.batch_dir,
        chat_template=template,
        tokenizer=model.tokenizer,
        override_generation_config=objects["override_generation_config"],
        default_chat_template_kwargs=objects["default_chat_template_kwargs"],
        **settings.pick_fields(ServerConfig),
    )


def _check_server(settings: Settings, engines: Sequence[EngineConfig], server: ServerConfig, host: HostFacts) -> None:
    """Refuse ports that are used twice and traces without their package; warn of a server open to other machines."""
    options = settings.options
    if options.otlp_traces_endpoint is not None and not host.otel:
        problem = f"but OpenTelemetry is not installed; drop it, or {install_extra('otel')}"
        raise options.refusal("otlp_traces_endpoint", f"is {options.otlp_traces_endpoint}, {problem}")
    for engine in engines:
        if not server.uds:
            check_ports(options, engine, server)
    if not (server.api_keys or server.uds or is_loopback(server.host)):
        settings.warnings.append(
            f"{options.label('host')} is {server.host} and there is no API key, so whoever reaches this machine may "
            f"use the server: give {options.label('api_key', beside='host')}, or set {ENVIRONMENT['api_key']}"
        )


def host_share(host: HostFacts, count: int) -> HostFacts:
    """Return the part of the machine for each of `count` replicas, with the nodes of the first."""
    return msgspec.structs.replace(
        host,
        num_replicas=count,
        available_bytes=host.available_bytes // count,
        num_cpus=max(1, host.num_cpus // count),
        nodes=host.nodes[: max(1, len(host.nodes) // count)],
    )


def replicate(engine: EngineConfig, count: int, placements: Sequence[Placement]) -> tuple[EngineConfig, ...]:
    """Return the configuration of each replica. `placements` has the ranks of all replicas."""
    ranks = len(placements) // count
    return tuple(
        msgspec.structs.replace(
            engine,
            cache=_own_cache(engine.cache, index),
            parallel=msgspec.structs.replace(
                engine.parallel, replica=index, placements=tuple(placements[index * ranks : (index + 1) * ranks])
            ),
        )
        for index in range(count)
    )


def _own_cache(cache: CacheConfig, index: int) -> CacheConfig:
    """Give replica `index` its own endpoints and folders."""
    return msgspec.structs.replace(
        cache,
        tiers=tuple(_own(tier, index) for tier in cache.tiers),
        kv_events=endpoint_of(cache.kv_events, index),
        kv_events_replay=endpoint_of(cache.kv_events_replay, index),
    )


def _own(tier: TierConfig, index: int) -> TierConfig:
    """Give replica `index` its own folder, since only one process may write to it; the first uses the given one."""
    if tier.tier != "disk" or index == 0:
        return tier
    return msgspec.structs.replace(tier, place=f"{tier.place}/replica-{index}")
