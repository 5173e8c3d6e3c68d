"""Choose how drafts are made."""

from __future__ import annotations

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import Topology
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.settings import Settings
from pypto_serving.types.drafts import NgramConfig, Speculation

OFF = "off"


class Drafting(msgspec.Struct, frozen=True):
    """The fields of an EngineConfig that say how drafts are made."""

    num_drafts: int = 0
    ngram: NgramConfig | None = None

    @property
    def in_model(self) -> bool:
        """Return True if draft layers of the model make drafts."""
        return self.num_drafts > 0 and self.ngram is None


def needs_draft_layers(options: Options) -> bool:
    """Return True if the model's draft layers are asked for."""
    given = options.speculative_config
    return "mtp" in (options.spec_method, None if given is None else given.method)


def choose_drafts(
    settings: Settings, host: HostFacts, backend: BackendDefaults, topology: Topology, kernels: str
) -> Drafting:
    """Read `speculative_config`, or the short options in its place. Raises ConfigError."""
    options, given = settings.options, settings.options.speculative_config
    short = [name for name in ("spec_method", "spec_tokens") if getattr(options, name) is not None]
    if given is not None and short:
        raise ConfigError(f"{options.label('speculative_config')} says what {options.label(short[0])} says; keep one")
    if options.spec_tokens is not None and options.spec_method in (None, OFF):
        wanted = options.giving("spec_method", "ngram", beside="spec_tokens")
        raise ConfigError(f"{options.label('spec_tokens')} is given, but nothing makes drafts; give {wanted} too")
    if given is not None:
        label, reason = "speculative_config", options.origin("speculative_config")
        settings.record("speculative_config", "given", reason)
        settings.record("spec_method", given.method, reason)
        settings.record("spec_tokens", given.num_speculative_tokens, reason)
    else:
        label, method, count = "spec_method", settings.pick_fixed("spec_method"), settings.pick_fixed("spec_tokens")
        settings.record("speculative_config", settings.defaults["speculative_config"], "default")
        if method in (False, OFF):
            return Drafting()
        given = msgspec.convert({"method": method, "num_speculative_tokens": count}, Speculation)
    if given.num_speculative_tokens > (most := backend.traits.max_drafts):
        problem = f"asks for {given.num_speculative_tokens} drafts, but the backend's programs verify at most {most}"
        raise ConfigError(f"{options.label(label)} {problem}; leave it out")
    if given.ngram is not None and not host.kernels:
        raise ConfigError(f"{options.label(label)} needs the CPU kernels, which look drafts up; leave it out")
    if given.ngram is None and (problem := _without_draft_layers(topology, kernels)):
        raise ConfigError(f"{options.label(label)} mtp {problem}; choose ngram, or leave it out")
    return Drafting(given.num_speculative_tokens, given.ngram)


def _without_draft_layers(topology: Topology, kernels: str) -> str:
    """Say why draft layers cannot be computed, or nothing if they can."""
    return "needs one rank in torch" if kernels == "torch" and topology.num_ranks > 1 else ""
