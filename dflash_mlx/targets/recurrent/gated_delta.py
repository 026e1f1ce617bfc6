"""The gated delta rule over a block: solve for what every node writes, then it is linear attention.

S_i = S_parent G_i (I − β_i k_i k_iᵀ) + β_i v_i k_iᵀ, with G_i a gate per head or per key channel. What node i writes is
U_i k_iᵀ, and the U of a path depend on one another through a lower triangular system.
"""

from __future__ import annotations

import mlx.core as mx

from ...cache.block import Block
from .ancestry import panels, strict_ancestors
from .linear_attention import Tape, decays, per_head, read_state


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_gate: mx.array,
    beta: mx.array,
    state: mx.array | None,
    block: Block,
) -> tuple[mx.array, Tape]:
    """Every node's y_i = S_i q_i under the gated delta rule, and the tape.

    q, k: [B, N, G, Dk], normalised; v: [B, N, H, Dv]; beta: [B, N, H]; log_gate: [B, N, H], or [B, N, H, Dk] with
    G = H (Kimi's KDA); state: [B, H, Dv, Dk] or None. Returns y float32 [B, N, H, Dv].

    With R_ij the gates behind node j up to node i, multiplied, and R_i0 those from the anchor on:
    U_i = β_i (v_i − R_i0 S_0 k_i) − β_i Σ_j R_ij (k_i·k_j) U_j over strict ancestors,
    y_i = R_i0 S_0 q_i + Σ_j R_ij (q_i·k_j) U_j over ancestors and the node itself.
    Source: Yang et al., Gated Delta Networks (2024), section 3; here over a tree and by substitution.
    """
    q, k, v, beta, log_gate = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v, beta, log_gate))
    between, from_start = decays(log_gate, block)
    kk, qk = _products(k, q, between)
    beta, target = beta[..., None], v
    if state is not None:
        from_keys, from_queries = _read_decayed(state.astype(mx.float32), k, q, from_start)
        target = v - from_keys
    written = substitute(mx.where(strict_ancestors(block), beta * kk, 0), beta * target, block)
    y = qk @ written
    if state is not None:
        y = y + from_queries
    return y.swapaxes(1, 2), Tape(state, k, written, log_gate)


def _products(k: mx.array, q: mx.array, decay: mx.array) -> list[mx.array]:
    """k_i·k_j and q_i·k_j with the decay between the nodes, each [B, H, N, N]."""
    if decay.ndim == 4:
        pairs = mx.split(mx.concatenate([k, q], axis=2) @ k.swapaxes(2, 3), 2, axis=2)
        return [per_head(x, decay.shape[1]) * decay for x in pairs]
    decayed = k[:, :, None] * decay  # [B, H, N, N, Dk]: what node i sees of the key of node j
    pairs = mx.stack([k, q], axis=3) @ decayed.swapaxes(3, 4)
    return [pairs[:, :, :, 0], pairs[:, :, :, 1]]


def _read_decayed(state: mx.array, k: mx.array, q: mx.array, decay: mx.array) -> list[mx.array]:
    """What is left of the state at every node, read by its key and by its query, each [B, H, N, Dv]."""
    if decay.ndim == 4:
        return mx.split(read_state(state, mx.concatenate([k * decay, q * decay], axis=2)), 2, axis=2)
    read = mx.split(read_state(state, mx.concatenate([k, q], axis=2)), 2, axis=2)
    return [decay[..., None] * x for x in read]


def substitute(couplings: mx.array, right: mx.array, block: Block) -> mx.array:
    """Solve (I + couplings) U = right for U by forward substitution.

    couplings: [B, H, N, N], nonzero only at strict ancestors; right: [B, H, N, D].
    """
    solved: mx.array | None = None
    for panel in panels(block):
        rows = slice(panel.start, panel.stop)
        part = right[:, :, rows]
        if solved is not None:
            part = part - couplings[:, :, rows, : panel.start] @ solved
        if panel.generations > 1:
            part = _inverse(couplings[:, :, rows, rows], panel.generations) @ part
        solved = part if solved is None else mx.concatenate([solved, part], axis=2)
    return solved


def _inverse(couplings: mx.array, generations: int) -> mx.array:
    """(I + couplings)⁻¹ of one panel, by substitution: a row is final once its ancestors' rows are.

    Squaring would need fewer steps and is wrong by far on repeated tokens (keys alike, β near 1, no decay: error 50 at
    32 in a row), as the powers grow to 10⁹ and cancel. Rows that are not final yet grow too, but are overwritten; the
    panel's size bounds them.
    """
    identity = mx.eye(couplings.shape[-1])
    inverse = identity - couplings
    for _ in range(generations - 2):
        inverse = identity - couplings @ inverse
    return inverse
