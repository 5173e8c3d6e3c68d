"""Backends that cannot do everything: what they demand is configured, and what they cannot do is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pypto_serving.backend.defaults import BACKEND_DEFAULTS
from pypto_serving.errors import ConfigError
from pypto_serving.model.null_models import null_spec
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import make_options
from pypto_serving.setup.resolver import Resolved, resolve
from pypto_serving.types.kv import DEFAULT_BLOCK_SIZE, StateSpec
from pypto_serving.types.step import BackendTraits
from tests.configs import change_config

HOST = HostFacts(available_bytes=1 << 36, num_cpus=2, kernels=("portable",))


@pytest.fixture
def resolved_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Resolve options for a null backend with the given traits."""

    def resolved(traits: BackendTraits, model: str = "plain", **options: Any) -> Resolved:
        defaults = msgspec.structs.replace(BACKEND_DEFAULTS["null"], traits=traits, max_num_seqs=16)
        monkeypatch.setitem(BACKEND_DEFAULTS, "null", defaults)  # type: ignore[arg-type]
        given = make_options({"backend": "null", "model": model, **options})
        return resolve(given, null_spec(model, given.block_size or DEFAULT_BLOCK_SIZE), HOST)

    return resolved


def test_pages_of_one_size_for_all_families(resolved_on: Any) -> None:
    engine = resolved_on(BackendTraits(page_tokens=128), "deepseek_v4").engine
    assert {group.block_size for group in engine.cache.groups} == {128}
    assert {group.period for group in engine.cache.groups if isinstance(group, StateSpec)} == {4, 128}
    assert engine.limits.traits.page_tokens == 128


@pytest.mark.parametrize(
    ("traits", "options", "words"),
    [
        (BackendTraits(page_tokens=128), {"block_size": 64}, ["--block-size is 64", "128"]),
        (BackendTraits(padded_rows=(4, 16)), {"max_num_seqs": 17}, ["--max-num-seqs is 17", "at most 16"]),
        (
            BackendTraits(chunk_tokens=64),
            {"max_num_batched_tokens": 64},
            ["--max-num-batched-tokens is 64", "at least 65"],
        ),
        (
            BackendTraits(chunk_tokens=32),
            {"long_prefill_token_threshold": 20},
            ["--long-prefill-token-threshold is 20", "32"],
        ),
        (BackendTraits(chunk_tokens=64), {"block_size": 16}, ["--block-size", "every 16 tokens", "multiple of 64"]),
    ],
)
def test_what_a_backend_cannot_do_is_refused(
    resolved_on: Any, traits: BackendTraits, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        resolved_on(traits, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_what_it_can_do_is_not_refused(resolved_on: Any) -> None:
    traits = BackendTraits(page_tokens=128, padded_rows=(4, 16), chunk_tokens=128, mixed_steps=False)
    assert (
        resolved_on(traits, max_num_seqs=16, max_num_batched_tokens=129, block_size=128).engine.limits.traits == traits
    )


def test_more_drafts_than_are_verified(resolved_on: Any) -> None:
    traits = BackendTraits(max_drafts=1)
    assert resolved_on(traits, spec_method="ngram", spec_tokens=1).engine.num_drafts == 1
    with pytest.raises(ConfigError, match="asks for 2 drafts, but the backend's programs verify at most 1"):
        resolved_on(traits, spec_method="ngram", spec_tokens=2)


def test_a_config_that_no_option_made_is_refused_too(resolved_on: Any) -> None:
    engine = resolved_on(BackendTraits()).engine
    with pytest.raises(ConfigError, match="max_num_seqs is 16, but the null backend computes at most 4 sequences"):
        change_config(engine, traits=BackendTraits(padded_rows=(4,)))


@pytest.mark.parametrize("wrong", [{"padded_rows": (4, 2)}, {"padded_rows": (0, 2)}, {"chunk_tokens": 0}])
def test_traits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        BackendTraits(**wrong)
