"""The causal convolution of a node runs over its own ancestors, reaching into the stored history."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import last_rows, windows


@dataclass(frozen=True)
class History:
    """What a convolution saw: `keep` stored rows, then the block's. rows: [B, keep + N, C]."""

    rows: mx.array
    keep: int

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The history behind the path's last node, [B, keep, C]."""
        return mx.take(self.rows, mx.array(last_rows(path, self.keep), mx.int32), axis=1)


def with_history(x: mx.array, stored: mx.array | None, keep: int) -> History:
    """The block's rows x [B, N, C] behind the stored ones [B, keep, C]; none stored means zeros."""
    if stored is None:
        stored = mx.zeros((x.shape[0], keep, x.shape[2]), x.dtype)
    return History(mx.concatenate([stored, x], axis=1), keep)


def causal_conv(history: History, weight: mx.array, bias: mx.array | None, block: Block) -> mx.array:
    """Depthwise causal convolution of every node over its own path, [B, N, C] in the dtype of the rows.

    weight: [C, K, 1] as in nn.Conv1d, K = keep + 1; bias [C]. out_i = Σ_t weight_t row(window_i,t), summed in float32
    and cast before the bias is added, which is what mlx's kernels do.
    """
    taps = mx.take(history.rows, windows(block, history.keep + 1), axis=1).astype(mx.float32)
    out = (taps * weight.squeeze(-1).T.astype(mx.float32)).sum(axis=2).astype(history.rows.dtype)
    return out if bias is None else out + bias


def shifted(history: History, block: Block) -> mx.array:
    """Every node's predecessor on its own path, [B, N, C]; the history keeps one row."""
    return mx.take(history.rows, windows(block, 2)[:, 0], axis=1)
