"""KV groups of one small tensor, and a strategy that draws some of any kinds."""

from __future__ import annotations

from hypothesis import strategies as st

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.types.kv import CompressedSpec, FullSpec, KVCacheGroupSpec, KVTensorSpec, StateSpec, WindowSpec
from pypto_serving.types.tier import TransferJob


def tensor(ratio: int = 1) -> KVTensorSpec:
    return KVTensorSpec(name="t", layers=(0,), dtype="float32", row_shape=(1,), ratio=ratio)


def group(kind: type[KVCacheGroupSpec], block_size: int, **values: int) -> KVCacheGroupSpec:
    return kind(name=kind.__name__, block_size=block_size, tensors=(tensor(),), **values)


def blocks_in_use(kv: KVCacheManager) -> tuple[int, ...]:
    """Return how many blocks of each group are referred to."""
    return tuple(group.pool.num_blocks - group.pool.num_free for group in kv.groups)


GROUPS = st.lists(
    st.one_of(
        st.builds(lambda b: group(FullSpec, b), st.sampled_from([1, 2, 4, 8])),
        st.builds(lambda b, m: group(CompressedSpec, b * m), st.sampled_from([1, 2]), st.sampled_from([2, 4])),
        st.builds(lambda b, w: group(WindowSpec, b, window=w), st.sampled_from([1, 2, 4]), st.integers(1, 9)),
        st.builds(
            lambda b, p, o: group(StateSpec, b, period=p, overlap=o),
            st.sampled_from([1, 2, 4, 6, 8]),
            st.integers(1, 9),
            st.integers(0, 9),
        ),
    ),
    min_size=1,
    max_size=4,
).map(lambda groups: tuple(g.__class__(**{**_fields(g), "name": f"g{i}"}) for i, g in enumerate(groups)))


def _fields(g: KVCacheGroupSpec) -> dict[str, object]:
    return {name: getattr(g, name) for name in g.__struct_fields__}


def take_jobs(kv: KVCacheManager, now_s: float) -> list[TransferJob]:
    """Plan demotions as a turn of the core does, and take the jobs that follow."""
    kv.tiers.demotions.plan(now_s)
    return kv.tiers.transfers.take_jobs(now_s)
