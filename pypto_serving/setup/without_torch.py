"""Refuse a start that needs torch where it is not installed, and name the command that helps."""

from __future__ import annotations

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.kernels import why_torch
from pypto_serving.setup.options import Options
from pypto_serving.types.model import ModelSpec
from pypto_serving.util import install_extra

INSTALL = install_extra("torch")


def require_torch(options: Options, model: ModelSpec, host: HostFacts) -> None:
    """Refuse what torch would compute where it is not installed; raises ConfigError, in one line that says what helps.

    Cases, in this order: no kernels were built; the user chose torch; float32; sizes or options the kernels refuse.
    """
    if host.torch:
        return
    if not host.kernels:
        raise ConfigError(
            "this installation has neither CPU kernels, because there was no C++ compiler, nor torch; install it again "
            f"with a compiler (in a checkout: make clean serve), or {INSTALL}"
        )
    if options.kernels == "torch":
        change = "" if model.needs_torch else "drop it, or "
        raise ConfigError(f"{options.label('kernels')} is torch, but torch is not installed; {change}{INSTALL}")
    if model.dtype == "float32":
        subject, change = "the weights are", f"give {options.giving('dtype', 'bfloat16')}"
        if options.dtype == "float32":
            subject, change = f"{options.label('dtype')} is", "give bfloat16"
        raise ConfigError(f"{subject} float32, which needs torch, and torch is not installed; {change}, or {INSTALL}")
    raise ConfigError(f"{why_torch(options, model)}, and torch is not installed; change that, or {INSTALL}")
