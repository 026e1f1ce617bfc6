"""Caches that carry a block: one class per cache kind of mlx-lm, chosen by `carry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..errors import UnsupportedTargetError
from .block import Block, BlockCache, Positions
from .kv import KVBlock

# Exact classes, not subclasses: a subclass may store its rows in another way.
KINDS: dict[type, Callable[[Any], BlockCache]] = {
    KVCache: KVBlock,
    QuantizedKVCache: KVBlock,
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


__all__ = ["KINDS", "Block", "BlockCache", "KVBlock", "Positions", "carry"]
