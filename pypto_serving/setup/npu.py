"""Choose the platform that compiled programs run on, and refuse what they cannot serve."""

from __future__ import annotations

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.settings import Settings
from pypto_serving.types.model import ModelSpec


def choose_platform(
    settings: Settings, model: ModelSpec, host: HostFacts, backend: BackendDefaults
) -> tuple[str, BackendDefaults]:
    """Choose the platform, empty for a backend without any, and return the backend as it is there.

    Raises ConfigError where nothing is installed that could run programs, and for models and memory they cannot have.
    """
    options, given = settings.options, settings.options.npu_platform
    if not backend.platforms:
        if given is not None:
            npu = options.giving("backend", "npu", beside="npu_platform")
            raise ConfigError(f"{options.label('npu_platform')} is {given}, which needs {npu}; give both or neither")
        settings.record("npu_platform", "none", "only the npu backend has platforms")
        return "", backend
    if not host.pypto:
        raise ConfigError(
            f"{options.label('backend')} is npu, but PyPTO's runtime is not installed; docs/npu.md says where to get it"
        )
    _check_model(settings, model)
    default, *_, simulator = backend.platforms
    found = (default, "this machine has an Ascend device") if host.npu else (simulator, "there is no Ascend device")
    platform: str = settings.pick("npu_platform", *found)
    if platform.endswith("sim"):
        return platform, backend
    if not isinstance(options.kv_memory, int):
        raise ConfigError(
            f"{options.label('kv_memory')} must be given as a size on {platform}, since only its runtime knows the "
            "device's memory; give what is left beside the weights"
        )
    return platform, msgspec.structs.replace(backend, own_memory=True)


def _check_model(settings: Settings, model: ModelSpec) -> None:
    """Raise ConfigError for weights that the programs do not take."""
    options = settings.options
    if model.quantization:
        raise ConfigError(
            f"the weights of {model.path} are quantised ({model.quantization}), for which there is no program"
        )
    if model.dtype != "bfloat16":
        label, wanted = options.label("dtype"), options.giving("dtype", "bfloat16")
        raise ConfigError(f"{label} is {model.dtype}, but the npu programs compute in bfloat16; give {wanted}")
