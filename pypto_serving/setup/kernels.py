"""Choose how the CPU computes: kernels or torch, the folder of packed weights, and the number of threads."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.settings import Settings
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import format_size, install_extra

WEIGHT_BYTES_PER_THREAD = 32 << 20
"""Fewer bytes of weights are read faster by one thread less."""
_INSTALL = install_extra("torch")


def choose_kernels(settings: Settings, model: ModelSpec, host: HostFacts) -> str:
    """Choose the instruction set of the kernels, or torch; raise ConfigError if the wanted one cannot serve."""
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
    """Say why the kernels cannot serve the model, with the option to look at; empty if they can."""
    option = model.needs_torch_option
    return f"{model.needs_torch} (see {options.label(option)})" if option else model.needs_torch


def require_torch(options: Options, model: ModelSpec, host: HostFacts) -> None:
    """Refuse what torch would compute where it is not installed; raises ConfigError, in one line that says what helps.

    Cases, in this order: no kernels were built; the user chose torch; float32; sizes or options the kernels refuse.
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
    """Raise ConfigError for quantised weights that torch would have to serve."""
    if model.quantization and (obstacle or options.kernels == "torch"):
        raise ConfigError(
            f"the weights of {model.path} are quantised ({model.quantization}), which only the CPU kernels "
            f"serve, but {obstacle or 'torch was chosen by ' + options.label('kernels')}; change that"
        )


def choose_packed_cache(settings: Settings, host: HostFacts, kernels: str) -> str:
    """Choose the folder for packed weights, empty for none. A start never fails for it."""
    wanted, reason = settings.options.packed_cache, settings.origin_or("packed_cache", "default")
    folder = host.cache_dir if wanted else ""
    if wanted and kernels in ("", "torch"):
        folder, reason = "", "only weights packed for the CPU kernels are kept"
    elif wanted and not folder:
        reason = "this user has no home folder; set XDG_CACHE_HOME"
    settings.record("packed_cache", folder or False, reason)
    return folder


def choose_threads(settings: Settings, model: ModelSpec, host: HostFacts) -> int:
    """Choose one thread per CPU, or fewer where a thread's share of the weights would cost more than it saves."""
    useful, reason = host.num_cpus, "one per CPU this process may use"
    if (by_weights := max(1, model.weight_bytes // WEIGHT_BYTES_PER_THREAD)) < useful:
        useful, reason = by_weights, f"the weights are only {format_size(model.weight_bytes)}"
    threads: int = settings.pick("num_threads", useful, reason)
    return threads
