"""Which drafts are made, from the options that users give."""

from __future__ import annotations

from typing import Any

import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup.compute import given_speculation
from pypto_serving.setup.host import HostFacts
from pypto_serving.setup.options import Options
from pypto_serving.setup.resolver import Resolved
from pypto_serving.types.config import DEFAULT_DRAFTS, MAX_DRAFTS, NgramConfig
from tests.setup.small import HOST, WITH_KERNELS, make_resolved, setting


def resolved_with(facts: HostFacts = WITH_KERNELS, **options: Any) -> Resolved:
    return make_resolved(None, facts, **options)


JSON = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}'
GIVEN = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3}


@pytest.mark.parametrize(
    ("options", "num_drafts", "ngram"),
    [
        ({}, 0, None),
        ({"spec_method": "off"}, 0, None),
        ({"spec_method": "ngram"}, DEFAULT_DRAFTS, NgramConfig()),
        ({"spec_method": "ngram", "spec_tokens": "7"}, 7, NgramConfig()),
        ({"spec_method": "mtp", "spec_tokens": 2}, 2, None),
        ({"speculative_config": {"method": "mtp"}}, DEFAULT_DRAFTS, None),
        ({"speculative_config": JSON}, 5, NgramConfig(shortest=3, longest=4)),
        ({"speculative_config": GIVEN}, 5, NgramConfig(shortest=3, longest=4)),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 1}}, 4, NgramConfig(shortest=1, longest=1)),
    ],
)
def test_what_is_given(options: dict[str, Any], num_drafts: int, ngram: NgramConfig | None) -> None:
    resolved = resolved_with(**options)
    assert (resolved.engine.num_drafts, resolved.engine.worker.ngram) == (num_drafts, ngram)
    assert resolved.engine.limits.traits.max_drafts == num_drafts
    assert setting(resolved, "spec-tokens")[0] == (num_drafts or DEFAULT_DRAFTS)


@pytest.mark.parametrize(("method", "count"), [("ngram", 3), ("mtp", 2), ("ngram", None)])
def test_both_forms_are_the_same(method: str, count: int | None) -> None:
    short: dict[str, Any] = {"spec_method": method, "spec_tokens": count}
    whole = {"method": method} | ({} if count is None else {"num_speculative_tokens": count})
    assert given_speculation(Options(**short)) == given_speculation(Options(speculative_config=whole))
    by_short, by_whole = resolved_with(**short), resolved_with(speculative_config=whole)
    assert by_short.engines == by_whole.engines and by_short.memory == by_whole.memory
    for name in ("spec-method", "spec-tokens"):
        assert setting(by_short, name)[0] == setting(by_whole, name)[0]
    assert setting(by_whole, "spec-method") == (method, "given by --speculative-config")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_tokens": 3}, "nothing makes drafts"),
        ({"spec_method": "off", "spec_tokens": 3}, "nothing makes drafts"),
        ({"spec_method": "ngram", "spec_tokens": MAX_DRAFTS + 1}, "spec.tokens"),
        ({"spec_method": "eagle"}, "one of off, ngram, mtp"),
        ({"speculative_config": {"method": "mtp", "prompt_lookup_min": 2}}, "for ngram, prompt_lookup_min"),
        ({"spec_method": "ngram", "speculative_config": JSON}, "keep one"),
        ({"speculative_config": '{"method": "eagle"}'}, r"method \(ngram or mtp\)"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 17}}, r"tokens \(1 to 16\)"),
        ({"speculative_config": "{"}, "must be a mapping or JSON"),
        ({"speculative_config": 5}, "must be a mapping or JSON"),
        ({"speculative_config": GIVEN | {"prompt_lookup_min": 9}}, "min <= max"),
        ({"speculative_config": GIVEN | {"draft_tensor_parallel_size": 1}}, "with no keys but"),
        ({"spec_method": "ngram", "backend": "null"}, "verify at most 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved_with(**options)


def test_an_installation_without_kernels_looks_nothing_up() -> None:
    with pytest.raises(ConfigError, match="needs the CPU kernels"):
        resolved_with(HOST, spec_method="ngram")


def test_logits_of_drafts_and_their_index_are_planned() -> None:
    plain, drafting = resolved_with(max_num_seqs=8), resolved_with(max_num_seqs=8, spec_method="ngram")
    engine = drafting.engine
    logits = 2 * 4 * engine.model.vocab_size * 8 * DEFAULT_DRAFTS
    assert engine.limits.max_logits == plain.engine.limits.max_logits + 8 * DEFAULT_DRAFTS
    index = 16 * 8 * engine.limits.max_model_len
    assert drafting.memory.workspace_bytes == plain.memory.workspace_bytes + logits + index
