"""The draft context holds the draft's own K/V of the last committed tokens, each computed once.

Rows live in one buffer per layer with room behind them: the block of a proposal is written into that room and is
overwritten by what is committed next. When the room is used up the last `limit` rows move to the front, so memory
is bounded and an append costs amortised O(1) per token.
"""

from __future__ import annotations

import mlx.core as mx

STEP = 256


class DraftContext:
    """K/V of the draft's layers over committed tokens.

    position: the absolute position of the next token. limit: rows kept for sure; older ones may be dropped.
    """

    def __init__(self, num_layers: int, limit: int, position: int = 0):
        self.limit = limit
        self.position = position
        self.size = 0  # committed rows in the buffers
        self._buffers: list[list[mx.array]] = [[] for _ in range(num_layers)]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows behind the committed ones; call before the rows of all layers are written."""
        if not self._buffers[0]:
            return
        capacity = self._buffers[0][0].shape[2]
        if self.size + rows <= capacity:
            return
        keep = min(self.size, self.limit)
        room = -(-(rows + STEP) // STEP) * STEP
        # Grow while the limit is not reached; from then on every move gains as much room as it copies.
        room = max(room, min(keep, self.limit))
        for buffer in self._buffers:
            for i, x in enumerate(buffer):
                kept = x[:, :, self.size - keep : self.size]
                buffer[i] = mx.concatenate([kept, mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype)], axis=2)
        self.size = keep

    def write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Put rows [1, H, n, D] behind the committed ones; they count only after `advance`."""
        buffer = self._buffers[layer]
        if not buffer:
            room = -(-(keys.shape[2] + STEP) // STEP) * STEP
            buffer += [mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype) for x in (keys, values)]
        end = self.size + keys.shape[2]
        buffer[0][:, :, self.size : end] = keys
        buffer[1][:, :, self.size : end] = values

    def read(self, layer: int, first: int, rows: int) -> tuple[mx.array, mx.array]:
        """Committed rows from `first` on and `rows` rows written behind them, each [1, H, ., D]."""
        keys, values = self._buffers[layer]
        return keys[:, :, first : self.size + rows], values[:, :, first : self.size + rows]

    def advance(self, rows: int, skipped: int = 0) -> None:
        """The last `rows` rows written are committed; `skipped` tokens before them were too old to be kept."""
        self.size += rows
        self.position += rows + skipped

    def restart(self) -> None:
        """Forget all rows; the position stays."""
        self.size = 0

    def arrays(self) -> list[mx.array]:
        return [x for buffer in self._buffers for x in buffer]
