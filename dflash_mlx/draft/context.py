"""The draft context holds the draft's own K/V of the last committed tokens, each computed once, and nothing else.

A layer's rows lie in one buffer with room behind them. The block of a proposal is written into that room, where it
does not count and is overwritten by what is committed next. When the room is used up the last rows move to the front:
memory is bounded, a token costs amortised O(1). Every write replaces the only reference to the array before it, so
that MLX writes in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

STEP = 256


class DraftContext:
    """K/V of the draft's layers over committed tokens.

    position: the absolute position of the next token. limits: per layer, how many of the last tokens it attends.
    spare: rows kept beyond the limit, so that as many tokens can be dropped again without loss.
    """

    def __init__(self, limits: Sequence[int], spare: int, position: int = 0):
        self.position = position
        self._layers = [_Rows(limit, limit + spare) for limit in limits]

    @property
    def bound(self) -> int:
        """Rows beyond which an older token is not kept by any layer."""
        return max(rows.keep for rows in self._layers)

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Put the K/V [1, H, n, D] of the last committed tokens behind a layer's rows; `advance` follows the last."""
        rows = self._layers[layer]
        skipped = max(0, keys.shape[2] - rows.keep)
        rows.write(keys[:, :, skipped:], values[:, :, skipped:])
        rows.size += keys.shape[2] - skipped

    def advance(self, num_tokens: int) -> None:
        """Count committed tokens, those that were too old to be appended too."""
        self.position += num_tokens

    def with_block(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """A layer's K/V of [context | block] with the block's [1, H, L, D]; the block is not kept."""
        rows = self._layers[layer]
        rows.write(keys, values)
        first, end = rows.size - self.length(layer), rows.size + keys.shape[2]
        return rows.keys[:, :, first:end], rows.values[:, :, first:end]

    def length(self, layer: int) -> int:
        """The committed tokens that a layer attends."""
        rows = self._layers[layer]
        return min(rows.size, rows.limit)

    def trim(self, num_tokens: int) -> None:
        """Drop the last tokens; those of the past that they had pushed out do not come back."""
        if not 0 <= num_tokens <= self.position:
            raise ValueError(f"{num_tokens} tokens cannot be dropped; the draft context is at {self.position}.")
        self.position -= num_tokens
        for rows in self._layers:
            rows.size = max(0, rows.size - num_tokens)

    def arrays(self) -> list[mx.array]:
        """What may be pending."""
        return [x for rows in self._layers for x in (rows.keys, rows.values) if x is not None]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())


class _Rows:
    """One layer's buffer: `size` committed rows and room behind them; the last `keep` survive a move."""

    def __init__(self, limit: int, keep: int):
        self.limit, self.keep = limit, keep
        self.size = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write rows [1, H, n, D] behind the committed ones."""
        n = keys.shape[2]
        if self.keys is None:
            self.keys, self.values = _moved(None, 0, 0, n + STEP, keys), _moved(None, 0, 0, n + STEP, values)
        elif self.size + n > self.keys.shape[2]:
            kept = min(self.size, self.keep)
            # A quarter of what moves, at the least, is gained as room: at most four rows move for a row appended.
            capacity = kept + n + max(STEP, kept // 4)
            self.keys = _moved(self.keys, self.size - kept, self.size, capacity, keys)
            self.values = _moved(self.values, self.size - kept, self.size, capacity, values)
            self.size = kept
        self.keys[:, :, self.size : self.size + n] = keys
        self.values[:, :, self.size : self.size + n] = values


def _moved(x: mx.array | None, first: int, end: int, capacity: int, like: mx.array) -> mx.array:
    """Rows first..end of a buffer at the front of a new one."""
    shape = (*like.shape[:2], capacity - (end - first), like.shape[3])
    room = mx.zeros(shape, like.dtype)
    return room if x is None else mx.concatenate([x[:, :, first:end], room], axis=2)
