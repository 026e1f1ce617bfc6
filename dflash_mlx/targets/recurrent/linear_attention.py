"""State with decay is a sum over ancestors: S_i = e^{c_i} S_0 + Σ_j e^{c_i − c_j} v_j k_jᵀ.

c_i is the sum of the log decays on the way to node i. The decay between two nodes is always the exponential of a
difference of such sums, masked with −∞ off the path: never a quotient of products, which overflows. All in float32.
Mamba-2 and lightning attention are this sum; the delta rules solve for their v first (gated_delta, rwkv7).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block


@dataclass(frozen=True)
class Tape:
    """What the states of a block follow from.

    state: [B, H, Dv, Dk] before the block, None for zeros. keys: [B, G, N, Dk], each shared by H / G heads.
    values: [B, H, N, Dv]. decay: sums of log decays along the paths, [B, H, N], or per key channel [B, H, N, Dk].
    """

    state: mx.array | None
    keys: mx.array
    values: mx.array
    decay: mx.array

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, float32 [B, H, Dv, Dk]."""
        nodes = mx.array(path, mx.int32)
        keys, values, decay = (mx.take(x, nodes, axis=2) for x in (self.keys, self.values, self.decay))
        last = decay[:, :, -1:]
        since, kept = mx.exp(last - decay), mx.exp(last)
        if decay.ndim == 3:
            return _plus_outer(self.state, kept[..., None], values * since[..., None], keys)
        return _plus_outer(self.state, kept, values, keys * since)


def _plus_outer(state: mx.array | None, kept: mx.array, values: mx.array, keys: mx.array) -> mx.array:
    """kept · state + Σ over rows of value ⊗ key: [B, H, P, Dv] and [B, G, P, Dk] to [B, H, Dv, Dk]."""
    B, H, P, Dv = values.shape
    G, Dk = keys.shape[1], keys.shape[3]
    columns = values.swapaxes(2, 3).reshape(B, G, H // G * Dv, P)
    if state is None:
        return (columns @ keys).reshape(B, H, Dv, Dk)
    # One pass over the state, which is most of what a commit costs.
    return mx.addmm((kept * state).reshape(B, G, -1, Dk), columns, keys).reshape(B, H, Dv, Dk)


def path_sums(log_decay: mx.array, block: Block) -> mx.array:
    """Sum of log decays from the anchor to each node; the nodes are axis 2 of [B, H, N] or [B, H, N, Dk].

    Added up, not multiplied by the ancestor matrix: a matmul may run in reduced precision on some devices.
    """
    if block.is_chain:
        return mx.cumsum(log_decay, axis=2)
    on_path = block.ancestors if log_decay.ndim == 3 else block.ancestors[..., None]
    return mx.where(on_path, mx.expand_dims(log_decay, 2), 0).sum(axis=3)


def decay_between(later: mx.array, earlier: mx.array, on_path: mx.array) -> mx.array:
    """exp(later_i − earlier_j) where on_path[i, j], else 0: [B, H, N, N] or [B, H, N, N, Dk]."""
    difference = mx.expand_dims(later, 3) - mx.expand_dims(earlier, 2)
    return mx.exp(mx.where(on_path if later.ndim == 3 else on_path[..., None], difference, -mx.inf))


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
    sums = path_sums(log_decay.astype(mx.float32).swapaxes(1, 2), block)
    y = products(q, k, decay_between(sums, sums, block.ancestors)) @ v
    if state is not None:
        y = y + mx.exp(sums)[..., None] * read_state(state.astype(mx.float32), q)
    return y.swapaxes(1, 2), Tape(state, k, v, sums)
