"""Choose kernels or torch, threads, precision, the platform of an NPU, and drafts."""

from __future__ import annotations

from typing import Any

import msgspec

from pypto_serving.backend.defaults import CARD_CAPABILITIES, BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import Topology
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options, Settings
from pypto_serving.types.config import DEFAULT_DRAFTS, Speculation
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import counted, format_size, install_extra

WEIGHT_BYTES_PER_THREAD = 32 << 20
"""If there are fewer bytes of weights per thread, one thread less reads them faster."""
_INSTALL = install_extra("torch")


def choose_kernels(settings: Settings, model: ModelSpec, host: HostFacts) -> str:
    """Choose the instruction set of the kernels, or torch. Raises ConfigError if the user's choice cannot work."""
    options, obstacle = settings.options, why_torch(settings.options, model)
    if not host.kernels:
        obstacle = obstacle or "this installation has no kernels, because there was no C++ compiler"
    _check_quantized(options, model, obstacle)
    given: str | None = options.kernels
    if given in (None, "auto"):
        kernels = "torch" if obstacle else host.kernels[0]
        settings.record("kernels", kernels, obstacle or "the best this machine runs")
        return kernels
    label = options.label("kernels")
    if given != "torch" and obstacle:
        raise ConfigError(f"{label} is {given}, but {obstacle}; change that, or drop it")
    if given not in ("torch", *host.kernels):
        raise ConfigError(f"{label} is {given}, but this machine runs only {', '.join(host.kernels)}; drop it")
    settings.record("kernels", given, options.origin("kernels"))
    return given


def why_torch(options: Options, model: ModelSpec) -> str:
    """Return why the kernels cannot serve the model, with the option responsible, or ""."""
    option = model.needs_torch_option
    return f"{model.needs_torch} (see {options.label(option)})" if option else model.needs_torch


def require_torch(options: Options, model: ModelSpec, host: HostFacts) -> None:
    """Raise ConfigError, with the remedy, if torch would have to compute but is not installed.

    Cases, in this order: no kernels were built; the user chose torch; float32; sizes or options that kernels lack.
    """
    if host.torch:
        return
    if not host.kernels:
        raise ConfigError(
            "this installation has neither CPU kernels, because there was no C++ compiler, nor torch; install it again "
            f"with a compiler (in a checkout: make clean serve), or {_INSTALL}"
        )
    if options.kernels == "torch":
        change = "" if model.needs_torch else "drop it, or "
        raise ConfigError(f"{options.label('kernels')} is torch, but torch is not installed; {change}{_INSTALL}")
    if model.dtype == "float32":
        subject, change = "the weights are", f"give {options.giving('dtype', 'bfloat16')}"
        if options.dtype == "float32":
            subject, change = f"{options.label('dtype')} is", "give bfloat16"
        raise ConfigError(f"{subject} float32, which needs torch, and torch is not installed; {change}, or {_INSTALL}")
    raise ConfigError(f"{why_torch(options, model)}, and torch is not installed; change that, or {_INSTALL}")


def _check_quantized(options: Options, model: ModelSpec, obstacle: str) -> None:
    """Raise ConfigError for quantized weights if torch would have to compute."""
    if model.quantization and (obstacle or options.kernels == "torch"):
        raise ConfigError(
            f"the weights of {model.path} are quantised ({model.quantization}), which only the CPU kernels "
            f"serve, but {obstacle or 'torch was chosen by ' + options.label('kernels')}; change that"
        )


def choose_packed_cache(settings: Settings, host: HostFacts, kernels: str) -> str:
    """Choose the folder for packed weights, or "". It never makes a start fail."""
    wanted, reason = settings.options.packed_cache, settings.origin_or("packed_cache", "default")
    folder = host.cache_dir if wanted else ""
    if wanted and kernels in ("", "torch"):
        folder, reason = "", "only weights packed for the CPU kernels are kept"
    elif wanted and not folder:
        reason = "this user has no home folder; set XDG_CACHE_HOME"
    settings.record("packed_cache", folder or False, reason)
    return folder


