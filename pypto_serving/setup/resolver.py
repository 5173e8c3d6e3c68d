"""The resolver: the only place where defaults are decided."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from pypto_serving.errors import ConfigError, ModelError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.memory import BackendDefaults, MemoryPlan, MemoryPlanner, plan_tier, tier_slots
from pypto_serving.setup.options import Options, flag
from pypto_serving.setup.rules import MAX_PORT, RULES
from pypto_serving.setup.without_torch import require_torch
from pypto_serving.types.config import EngineConfig, FaultConfig, ServerConfig
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.model import ModelSpec, default_model_name
from pypto_serving.types.tier import INDEX_BYTES, Tier, TierConfig
from pypto_serving.util import format_size


class Setting(msgspec.Struct, frozen=True):
    """One decided value and why it is so, for people to read."""

    name: str
    value: str | int | float | bool
    reason: str


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Everything decided from the files, before anything is loaded. `warnings` are lines for the user."""

    engine: EngineConfig
    server: ServerConfig
    settings: tuple[Setting, ...]
    memory: MemoryPlan
    warnings: tuple[str, ...] = ()


def resolve(options: Options, model: ModelSpec, host: HostFacts) -> Resolved:
    """Decide every value from what the user gave, the model and the machine; does no I/O.

    Raises ConfigError, in one line that names the option to change, for values that cannot work together.
    """
    return _Resolver(options, model, host).resolve()


DISK_BYTES = 16 << 30
MAX_SLOTS = 1 << 22
"""Of one group in one tier; a disk keeps 64 bytes in memory for each."""
REMOTE_BYTES, REMOTE_BLOCKS = 1 << 40, 1 << 16
"""What the engine core remembers of a remote store, which has a size of its own."""
REMOTE_BLOCK_BYTES = 256 << 10
"""Blocks of this size and more move at full speed to and from a remote store."""
LARGEST_BLOCK = 1024
"""Tokens of the largest block that is chosen without being asked for."""
WEIGHT_BYTES_PER_THREAD = 32 << 20
BACKEND_DEFAULTS = {"cpu": BackendDefaults(depth=2), "null": BackendDefaults(simulated=True)}


