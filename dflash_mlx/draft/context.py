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
        if keys.shape[2] > rows.keep:
            keys, values = keys[:, :, -rows.keep :], values[:, :, -rows.keep :]
        rows.write(keys, values)
        rows.size += keys.shape[2]

    def advance(self, num_tokens: int) -> None:
        """Count committed tokens, those that were too old to be appended too."""
        self.position += num_tokens

    def with_block(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """A layer's K/V of [context | block] with the block's [1, H, L, D]; the block is not kept."""
        rows = self._layers[layer]
        rows.write(keys, values)
        return rows.read(rows.size - self.length(layer), rows.size + keys.shape[2])

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

    def rows(self) -> list[tuple[mx.array, mx.array]]:
        """Per layer the K/V [1, H, n, D] that it attends, oldest first."""
        return [
            rows.read(rows.size - self.length(layer), rows.size)
            for layer, rows in enumerate(self._layers)
            if rows.buffers
        ]

    def arrays(self) -> list[mx.array]:
        """What may be pending."""
        return [x for rows in self._layers for x in rows.buffers]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays())


class _Rows:
    """One layer's buffers: `size` committed rows and room behind them; the last `keep` survive a move."""

    def __init__(self, limit: int, keep: int):
        self.limit, self.keep = limit, keep
        self.size = 0
        self.buffers: list[mx.array] = []  # keys, values

    def write(self, *rows: mx.array) -> None:
        """Write keys and values [1, H, n, D] behind the committed ones."""
        n = rows[0].shape[2]
        if not self.buffers:
            self.buffers = [_room(x, n + STEP) for x in rows]
        elif self.size + n > self.buffers[0].shape[2]:
            self._move(n)
        for i, x in enumerate(rows):
            self.buffers[i][:, :, self.size : self.size + n] = x

    def read(self, first: int, end: int) -> tuple[mx.array, mx.array]:
        keys, values = self.buffers
        return keys[:, :, first:end], values[:, :, first:end]

    def _move(self, n: int) -> None:
        """Make room for n rows; a quarter of what moves is gained besides, so four rows move for one appended."""
        kept = min(self.size, self.keep)
        for i, x in enumerate(self.buffers):
            room = _room(x, n + max(STEP, kept // 4))
            self.buffers[i] = mx.concatenate([x[:, :, self.size - kept : self.size], room], axis=2)
        self.size = kept


def _room(like: mx.array, rows: int) -> mx.array:
    return mx.zeros((*like.shape[:2], rows, like.shape[3]), like.dtype)
