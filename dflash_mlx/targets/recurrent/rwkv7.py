"""RWKV-7's delta rule over a block: two rank-one writes per node, one of which depends on the ancestors' state."""

from __future__ import annotations

import mlx.core as mx

from ...cache.block import Block
from .ancestry import strict_ancestors
from .gated_delta import substitute
from .linear_attention import Tape, decay_between, path_sums, products, read_state


def rwkv7(
    r: mx.array,
    log_w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
    block: Block,
) -> tuple[mx.array, Tape]:
    """Every node's y_i = S_i r_i with S_i = S_parent diag(w_i) + (S_parent a_i) b_iᵀ + v_i k_iᵀ, and the tape.

    r, log_w, k, v, a, b: [B, N, H, D]; state: [B, H, D, D] or None. Returns y float32 [B, N, H, D].

    With R_ij the decays behind node j up to node i, multiplied, and p the parent of i, x_i = S_p a_i solves
    x_i = S_0 (R_p0 a_i) + Σ_j (a_i·R_pj k_j) v_j + (a_i·R_pj b_j) x_j over strict ancestors, channel by channel.
    """
    r, log_w, k, v, a, b = (x.astype(mx.float32).swapaxes(1, 2) for x in (r, log_w, k, v, a, b))
    to_node, logs = decay_between(log_w, block)
    to_parent = mx.where(strict_ancestors(block)[..., None], mx.exp(logs - log_w[:, :, :, None]), 0)
    right = products(a, k, to_parent) @ v
    y = products(r, k, to_node) @ v
    if state is not None:
        sums = path_sums(log_w, block)
        rows = mx.concatenate([a * mx.exp(sums - log_w), r * mx.exp(sums)], axis=2)
        from_a, from_r = mx.split(read_state(state.astype(mx.float32), rows), 2, axis=2)
        right, y = right + from_a, y + from_r
    x = substitute(-products(a, b, to_parent), right, block)
    y = y + products(r, b, to_node) @ x
    return y.swapaxes(1, 2), Tape(state, ((k, v), (b, x)), log_w)
