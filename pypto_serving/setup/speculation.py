"""Choose how drafts are made."""

from __future__ import annotations

import msgspec

from pypto_serving.backend.defaults import BackendDefaults
from pypto_serving.errors import ConfigError
from pypto_serving.parallel.topology import Topology
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.settings import Settings
from pypto_serving.types.config import DEFAULT_DRAFTS, NgramConfig, Speculation

OFF = "off"
_SHORT_FORMS = ("spec_method", "spec_tokens")


class Drafting(msgspec.Struct, frozen=True):
    """The fields of an EngineConfig that say how drafts are made."""

    num_drafts: int = 0
    ngram: NgramConfig | None = None

    @property
    def in_model(self) -> bool:
        """Return True if draft layers of the model make drafts."""
        return self.num_drafts > 0 and self.ngram is None


def given_speculation(options: Options) -> Speculation | None:
    """Return what `speculative_config`, or `spec_method` and `spec_tokens` in its place, asks for; None for no drafts.

    Raises ConfigError for both forms at once, and for a number of drafts where nothing makes them.
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
) -> Drafting:
    """Choose how drafts are made. Raises ConfigError for what cannot make or verify them."""
    options, given = settings.options, given_speculation(settings.options)
    form = "spec_method" if options.speculative_config is None else "speculative_config"
    origin = settings.origin_or("speculative_config", "default")
    settings.record("speculative_config", "given" if options.speculative_config else False, origin)
    settings.record("spec_method", given.method if given else False, settings.origin_or("spec_method", origin))
    count = given.num_speculative_tokens if given else DEFAULT_DRAFTS
    settings.record("spec_tokens", count, settings.origin_or("spec_tokens", origin))
    if given is None:
        return Drafting()
    if given.num_speculative_tokens > (most := backend.traits.max_drafts):
        problem = f"asks for {given.num_speculative_tokens} drafts, but the backend's programs verify at most {most}"
        raise ConfigError(f"{options.label(form)} {problem}; leave it out")
    if given.ngram is not None and not host.kernels:
        raise ConfigError(f"{options.label(form)} needs the CPU kernels, which look drafts up; leave it out")
    if given.ngram is None and kernels == "torch" and topology.num_ranks > 1:
        raise ConfigError(f"{options.label(form)} mtp needs one rank in torch; choose ngram, or leave it out")
    return Drafting(given.num_speculative_tokens, given.ngram)
