"""The cuda backend's configuration: memory of the card, pages, one card for each replica, and what it refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import CardFacts, HostFacts
from pypto_serving.setup.resolver import Resolved
from pypto_serving.util import GIB
from tests.setup.small import HOST, make_model, make_resolved, setting

CARD = CardFacts("NVIDIA H200", 100 * GIB)
WITH_CARD = msgspec.structs.replace(HOST, cards=(CARD,))
SERVED: dict[str, Any] = {"no_card": "", "card_bytes": 2 * 10**6, "max_position_embeddings": 4096}


def resolved(host: HostFacts = WITH_CARD, /, **options: Any) -> Resolved:
    return make_resolved(make_model(**SERVED), host, backend="cuda", **options)


def test_memory_is_that_of_the_card() -> None:
    found = resolved(kv_memory=0.005, kv_host_memory=0.25)
    assert found.memory.available_bytes == 100 * GIB
    assert 0.49 * GIB < found.memory.kv_bytes <= 0.5 * GIB
    assert abs(found.engine.cache.tiers[0].size_bytes - 4 * GIB) < GIB  # of the host's 16
    assert setting(found, "kv-memory")[1] == "given by --kv-memory: 0.005 of 100 GiB free on the card"


def test_weights_take_what_the_card_holds() -> None:
    model = make_model(**SERVED | {"card_bytes": 7 * GIB}, quantization="w8a8", weight_bytes=9 * GIB)
    assert make_resolved(model, WITH_CARD, backend="cuda").memory.weight_bytes == 7 * GIB


def test_most_of_a_card_is_kv() -> None:
    found = resolved(max_num_seqs=256)
    value, reason = setting(found, "kv-memory")
    assert reason.startswith("90% of 100 GiB free on the card less weights and workspace")
    assert found.memory.total_bytes < 99 * GIB, value


def test_dispatches_are_split_padded_and_sampled_on_the_card() -> None:
    engine = resolved().engine
    traits = engine.limits.traits
    assert (traits.mixed_steps, traits.samples_on_device, traits.prompt_logprobs) == (False, True, False)
    assert (engine.cache.groups[0].block_size, engine.limits.depth) == (64, 2)
    assert engine.limits.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("host", "model", "options", "message"),
    [
        (HOST, {}, {}, "needs 1 NVIDIA card, one for each replica, but the driver shows 0 NVIDIA cards"),
        (
            WITH_CARD,
            {},
            {"data_parallel_size": 2},
            "needs 2 NVIDIA cards, one for each replica, but the driver shows 1 NVIDIA card",
        ),
        (
            msgspec.structs.replace(WITH_CARD, triton=False),
            {},
            {},
            "--backend is cuda, but triton is not installed; run in the checkout: pip install '.[cuda]'",
        ),
        (WITH_CARD, {"no_card": "it takes no experts"}, {}, "but it takes no experts; choose --backend cpu"),
        (WITH_CARD, {}, {"head": "int8"}, "--head is int8, but"),
        (WITH_CARD, {}, {"tensor_parallel_size": 2}, "--tensor-parallel-size is 2"),
        (WITH_CARD, {}, {"kv_memory": 101 * GIB}, "--kv-memory is 101 GiB, but weights take"),
    ],
)
def test_what_is_refused(host: HostFacts, model: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_resolved(make_model(**(SERVED | model)), host, backend="cuda", **options)
    assert message in str(error.value)