class _Resolver:
    """Decides one configuration; `settings` and `warnings` grow as values are picked."""

    def __init__(self, options: Options, model: ModelSpec, host: HostFacts) -> None:
        self.options = options
        self.model = model
        self.host = host
        self.settings: list[Setting] = []
        self.warnings: list[str] = []

    def resolve(self) -> Resolved:
        if self.model.obstacle:
            raise ModelError(f"{self.model.path} cannot be served: {self.model.obstacle}")
        backend = self.pick("backend", "cpu", "default")
        defaults = BACKEND_DEFAULTS[backend]
        kernels = self._kernels() if backend == "cpu" else ""
        self._pick_block_size()
        max_num_seqs = self.pick("max_num_seqs", defaults.max_num_seqs, f"default for {backend}")
        planner = MemoryPlanner(self.options, self.model, self.host, defaults, max_num_seqs)
        model_len, reason = planner.model_len()
        self.record("max_model_len", model_len, reason)
        memory, reason = planner.plan(model_len)
        self.record("kv_memory", format_size(memory.kv_bytes), reason)
        tiers = self._tiers(backend, planner.host_bytes)
        sized = [tier for tier in tiers if tier.tier != "remote"]
        lower = tuple(group for tier in sized for group in plan_tier(self.model.kv_groups, tier))
        memory = msgspec.structs.replace(memory, lower=lower)
        engine = EngineConfig(
            backend=backend,
            max_num_seqs=max_num_seqs,
            max_model_len=model_len,
            num_blocks=tuple(group.num_blocks for group in memory.groups),
            depth=defaults.depth,
            kernels=kernels,
            packed_cache=self._packed_cache(kernels),
            tiers=tiers,
            kv_store=self.pick("kv_store", "through", "default: once nobody uses them"),
            **self._model(),
            **self._batching(backend, planner.step_tokens(model_len)),
            **self._events(),
            **self._process(),
        )
        server = self._server()
        order = {flag(name): i for i, name in enumerate(RULES)}
        settings = tuple(sorted(self.settings, key=lambda setting: order[setting.name]))
        return Resolved(engine=engine, server=server, settings=settings, memory=memory, warnings=tuple(self.warnings))

    def pick(self, name: str, default: Any, reason: str) -> Any:
        """The user's value of option `name`, or `default` for `reason`; either is recorded."""
        given = getattr(self.options, name)
        value = default if given is None else given
        self.record(name, value, reason if given is None else self.options.origin(name))
        return value

    def _kernels(self) -> str:
        """What computes on the CPU; from here on, the weights are as large as they lie there."""
        obstacle = self.model.needs_torch
        if not self.host.kernels:
            obstacle = obstacle or "this installation has no kernels, because there was no C++ compiler"
        given = self.options.kernels
        if self.model.quantization and (obstacle or given == "torch"):
            raise ConfigError(
                f"the weights of {self.model.path} are int8 ({self.model.quantization}), which only the CPU kernels "
                f"serve, but {obstacle or 'torch was chosen by ' + self.options.label('kernels')}; change that"
            )
        if given in (None, "auto"):
            kernels = "torch" if obstacle else self.host.kernels[0]
            self.record("kernels", kernels, obstacle or "the best this machine runs")
        else:
            kernels = given
            self.record("kernels", kernels, self.options.origin("kernels"))
            if kernels != "torch" and obstacle:
                raise ConfigError(
                    f"{self.options.label('kernels')} is {kernels}, but {obstacle}; change that, or drop it"
                )
            if kernels not in ("torch", *self.host.kernels):
                has = ", ".join(self.host.kernels)
                raise ConfigError(f"{self.options.label('kernels')} is {kernels}, but this machine runs only {has}")
        if kernels == "torch":
            require_torch(self.options, self.model, self.host)
        else:
            self.model = msgspec.structs.replace(self.model, weight_bytes=self.model.packed_bytes)
        return kernels

    def _pick_block_size(self) -> None:
        """A remote store is slow with small objects: there, blocks of a model with one group are made larger."""
        own = "of the first KV group; each has its own" if self.model.own_blocks else "default"
        (group, *others), reason = self.model.kv_groups, self._origin_or("block_size", own)
        if self.options.kv_remote and not others and group.block_bytes < REMOTE_BLOCK_BYTES:
            if self.options.block_size is None:
                group, reason = self._larger_block(group)
                self.model = msgspec.structs.replace(self.model, kv_groups=(group,))
            else:
                self.warnings.append(
                    f"{self.options.label('block_size')} {group.block_size} makes blocks of "
                    f"{format_size(group.block_bytes)}; --kv-remote moves those of {format_size(REMOTE_BLOCK_BYTES)} "
                    "and more at full speed"
                )
        small = ", ".join(g.name for g in self.model.kv_groups if others and g.block_bytes < REMOTE_BLOCK_BYTES)
        if self.options.kv_remote and small:
            size = format_size(REMOTE_BLOCK_BYTES)
            self.warnings.append(
                f"--kv-remote moves blocks of {size} and more at full speed; those of {small} are less"
            )
        self.record("block_size", group.block_size, reason)

    def _larger_block(self, group: KVCacheGroupSpec) -> tuple[KVCacheGroupSpec, str]:
        """The smallest block, by doubling, that is large enough, but no more than a prompt can share; and why."""
        longest = self.options.max_model_len or self.model.max_position_embeddings
        while group.block_bytes < REMOTE_BLOCK_BYTES and 2 * group.block_size <= min(LARGEST_BLOCK, longest // 2):
            group = msgspec.structs.replace(group, block_size=2 * group.block_size)
        reason = f"kv-remote moves blocks of {format_size(REMOTE_BLOCK_BYTES)} and more at full speed"
        if group.block_bytes < REMOTE_BLOCK_BYTES:
            reason += f"; at most {LARGEST_BLOCK} tokens, and half of max-model-len"
        return group, reason

    def _packed_cache(self, kernels: str) -> str:
        """The folder that keeps packed weights, or nothing. A start never fails for it."""
        folder, reason = self.host.cache_dir, self._origin_or("packed_cache", "default")
        if self.options.packed_cache and kernels in ("", "torch"):
            folder, reason = "", "only weights packed for the CPU kernels are kept"
        elif self.options.packed_cache and not folder:
            reason = "this user has no home folder; set XDG_CACHE_HOME"
        elif not self.options.packed_cache:
            folder = ""
        self.record("packed_cache", folder or False, reason)
        return folder

    def _tiers(self, backend: str, host_bytes: int) -> tuple[TierConfig, ...]:
        """Where KV blocks are kept below the device."""
        options = self.options
        off = "default: off" if backend != "cpu" else "off, because the device's memory is host memory; see kv-memory"
        shown = format_size(host_bytes) if host_bytes else False
        self.record("kv_host_memory", shown, self._origin_or("kv_host_memory", off))
        self.record("kv_disk", options.kv_disk or False, self._origin_or("kv_disk", "default: off"))
        self.record("kv_remote", options.kv_remote or False, self._origin_or("kv_remote", "default: off"))
        disk_bytes = options.kv_disk_size or DISK_BYTES
        self.record("kv_disk_size", format_size(disk_bytes), self._origin_or("kv_disk_size", "default"))
        if options.kv_disk_size and not options.kv_disk:
            raise ConfigError(f"{options.label('kv_disk_size')} needs a folder; give --kv-disk too, or drop it")
        tiers = []
        if host_bytes:
            tiers.append(self._tier("host", "kv_host_memory", host_bytes))
        if options.kv_disk:
            tiers.append(self._tier("disk", "kv_disk_size", disk_bytes, options.kv_disk))
            self._check_disk(tiers[-1])
        if options.kv_remote:
            tiers.append(self._tier("remote", "kv_remote", REMOTE_BYTES, options.kv_remote))
        if tiers and options.prefix_caching is False:
            raise ConfigError(
                "tiers of the KV cache find blocks by prefix, but prefix caching is off; drop one of them"
            )
        return tuple(tiers)

    def _tier(self, tier: Tier, option: str, size_bytes: int, place: str = "") -> TierConfig:
        groups = self.model.kv_groups
        slots = tier_slots(groups, size_bytes)
        slots = tuple(min(count, MAX_SLOTS) for count in slots)
        if tier == "remote":
            slots = tuple(min(count, REMOTE_BLOCKS) for count in slots)
        for group, count in zip(groups, slots, strict=True):
            if group.keeps_history and count == 0:
                block = format_size(group.block_bytes)
                raise ConfigError(
                    f"{self.options.label(option)} is {format_size(size_bytes)}, too little for a block of KV group "
                    f"{group.name}, which has {block}; give more"
                )
        return TierConfig(tier=tier, size_bytes=size_bytes, num_slots=slots, place=place)

    def _check_disk(self, tier: TierConfig) -> None:
        """Refuse a folder that can neither be written nor hold blocks already. Later losses are the worker's.

        Blocks that are there already are part of the tier, so that what is left on the disk is no bound for it then.
        """
        disk, label = self.host.kv_disk, f"{self.options.label('kv_disk')} {tier.place}"
        if disk is None:
            return
        room_bytes, part = (disk.disk_bytes, "in all") if disk.used else (disk.free_bytes, "left")
        if room_bytes and tier.size_bytes > room_bytes:
            asked = f"{self.options.label('kv_disk_size')} is {format_size(tier.size_bytes)}"
            self.warnings.append(
                f"{asked}, but the disk of {tier.place} has {format_size(room_bytes)} {part}; "
                "blocks are kept until it is full"
            )
        if disk.used:
            return
        if disk.obstacle:
            raise ConfigError(f"{label} cannot be used: {disk.obstacle}; give a folder that can be written")
        needed = sum(group.block_bytes for group in self.model.kv_groups) + INDEX_BYTES * sum(tier.num_slots)
        if disk.free_bytes < needed:
            raise ConfigError(
                f"{label} has {format_size(disk.free_bytes)} left on its disk, but one block and the index take "
                f"{format_size(needed)}; free some, lower {self.options.label('kv_disk_size')}, or give another folder"
            )

    def _threads(self) -> tuple[int, str]:
        """One per CPU; but sharing an operation takes longer than doing it alone where there is little to read."""
        useful = max(1, self.model.weight_bytes // WEIGHT_BYTES_PER_THREAD)
        if useful < self.host.num_cpus:
            return useful, f"the weights are only {format_size(self.model.weight_bytes)}"
        return self.host.num_cpus, "one per CPU this process may use"

    def record(self, name: str, value: str | int | float | bool, reason: str) -> None:
        self.settings.append(Setting(flag(name), value, reason))

    def _model(self) -> dict[str, Any]:
        model = self.model
        self.record("dtype", model.dtype, self._origin_or("dtype", "from the model's files"))
        return {
            "model": model.path,
            "dtype": model.dtype,
            "vocab_size": model.vocab_size,
            "groups": model.kv_groups,
        }

    def _batching(self, backend: str, step_tokens: int) -> dict[str, Any]:
        chunked = self.pick("chunked_prefill", True, "default")
        reason = f"default for {backend}" if chunked else "holds a whole prompt, because chunked prefill is off"
        return {
            "enable_chunked_prefill": chunked,
            "max_num_batched_tokens": self.pick("max_num_batched_tokens", step_tokens, reason),
            "long_prefill_token_threshold": self._long_prefill(chunked),
            "enable_prefix_caching": self.pick("prefix_caching", True, "default"),
            "max_queued_requests": self.pick("max_queued_requests", 4096, "default"),
        }

    def _events(self) -> dict[str, Any]:
        """Where KV events go, with replay at the next port unless the user says where."""
        endpoint, replay = self.options.kv_events or "", self.options.kv_events_replay or ""
        if replay and not endpoint:
            raise ConfigError(f"{self.options.label('kv_events_replay')} needs --kv-events; give it, or drop this")
        if endpoint and self.options.prefix_caching is False:
            label = self.options.label("kv_events")
            raise ConfigError(
                f"{label} tells what the prefix cache holds, which is off; drop it or --no-prefix-caching"
            )
        self.record("kv_events", endpoint or False, self._origin_or("kv_events", "default"))
        reason = self._origin_or("kv_events_replay", "beside kv-events" if endpoint else "default")
        if endpoint and not replay:
            replay = self._next_port(endpoint)
        self.record("kv_events_replay", replay or False, reason)
        return {"kv_events": endpoint, "kv_events_replay": replay}

    def _next_port(self, endpoint: str) -> str:
        address, _, port = endpoint.rpartition(":")
        if endpoint.startswith("ipc:"):
            return endpoint + ".replay"
        if port in ("*", "0"):
            return endpoint
        if int(port) == MAX_PORT:
            raise ConfigError(f"{self.options.label('kv_events')} is {endpoint}, so give --kv-events-replay as well")
        return f"{address}:{int(port) + 1}"

    def _process(self) -> dict[str, Any]:
        step_timeout_s = self.pick("step_timeout", FaultConfig().step_timeout_s, "default")
        return {
            "seed": self.pick("seed", 0, "default"),
            "num_threads": self.pick("num_threads", *self._threads()),
            "log_level": self.pick("log_level", "info", "default"),
            "faults": FaultConfig(step_timeout_s=step_timeout_s),
        }

    def _origin_or(self, name: str, reason: str) -> str:
        return reason if getattr(self.options, name) in (None, "auto") else self.options.origin(name)

    def _long_prefill(self, chunked: bool) -> int:
        threshold = self.pick("long_prefill_token_threshold", 0, "default: off")
        if threshold and not chunked:
            label = self.options.label("long_prefill_token_threshold")
            raise ConfigError(f"{label} is {threshold}, but chunked prefill is off; drop it or give --chunked-prefill")
        return cast(int, threshold)

    def _server(self) -> ServerConfig:
        model = self.options.model or self.model.path or "plain"
        self.record("model", model, self._origin_or("model", "the default model"))
        names = self.options.served_model_name or (default_model_name(self.model.path or model),)
        self.record("served_model_name", ", ".join(names), self._origin_or("served_model_name", "the model's name"))
        key, template = self.options.api_key, self.options.chat_template
        self.record("api_key", "set" if key else "none", self._origin_or("api_key", "default: open"))
        self.record("chat_template", template or "its own", self._origin_or("chat_template", "from the model's files"))
        return ServerConfig(
            served_model_names=names,
            host=self.pick("host", "127.0.0.1", "default: this machine only"),
            port=self.pick("port", 8000, "default"),
            api_key=key,
            chat_template=template,
            drain_timeout_s=self.pick("drain_timeout", 30.0, "default"),
            log_requests=self.pick("log_requests", False, "default"),
        )
