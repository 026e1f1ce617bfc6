"""State with decay is a sum over ancestors: S_i = R_i0 S_0 + Σ_j R_ij v_j k_jᵀ, R_ij the decay behind node j up to i.

Its logarithm is always added up, never a difference of sums from the anchor (which cancels after one strong decay)
and never a quotient of products (which overflows). Off the path it is −∞ before the exponential. All in float32.
Mamba-2 and lightning attention are this sum; the delta rule solves for its v first (gated_delta).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import on_path, routes


@dataclass(frozen=True)
class Tape:
    """What the states of a block follow from.

    state: [B, H, Dv, Dk] before the block, None for zeros. keys: [B, G, N, Dk], each shared by H / G heads.
    values: [B, H, N, Dv]. log_decay: [B, H, N], or per key channel [B, H, N, Dk] with G = H.
    """

    state: mx.array | None
    keys: mx.array
    values: mx.array
    log_decay: mx.array

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, float32 [B, H, Dv, Dk]."""
        nodes = mx.array(path, mx.int32)
        keys, values, log_decay = (mx.take(x, nodes, axis=2) for x in (self.keys, self.values, self.log_decay))
        kept = mx.exp(log_decay.sum(axis=2, keepdims=True))
        since = mx.exp(mx.cumsum(log_decay, axis=2, reverse=True, inclusive=False))
        if log_decay.ndim == 3:
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


def decays(log_decay: mx.array, block: Block) -> tuple[mx.array, mx.array]:
    """Decay behind node j up to node i, 0 where j is no ancestor of i, and from before the anchor up to node i.

    log_decay: float32 [B, H, N] or per key channel [B, H, N, Dk]. Returns [B, H, N, N] and [B, H, N], or the same
    with a last axis Dk.
    """
    B, _, N = log_decay.shape[:3]
    ways = log_decay.swapaxes(1, 2)
    # Some devices round the float32 inputs of a matmul to 11 bits, so the sums are taken in three exact terms.
    marks = mx.concatenate([routes(block)] * 3, axis=1)
    logs = marks @ mx.concatenate(exact_terms(ways.reshape(B, N, -1)), axis=1)
    logs = logs.reshape(B, N, N + 1, *ways.shape[2:])
    path = on_path(block) if log_decay.ndim == 3 else on_path(block)[..., None]
    return mx.exp(mx.where(path, mx.moveaxis(logs[:, :, :N], 3, 1), -mx.inf)), mx.exp(logs[:, :, N].swapaxes(1, 2))


def exact_terms(x: mx.array) -> list[mx.array]:
    """float32 x as a sum of three terms of at most 8 significant bits."""
    high = x.astype(mx.bfloat16).astype(mx.float32)
    middle = (x - high).astype(mx.bfloat16).astype(mx.float32)
    return [high, middle, x - high - middle]


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
    q, k, v, log_decay = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v, log_decay))
    between, from_start = decays(log_decay, block)
    y = per_head(q @ k.swapaxes(2, 3), v.shape[1]) * between @ v
    if state is not None:
        y = y + from_start[..., None] * read_state(state.astype(mx.float32), q)
    return y.swapaxes(1, 2), Tape(state, k, v, log_decay)
