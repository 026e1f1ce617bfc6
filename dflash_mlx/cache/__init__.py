"""Caches that carry a block: one class per cache kind of mlx-lm, chosen by `carry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import UnsupportedTargetError
from .block import Block, BlockCache, Positions
from .chunked import ChunkedBlock
from .kv import KVBlock
from .lists import ListBlock
from .recurrent import RecurrentBlock
from .sliding import SlidingBlock

# Exact classes, not subclasses: a subclass may store its rows in another way.
KINDS: dict[type, Callable[[Any], BlockCache]] = {
    KVCache: KVBlock,
    QuantizedKVCache: KVBlock,
    RotatingKVCache: SlidingBlock,
    ChunkedKVCache: ChunkedBlock,
    ArraysCache: RecurrentBlock,
    CacheList: lambda cache: ListBlock(cache, [carry(member) for member in cache.caches]),
}


def carry(cache: Any) -> BlockCache:
    """The block cache for one of mlx-lm's cache objects; it takes the object over until `release`."""
    kind = KINDS.get(type(cache))
    if kind is None:
        raise UnsupportedTargetError(
            f"This target keeps a {type(cache).__name__}, which cannot be rolled back exactly yet; "
            "generate without a draft."
        )
    return kind(cache)


__all__ = [
    "KINDS",
    "Block",
    "BlockCache",
    "ChunkedBlock",
    "KVBlock",
    "ListBlock",
    "Positions",
    "RecurrentBlock",
    "SlidingBlock",
    "carry",
]
