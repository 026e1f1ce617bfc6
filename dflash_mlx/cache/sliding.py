"""Sliding window: rows stand in a line, the mask makes the window, and no committed row is overwritten.

mlx-lm's RotatingKVCache writes a ring, where a block would overwrite rows that a rolled-back round still needs. Here
the rows stay in order of position (buffer.py). Every node attends exactly what one-row decoding by mlx-lm attends at
its position p: the positions above p − max_size, or, where the first `keep` positions are never evicted
(`max_kv_size`), those and the positions above p − (max_size − keep).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from ..errors import UnsupportedTargetError
from .block import Block, Positions
from .buffer import RowBuffer


class SlidingBlock:
    """Carries a block over mlx-lm's RotatingKVCache, whose arrays it takes at the first `open`."""

    def __init__(self, cache: RotatingKVCache):
        if cache.keep >= cache.max_size:
            raise UnsupportedTargetError(
                f"A rotating cache of {cache.max_size} tokens cannot keep its first {cache.keep}; raise max_kv_size."
            )
        self._cache = cache
        self._size, self._keep = cache.max_size, cache.keep
        ordered = [None if x is None else cache._temporal_order(x) for x in (cache.keys, cache.values)]
        self._rows = RowBuffer(*ordered, end=cache.offset, retain=cache.max_size, keep=cache.keep)
        self._first_row = 0
        self._stand_before(Block.chain(1))

    # What the model sees.

    @property
    def offset(self) -> int:
        return self._rows.end if self._positions is None else self._positions

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Its columns are the rows that `update_and_fetch` is about to return, whatever the window asked for."""
        window = min(window_size or self._size, self._size)
        if self._keep and window < self._size:
            raise UnsupportedTargetError(
                f"A window of {window} tokens over a rotating cache of {self._size} that keeps its first {self._keep} "
                "has no meaning in mlx-lm; generate without max_kv_size."
            )
        base = self._rows.end
        block = self._block if self._block.size == N else Block.chain(N)
        if N == 1 and self._rows.end_row - self._oldest_row() <= min(base, window - 1):
            return None
        if block.is_chain and base + N <= window and not return_array:
            return "causal"
        return _window_mask(block, base, self._fetched_positions(), window - self._keep, self._keep)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._first_row = self._oldest_row()
        self._rows.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` returned; layers that share K/V read it here."""
        return self._rows.fetch(self._first_row)

    @property
    def keys(self) -> mx.array | None:
        return self._rows.keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._rows.keys = keys

    @property
    def values(self) -> mx.array | None:
        return self._rows.values

    @values.setter
    def values(self, values: mx.array) -> None:
        self._rows.values = values

    # What the engine sees.

    def open(self, block: Block) -> None:
        self._cache.keys = self._cache.values = None
        self._rows.make_room(block.size)
        self._stand_before(block)

    def commit(self, path: tuple[int, ...]) -> None:
        self._rows.keep_path(self._base, path)

    def rewind(self, rows: int) -> None:
        self._rows.cut(self._base + rows)

    def snapshot(self) -> Any:
        """References to the arrays: the next write copies them once per snapshot that lives, window + slack rows."""
        return self._rows.snapshot()

    def restore(self, snapshot: Any) -> None:
        self._rows.restore(snapshot)
        self._stand_before(Block.chain(1))

    def release(self) -> RotatingKVCache:
        """A ring of at most max_size rows whose oldest row stands first and goes first, as mlx-lm leaves it."""
        cache = self._cache
        cache.keys, cache.values = self._rows.exported()
        cache.offset = self._rows.end
        cache._idx = 0 if cache.keys is None else cache.keys.shape[2]
        return cache

    def arrays(self) -> list[mx.array]:
        return [] if self._rows.keys is None else [self._rows.keys, self._rows.values]

    def _stand_before(self, block: Block) -> None:
        self._block, self._base = block, self._rows.end
        self._positions = None if block.is_chain else Positions(self._base, block)

    def _oldest_row(self) -> int:
        """First row that the next position can see. Sinks stand at the front, so with them it is the first of all,
        and the mask hides the rows in between."""
        return 0 if self._keep else max(0, self._rows.end_row - (self._size - 1))

    def _fetched_positions(self) -> mx.array:
        """Positions of the committed rows from `_oldest_row` on, int [S]."""
        gap, base = self._rows.gap, self._rows.end
        if not (self._keep and gap):
            return mx.arange(self._oldest_row() + gap, base)
        return mx.concatenate([mx.arange(self._keep), mx.arange(self._keep + gap, base)])


def _window_mask(block: Block, base: int, committed: mx.array, window: int, keep: int) -> mx.array:
    """Bool [N, S + N]: the committed positions [S] and the nodes that each node attends.

    A node sees itself, its ancestors and the committed tokens, each within `window` positions or among the first
    `keep`.
    """
    depth = block.depth_array[:, None]
    nodes = base + block.depth_array[None]
    committed = committed[None]
    return mx.concatenate(
        [
            (base + depth - committed < window) | (committed < keep),
            block.ancestors & ((base + depth - nodes < window) | (nodes < keep)),
        ],
        axis=1,
    )