def choose_threads(settings: Settings, model: ModelSpec, host: HostFacts) -> int:
    """Choose one thread per CPU, or fewer if a thread would have too small a share of the weights to pay."""
    useful, reason = host.num_cpus, "one per CPU this process may use"
    if (by_weights := max(1, model.weight_bytes // WEIGHT_BYTES_PER_THREAD)) < useful:
        useful, reason = by_weights, f"the weights are only {format_size(model.weight_bytes)}"
    threads: int = settings.pick("num_threads", useful, reason)
    return threads


_OBSTACLES = {
    "activations": "only 4-bit weights and GGUF leave a choice",
    "head": "this model has no output layer of bf16 that can be rounded",
    "kv_dtype": "the KV cache of this model has a form of its own",
}
"""By option: why a model does not allow it."""


def choose_precision(settings: Settings, model: ModelSpec, kernels: str) -> dict[str, Any]:
    """Choose the parts that CPU kernels round to int8, as fields of ModelConfig. KV groups already have their dtype.

    If output layer and embedding are tied, a rounded output layer also embeds tokens: an extra bf16 table would take
    more memory than not rounding. On the bundled model, logits have an error of 0.7 % in bf16, 1.1 % with only the
    products in int8, and 1.3 % with the embedding rounded, too.

    Raises ConfigError for a value that the model, or torch if chosen, does not support.
    """
    _choose_kv_dtype(settings, model, kernels)
    activations, reason = ("bf16", "default for GGUF") if model.blocks else ("int8", "default for 4-bit weights")
    return {
        "activations": _choose(settings, model, kernels, "activations", activations, reason),
        "head": _choose(settings, model, kernels, "head", "auto", "default: as it is stored"),
    }


def _choose(settings: Settings, model: ModelSpec, kernels: str, name: str, default: str, reason: str) -> Any:
    given, obstacle = getattr(settings.options, name) or "auto", _obstacle(model, kernels, name)
    if obstacle and given != "auto":
        raise ConfigError(f"{settings.options.label(name)} is {given}, but {obstacle}; drop it")
    value = default if given == "auto" else given
    settings.record(name, "auto" if obstacle else value, obstacle or settings.origin_or(name, reason))
    return value


def _choose_kv_dtype(settings: Settings, model: ModelSpec, kernels: str) -> None:
    options, computed = settings.options, "bf16" if model.dtype == "bfloat16" else model.dtype
    given, obstacle = options.kv_dtype or "auto", _obstacle(model, kernels, "kv_dtype")
    if given == "bf16" != computed:
        obstacle = f"the model computes in {computed}, and keeps that"
    if obstacle and given not in ("auto", computed):
        raise ConfigError(f"{options.label('kv_dtype')} is {given}, but {obstacle}; drop it")
    value = computed if given == "auto" else given
    settings.record("kv_dtype", value, settings.origin_or("kv_dtype", "default: as the model computes"))


def _obstacle(model: ModelSpec, kernels: str, name: str) -> str:
    if name not in model.choices:
        return _OBSTACLES[name]
    if not kernels:
        return "only the CPU kernels round to int8"
    return "torch computes, and rounds nothing to int8" if kernels == "torch" else ""


def choose_platform(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults
) -> tuple[str, BackendDefaults]:
    """Choose the platform, "" for a backend without platforms, and return the backend's defaults there.

    Raises ConfigError if no runtime is installed, and for models or memory sizes that programs do not support.
    """
    options, given = settings.options, settings.options.npu_platform
    if not backend.platforms:
        if given is not None:
            npu = options.giving("backend", "npu", beside="npu_platform")
            raise ConfigError(f"{options.label('npu_platform')} is {given}, which needs {npu}; give both or neither")
        settings.record("npu_platform", "none", "only the npu backend has platforms")
        return "", backend
    if not host.pypto:
        problem = "is npu, but PyPTO's runtime is not installed; docs/npu.md says where to get it"
        raise options.refusal("backend", problem)
    _check_model(settings, model)
    default, *_, simulator = backend.platforms
    found = (default, "this machine has an Ascend device") if host.npu else (simulator, "there is no Ascend device")
    platform: str = settings.pick("npu_platform", *found)
    if platform.endswith("sim"):
        return platform, backend
    if not isinstance(options.kv_memory, int):
        why = "since only its runtime knows the device's memory; give what is left beside the weights"
        raise options.refusal("kv_memory", f"must be given as a size on {platform}, {why}")
    return platform, msgspec.structs.replace(backend, own_memory=True)


def check_cards(settings: Settings, model: ModelSpec, host: HostFacts) -> None:
    """Raise ConfigError where replicas lack cards, packages that run them are missing, or there is no program."""
    options = settings.options
    label = f"{options.label('backend')} is cuda"
    if len(host.cards) < host.num_replicas:
        needed, found = (counted(count, "NVIDIA card") for count in (host.num_replicas, len(host.cards)))
        raise ConfigError(f"{label}, which needs {needed}, one for each replica, but the driver shows {found}")
    for card in host.cards[: host.num_replicas]:
        if card.capability not in CARD_CAPABILITIES:
            known = " and ".join(f"{major}.{minor}" for major, minor in CARD_CAPABILITIES)
            own = "{}.{}".format(*card.capability)
            raise ConfigError(f"{label}, whose kernels are for compute capability {known}, and {card.name} has {own}")
    if missing := [name for name in ("torch", "triton") if not getattr(host, name)]:
        raise ConfigError(f"{label}, but {' and '.join(missing)} is not installed; {install_extra('cuda')}")
    if model.no_card:
        raise ConfigError(f"{label}, but {model.no_card}; choose {options.giving('backend', 'cpu')}")


def _check_model(settings: Settings, model: ModelSpec) -> None:
    """Raise ConfigError for weights that the programs do not support."""
    options = settings.options
    if model.quantization:
        raise ConfigError(
            f"the weights of {model.path} are quantised ({model.quantization}), for which there is no program"
        )
    if model.dtype != "bfloat16":
        wanted = options.giving("dtype", "bfloat16")
        raise options.refusal("dtype", f"is {model.dtype}, but the npu programs compute in bfloat16; give {wanted}")


OFF = "off"
_SHORT_FORMS = ("spec_method", "spec_tokens")


def given_speculation(options: Options) -> Speculation | None:
    """Return the drafts asked for by `speculative_config`, or by `spec_method` and `spec_tokens`; None for no drafts.

    Raises ConfigError for both forms at once, and for a number of drafts without a method.
    """
    given: Speculation | None = options.speculative_config
    method = None if options.spec_method == OFF else options.spec_method
    short = next((name for name in _SHORT_FORMS if getattr(options, name) is not None), None)
    if given is not None and short is not None:
        raise ConfigError(f"{options.label('speculative_config')} says what {options.label(short)} says; keep one")
    if given is None and method is None and options.spec_tokens is not None:
        wanted = options.giving("spec_method", "ngram", beside="spec_tokens")
        raise ConfigError(f"{options.label('spec_tokens')} is given, but nothing makes drafts; give {wanted} too")
    if given is not None or method is None:
        return given
    return Speculation(method=method, num_speculative_tokens=options.spec_tokens or DEFAULT_DRAFTS)


def choose_drafts(
    settings: Settings, host: HostFacts, backend: BackendDefaults, topology: Topology, kernels: str
) -> Speculation | None:
    """Choose the method of drafts, or None. Raises ConfigError if drafts cannot be made or verified here."""
    options, given = settings.options, given_speculation(settings.options)
    form = "spec_method" if options.speculative_config is None else "speculative_config"
    origin = settings.origin_or("speculative_config", "default")
    settings.record("speculative_config", "given" if options.speculative_config else False, origin)
    settings.record("spec_method", given.method if given else False, settings.origin_or("spec_method", origin))
    count = given.num_speculative_tokens if given else DEFAULT_DRAFTS
    settings.record("spec_tokens", count, settings.origin_or("spec_tokens", origin))
    if given is None:
        return None
    if given.num_speculative_tokens > (most := backend.traits.max_drafts):
        problem = f"asks for {given.num_speculative_tokens} drafts, but the backend's programs verify at most {most}"
        raise ConfigError(f"{options.label(form)} {problem}; leave it out")
    if given.ngram is not None and not host.kernels:
        raise ConfigError(f"{options.label(form)} needs the CPU kernels, which look drafts up; leave it out")
    if given.ngram is None and kernels == "torch" and topology.num_ranks > 1:
        raise ConfigError(f"{options.label(form)} mtp needs one rank in torch; choose ngram, or leave it out")
    return given
