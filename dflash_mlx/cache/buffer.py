"""Rows stand in order of position, and none is overwritten while the positions that come next can still see it.

What sliding and chunked attention share: a block is written behind the committed rows; where there is no room left,
the last rows that anyone can still see move to the front of new arrays. That costs (retain + step) rows once every
`step` tokens, so it is amortised O(1) per token, and memory never exceeds retain + step + the widest block.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .block import is_prefix


class RowBuffer:
    """Keys and values of positions 0..keep − 1 (sinks) and, behind them, of the last positions before `end`.

    keys, values: [B, H, rows, D], D may differ; None before the first token. Rows at and behind `end` are dead.
    retain: how many rows before the next position are still needed, the sinks among them. `keys` and `values` can be
    replaced by an equal array (mlx-lm's models chain dependencies that way).
    """

    step = 256

    def __init__(self, keys: mx.array | None, values: mx.array | None, *, end: int, retain: int, keep: int = 0):
        self.keys: Any = keys
        self.values: Any = values
        self.end = end
        self.gap = end - (0 if keys is None else keys.shape[2])
        self._retain, self._keep, self._room = retain, keep, 0
        self._written: tuple[mx.array, mx.array] | None = None

    @property
    def end_row(self) -> int:
        """Row of position `end`; position p ≥ keep stands in row p − gap."""
        return self.end - self.gap

    def make_room(self, rows: int) -> None:
        """Make sure that `rows` rows fit behind `end` without touching those that may still be seen."""
        self._room = room = -(-rows // self.step) * self.step
        self._written = None
        if self.keys is None or self.end_row + rows <= self.keys.shape[2]:
            return
        drop = self._surplus()
        self.keys, self.values = (
            mx.concatenate([*self._parts(x), mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype)], axis=2)
            for x in (self.keys, self.values)
        )
        self.gap += drop

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write [B, H, L, D] behind `end`; `make_room` was called before."""
        self._written = keys, values
        if self.keys is None:
            room = self._room
            self.keys, self.values = (mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype) for x in (keys, values))
        first, last = self.end_row, self.end_row + keys.shape[2]
        assert last <= self.keys.shape[2], "make_room was called for this many rows"
        self.end += keys.shape[2]
        self.keys[..., first:last, :] = keys
        self.values[..., first:last, :] = values

    def fetch(self, first_row: int) -> tuple[mx.array, mx.array]:
        """The rows from `first_row` to `end`, as views."""
        return self.keys[..., first_row : self.end_row, :], self.values[..., first_row : self.end_row, :]

    def keep_path(self, base: int, path: tuple[int, ...]) -> None:
        """Of the block written at position `base` keep the rows of `path` (nodes), in order.

        The rows come from what was appended, not from the arrays: reading there in the graph that writes there would
        make MLX copy the arrays.
        """
        if self._written is not None and not is_prefix(path):
            taken = mx.array(path)
            self.end = base
            self.append(*(mx.take(x, taken, axis=2) for x in self._written))
        self._written = None
        self.cut(base + len(path))

    def cut(self, end: int) -> None:
        """Drop what stands at and behind position `end`."""
        self.end = min(self.end, end)

    def snapshot(self) -> Any:
        """References, no copy. Whoever writes next while the snapshot lives copies the arrays, once."""
        return _handle(self.keys), _handle(self.values), self.end, self.gap

    def restore(self, snapshot: Any) -> None:
        keys, values, self.end, self.gap = snapshot
        self.keys, self.values = _handle(keys), _handle(values)

    def exported(self) -> tuple[mx.array | None, mx.array | None]:
        """Exactly the rows that are still needed, in arrays of their own; evaluated, so that any thread can go on."""
        if self.keys is None or self.end == 0:
            return None, None
        keys, values = (mx.contiguous(mx.concatenate(self._parts(x), axis=2)) for x in (self.keys, self.values))
        mx.eval(keys, values)
        return keys, values

    def _surplus(self) -> int:
        return max(0, self.end_row - self._retain)

    def _parts(self, x: mx.array) -> list[mx.array]:
        drop = self._surplus()
        if not drop:
            return [x[..., : self.end_row, :]]
        behind_sinks = x[..., self._keep + drop : self.end_row, :]
        return [x[..., : self._keep, :], behind_sinks] if self._keep else [behind_sinks]


def _handle(x: mx.array | None) -> mx.array | None:
    """Another name for the same data: assigning to rows of `x` rebinds x alone and leaves this one as it is."""
    return None if x is None else x[...]
