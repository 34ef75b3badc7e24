"""What the torch backends that keep a view of the cache of their own need to know about it."""

from __future__ import annotations

from triton_mega.state import KVCache


def cache_version(cache: KVCache) -> tuple[int, int]:
    """Returns a pair that changes whenever the cache is written in place (graph replays aside).

    Raises:
        ValueError: the cache was allocated under ``torch.inference_mode()``, where torch does not
            count writes.
    """
    if cache.k.is_inference() or cache.v.is_inference():
        raise ValueError(
            "cache: allocated under torch.inference_mode(); make the backend outside of it "
            "(running it inside is fine)"
        )
    return cache.k._version, cache.v._version
