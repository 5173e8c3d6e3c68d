"""The block size that resolve() chooses where blocks go to a remote store, and what it says of one that is given."""

from __future__ import annotations

import pytest

from pypto_serving.types.kv import FullSpec, KVTensorSpec
from pypto_serving.types.model import ModelSpec
from tests.setup.small import FULL, WINDOW, make_model, make_resolved, setting

POOL = "mooncake://a:1"


def rows(width: int) -> ModelSpec:
    """A model with one group whose rows take `width` * 4 bytes per token, in blocks of 32."""
    tensors = (KVTensorSpec(name="kv", layers=(0, 1), dtype="bfloat16", row_shape=(width,)),)
    group = FullSpec(name="kv", block_size=32, tensors=tensors)
    return make_model((group,), max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("width", "given", "size"),
    [
        (2048, {}, 32),
        (2047, {}, 64),
        (256, {}, 256),
        (64, {}, 1024),
        (8, {}, 1024),
        (256, {"max_model_len": 511}, 128),
        (256, {"max_model_len": 512}, 256),
        (256, {"max_model_len": 50}, 32),
    ],
)
def test_blocks_are_large_enough_for_a_pool(width: int, given: dict[str, int], size: int) -> None:
    resolved = make_resolved(rows(width), kv_remote=POOL, **given)
    (group,) = resolved.engine.cache.groups
    value, reason = setting(resolved, "block-size")
    assert (group.block_size, value) == (size, size)
    assert resolved.memory.groups[0].block_bytes == group.block_bytes == size * width * 4
    assert ("full speed" in reason) == (width < 2048)
    assert ("half of max-model-len" in reason) == (group.block_bytes < 256 << 10)
    assert resolved.warnings == ()


def test_a_given_block_size_stays_with_a_warning_if_it_is_small() -> None:
    small = make_resolved(rows(256), kv_remote=POOL, block_size=32)
    assert setting(small, "block-size") == (32, "given by --block-size")
    assert small.warnings == (
        "--block-size 32 makes blocks of 32 KiB; --kv-remote moves those of 256 KiB and more at full speed",
    )
    assert make_resolved(rows(2048), kv_remote=POOL, block_size=32).warnings == ()
    assert make_resolved(rows(256), block_size=32).warnings == ()


def test_blocks_of_several_groups_keep_their_sizes() -> None:
    assert make_resolved(make_model((FULL, WINDOW)), kv_remote=POOL).engine.cache.groups == (FULL, WINDOW)
