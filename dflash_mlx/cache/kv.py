"""Full attention: the block is appended; commit moves the offset, for a tree after writing the path's rows in order.

Rows at and behind the offset are dead, so a chain needs no work on the arrays at all. A tree's rows are held beside the
arrays until commit: reading them out of the arrays in the graph that writes there would make MLX copy the whole cache.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..errors import TargetStateError
from .block import Block, Positions, is_prefix, tree_mask


class KVBlock:
    """Carries a block over mlx-lm's KVCache or QuantizedKVCache, whose arrays stay where they are."""

    def __init__(self, cache: KVCache | QuantizedKVCache):
        self._cache = cache
        self._written: tuple[mx.array, mx.array] | None = None
        self.open(Block.chain(1))

    # What the model sees.

    @property
    def offset(self) -> int:
        return self._cache.offset if self._positions is None else self._positions

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if self._block.is_chain:
            return self._cache.make_mask(N, return_array=return_array, window_size=window_size)
        return tree_mask(self._block, self._base, window=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        if not self._block.is_chain:
            self._written = keys, values
        return self._cache.update_and_fetch(keys, values)

    # Models also put dependencies on a cache's arrays by assigning to them; they must reach the cache itself.

    @property
    def keys(self) -> Any:
        return self._cache.keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._cache.keys = keys

    @property
    def values(self) -> Any:
        return self._cache.values

    @values.setter
    def values(self, values: Any) -> None:
        self._cache.values = values

    def __getattr__(self, name: str) -> Any:
        # `bits` and `group_size` must exist only where the cache is quantized: models test for them.
        return getattr(self._cache, name)

    # What the engine sees.

    def open(self, block: Block) -> None:
        self._block, self._base = block, self._cache.offset
        self._positions = None if block.is_chain else Positions(self._base, block)
        self._written = None

    def commit(self, path: tuple[int, ...]) -> None:
        if self._written is not None and not is_prefix(path):
            taken = mx.array(path)
            self._cache.offset = self._base
            self._cache.update_and_fetch(*(mx.take(x, taken, axis=2) for x in self._written))
        self._written = None
        self.rewind(len(path))

    def rewind(self, rows: int) -> None:
        if rows == 0 and len({x.shape[2] for x in self.arrays()}) > 1:
            raise TargetStateError("A cache was interrupted while it grew; start from a fresh prompt cache.")
        # A cache that the forward never reached, as some models have, stays where it is.
        self._cache.offset = min(self._cache.offset, self._base + rows)

    def snapshot(self) -> int:
        """The offset: later rounds write behind it. Coming back to an older snapshot ends the younger ones."""
        return self._cache.offset

    def restore(self, snapshot: int) -> None:
        self._cache.offset = snapshot
        self.open(Block.chain(1))

    def release(self) -> KVCache | QuantizedKVCache:
        return self._cache

    def arrays(self) -> list[mx.array]:
        return [array for _, array in tree_flatten([self._cache.keys, self._cache.values]) if array is not None]
