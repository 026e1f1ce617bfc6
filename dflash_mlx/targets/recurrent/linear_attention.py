"""State with decay is a sum over ancestors: S_i = e^{c_i0} S_0 + Σ_j e^{c_ij} v_j k_jᵀ.

c_ij is the sum of the log decays behind node j up to node i. It is always added up, never a difference of sums from
the anchor (which cancels after one strong decay) and never a quotient of products (which overflows). Off the path it
is −∞ before the exponential. All in float32. Mamba-2 and lightning attention are this sum; the delta rules solve for
their v first (gated_delta, rwkv7).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import hops, strict_ancestors


@dataclass(frozen=True)
class Tape:
    """What the states of a block follow from.

    state: [B, H, Dv, Dk] before the block, None for zeros. writes: pairs of keys [B, G, N, Dk], each shared by H / G
    heads, and values [B, H, N, Dv]. log_decay: [B, H, N], or per key channel [B, H, N, Dk] with G = H.
    """

    state: mx.array | None
    writes: tuple[tuple[mx.array, mx.array], ...]
    log_decay: mx.array

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, float32 [B, H, Dv, Dk]."""
        nodes = mx.array(path, mx.int32)
        log_decay = mx.take(self.log_decay, nodes, axis=2)
        kept = mx.exp(log_decay.sum(axis=2, keepdims=True))
        since = mx.exp(mx.cumsum(log_decay, axis=2, reverse=True, inclusive=False))
        keys, values = [], []
        for k, v in self.writes:
            k, v = mx.take(k, nodes, axis=2), mx.take(v, nodes, axis=2)
            keys.append(k if since.ndim == 3 else k * since)
            values.append(v * since[..., None] if since.ndim == 3 else v)
        kept = kept[..., None] if kept.ndim == 3 else kept
        return _plus_outer(self.state, kept, mx.concatenate(values, axis=2), mx.concatenate(keys, axis=2))


def _plus_outer(state: mx.array | None, kept: mx.array, values: mx.array, keys: mx.array) -> mx.array:
    """kept · state + Σ over rows of value ⊗ key: [B, H, P, Dv] and [B, G, P, Dk] to [B, H, Dv, Dk]."""
    B, H, P, Dv = values.shape
    G, Dk = keys.shape[1], keys.shape[3]
    columns = values.swapaxes(2, 3).reshape(B, G, H // G * Dv, P)
    if state is None:
        return (columns @ keys).reshape(B, H, Dv, Dk)
    # One pass over the state, which is most of what a commit costs.
    return mx.addmm((kept * state).reshape(B, G, -1, Dk), columns, keys).reshape(B, H, Dv, Dk)


def path_sums(x: mx.array, block: Block) -> mx.array:
    """Sum over each node and its ancestors; the nodes are axis 2 of [B, H, N, ...].

    Added up, not multiplied by the ancestor matrix: a matmul may run in reduced precision on some devices.
    """
    if block.is_chain:
        return mx.cumsum(x, axis=2)
    beyond = mx.zeros_like(x[:, :, :1])
    for ancestors in hops(block):
        x = x + mx.take(mx.concatenate([x, beyond], axis=2), ancestors, axis=2)
    return x


def decay_between(log_decay: mx.array, block: Block) -> tuple[mx.array, mx.array]:
    """Decay from node j to node i, 0 where j is no ancestor of i; and its logarithm, which is 0 there.

    log_decay: [B, H, N] or [B, H, N, Dk]; returns [B, H, N, N] or [B, H, N, N, Dk] twice.
    """
    by_channel = log_decay.ndim == 4
    strict, on_path = (m[..., None] if by_channel else m for m in (strict_ancestors(block), block.ancestors))
    logs = path_sums(mx.where(strict, mx.expand_dims(log_decay, 3), 0), block)
    return mx.exp(mx.where(on_path, logs, -mx.inf)), logs


def products(rows: mx.array, columns: mx.array, decay: mx.array) -> mx.array:
    """(row_i · column_j) with the decay between them, [B, H, N, N].

    rows, columns: [B, G, N, Dk]; decay [B, H, N, N], or per channel [B, H, N, N, Dk] with G = H.
    """
    if decay.ndim == 4:
        return per_head(rows @ columns.swapaxes(2, 3), decay.shape[1]) * decay
    return (rows[:, :, :, None] * columns[:, :, None] * decay).sum(axis=-1)


def per_head(x: mx.array, heads: int) -> mx.array:
    """Repeat the shared heads of [B, G, ...] to [B, heads, ...]."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)


def read_state(state: mx.array, rows: mx.array) -> mx.array:
    """state · row for every row: [B, H, Dv, Dk] and [B, G, N, Dk] to [B, H, N, Dv], one pass over the state."""
    B, H, Dv, Dk = state.shape
    G, N = rows.shape[1:3]
    read = rows @ state.reshape(B, G, H // G * Dv, Dk).swapaxes(2, 3)
    return read.reshape(B, G, N, H // G, Dv).swapaxes(2, 3).reshape(B, H, N, Dv)


def linear_attention(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, state: mx.array | None, block: Block
) -> tuple[mx.array, Tape]:
    """Every node's y_i = S_i q_i with S_i = e^{log_decay_i} S_parent + v_i k_iᵀ.

    q, k: [B, N, G, Dk]; v: [B, N, H, Dv]; log_decay: [B, N, H]; state: [B, H, Dv, Dk] or None.
    Returns y float32 [B, N, H, Dv] and the tape.
    """
    q, k, v = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v))
    log_decay = log_decay.astype(mx.float32).swapaxes(1, 2)
    y = products(q, k, decay_between(log_decay, block)[0]) @ v
    if state is not None:
        y = y + mx.exp(path_sums(log_decay, block))[..., None] * read_state(state.astype(mx.float32), q)
    return y.swapaxes(1, 2), Tape(state, ((k, v),), log_decay)
