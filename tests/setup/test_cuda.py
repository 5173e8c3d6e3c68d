"""The cuda backend's configuration: memory of the card, pages, one card for each replica, and what it refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.setup.host import CardFacts, HostFacts, read_cards, read_host_facts
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
    assert found.memory.total_bytes < 3 * GIB  # without the host tier
    assert found.engine.worker.backend_options == {"capability": (9, 0)}
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
        (
            msgspec.structs.replace(HOST, cards=(CardFacts("NVIDIA RTX 5090", GIB, (12, 0)),)),
            {},
            {},
            "--backend is cuda, whose kernels are for compute capability 8.0 and 9.0, and NVIDIA RTX 5090 has 12.0",
        ),
        (WITH_CARD, {}, {"kv_host_memory": 20 * GIB}, "--kv-host-memory is 20 GiB; this host has 16384MiB free"),
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


class ManagementLibrary:
    """Answers as NVIDIA's management library does on a machine with these cards, by UUID."""

    cards: ClassVar = {"GPU-a": (8 * GIB, (9, 0)), "GPU-b": (4 * GIB, (8, 0))}

    def __init__(self, name: str) -> None:
        assert name == "libnvidia-ml.so.1"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            def write(place: Any, value: Any) -> int:
                place._obj.value = value
                return 0

            cards = list(self.cards.values())
            handle = arguments and getattr(arguments[0], "value", None)
            match name:
                case "nvmlDeviceGetCount_v2":
                    return write(arguments[0], len(cards))
                case "nvmlDeviceGetHandleByIndex_v2":
                    return write(arguments[1], 1 + arguments[0]) if arguments[0] < len(cards) else 2
                case "nvmlDeviceGetHandleByUUID":
                    known = list(self.cards)
                    uuid = arguments[0].decode()
                    return write(arguments[1], 1 + known.index(uuid)) if uuid in known else 6
                case "nvmlDeviceGetMemoryInfo":
                    arguments[1]._obj.free = cards[handle - 1][0]
                case "nvmlDeviceGetName":
                    arguments[1].value = b"card"
                case "nvmlDeviceGetCudaComputeCapability":
                    for place, number in zip(arguments[1:], cards[handle - 1][1], strict=True):
                        write(place, number)
            return 0

        return call


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, [8, 4]),
        ("1,0", [4, 8]),
        ("GPU-b", [4]),
        ("1,7,0", [4]),
        ("GPU-a,GPU-x,GPU-b", [8]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_cards_are_those_of_cuda(monkeypatch: pytest.MonkeyPatch, visible: str | None, free: list[int]) -> None:
    monkeypatch.setattr(ctypes, "CDLL", ManagementLibrary)
    found = read_cards(visible)
    assert [card.free_bytes // GIB for card in found] == free
    assert {card.capability for card in found} <= {(9, 0), (8, 0)}


def test_a_machine_without_the_driver_has_no_cards() -> None:
    assert read_host_facts(cards=True).cards == () or Path("/dev/nvidiactl").exists()
