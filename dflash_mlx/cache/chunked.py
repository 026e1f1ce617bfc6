"""Chunked attention: a token sees its own chunk only, so rows of earlier chunks are dead as soon as it begins.

Carries chains. The one model that keeps such a cache builds its mask itself from `start_position` and `offset`, as a
run of consecutive positions; a tree needs that mask built from the nodes' positions and ancestors instead.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from ..errors import UnsupportedTargetError
from .block import Block
from .buffer import RowBuffer


class ChunkedBlock:
    """Carries a chain over mlx-lm's ChunkedKVCache, whose arrays it takes at the first `open`."""

    def __init__(self, cache: ChunkedKVCache):
        self._cache = cache
        stored = cache.offset - cache.start_position
        ordered = [None if x is None else x[..., :stored, :] for x in (cache.keys, cache.values)]
        self._rows = RowBuffer(*ordered, end=cache.offset, retain=cache.chunk_size)
        self._base = cache.offset
        self.maybe_trim_front()

    # What the model sees.

    @property
    def offset(self) -> int:
        return self._rows.end

    def maybe_trim_front(self) -> None:
        """From here to the next call, fetches begin with the chunk that the next position stands in."""
        size, rows = self._cache.chunk_size, self._rows
        self.start_position = max(rows.gap, rows.end // size * size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._rows.append(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self._rows.fetch(self.start_position - self._rows.gap)

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
        if not block.is_chain:
            raise UnsupportedTargetError("Chunked attention verifies chains only; propose one branch.")
        self._cache.keys = self._cache.values = None
        self._rows.make_room(block.size)
        self._base = self._rows.end
        self.maybe_trim_front()

    def commit(self, path: tuple[int, ...]) -> None:
        self._rows.keep_path(self._base, path)

    def rewind(self, rows: int) -> None:
        self._rows.cut(self._base + rows)

    def snapshot(self) -> Any:
        """References to the arrays: the next write copies them once per snapshot that lives, chunk + slack rows."""
        return self._rows.snapshot()

    def restore(self, snapshot: Any) -> None:
        self._rows.restore(snapshot)
        self._base = self._rows.end
        self.maybe_trim_front()

    def release(self) -> ChunkedKVCache:
        """At most chunk_size rows: what mlx-lm's own cache trims itself to at the beginning of its next forward."""
        cache = self._cache
        cache.keys, cache.values = self._rows.exported()
        cache.offset = self._rows.end
        cache.start_position = 0 if cache.keys is None else cache.offset - cache.keys.shape[2]
        return cache

    def arrays(self) -> list[mx.array]:
        return [] if self._rows.keys is None else [self._rows.keys, self._rows.values]
