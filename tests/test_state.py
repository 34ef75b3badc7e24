"""The K/V cache: shape, poison, and contents that do not depend on its size or device."""

from __future__ import annotations

import pytest
import torch

from triton_mega.spec import TINY
from triton_mega.state import KVCache


def test_new_cache_is_poison_in_every_row() -> None:
    cache = KVCache.allocate(TINY.talker, 7)
    assert cache.max_positions == 7
    for tensor in (cache.k, cache.v):
        assert tensor.shape == (3, 2, 7, 16)
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert tensor.isnan().all()
    assert cache.k.data_ptr() != cache.v.data_ptr()
    assert KVCache.allocate(TINY.talker, 7, dtype=torch.float32).v.dtype == torch.float32


@pytest.mark.parametrize("rows", [0, -1, 513])
def test_size_must_fit_the_spec(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"max_positions: expected 1 to 512 .*, got {rows}"):
        KVCache.allocate(TINY.talker, rows)
    KVCache.allocate(TINY.talker, 512)


def test_random_history_ends_in_poison() -> None:
    cache = KVCache.allocate(TINY.talker, 9)
    cache.k.zero_()
    cache.fill_random(5, seed=1)
    for tensor in (cache.k, cache.v):
        assert torch.isfinite(tensor[:, :, :5]).all()
        assert tensor[:, :, 5:].isnan().all()
        assert 0.9 < tensor[:, :, :5].float().std() < 1.1
    assert not torch.equal(cache.k[:, :, :5], cache.v[:, :, :5])
    cache.fill_random(0, seed=1)
    assert cache.k.isnan().all()


def test_random_history_depends_on_seed_and_rows_alone() -> None:
    small, large = (KVCache.allocate(TINY.talker, rows) for rows in (6, 40))
    wide = KVCache.allocate(TINY.talker, 6, dtype=torch.float32)
    for cache in (small, large, wide):
        cache.fill_random(5, seed=1)
    assert torch.equal(small.k[:, :, :5], large.k[:, :, :5])
    assert torch.equal(small.v[:, :, :5], wide.v[:, :, :5].bfloat16())
    small.fill_random(5, seed=2)
    assert not torch.equal(small.k[:, :, :5], large.k[:, :, :5])


def test_copy_takes_the_rows_over() -> None:
    source = KVCache.allocate(TINY.predictor, 4)
    source.fill_random(3, seed=1)
    copy = KVCache.allocate(TINY.predictor, 4, dtype=torch.float32)
    copy.copy_from(source)
    assert torch.equal(copy.k[:, :, :3].bfloat16(), source.k[:, :, :3])
    assert torch.equal(copy.v[:, :, :3].bfloat16(), source.v[:, :, :3])
    assert copy.k[:, :, 3:].isnan().all()
    source.k.zero_()
    assert copy.k[:, :, :3].any()
