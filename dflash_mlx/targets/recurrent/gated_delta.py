"""The gated delta rule over a block: solve for what every node writes, then it is linear attention.

S_i = S_parent G_i (I − β_i k_i k_iᵀ) + β_i v_i k_iᵀ, with G_i a gate per head or per key channel. What node i writes is
U_i k_iᵀ, and the U of a path depend on one another through a lower triangular system.
"""

from __future__ import annotations

import mlx.core as mx

from ...cache.block import Block
from .ancestry import panels, strict_ancestors
from .linear_attention import Tape, decay_between, path_sums, products, read_state


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
    decay, _ = decay_between(log_gate, block)
    beta = beta[..., None]
    target = v
    if state is not None:
        from_keys, from_queries = _read_decayed(state.astype(mx.float32), k, q, path_sums(log_gate, block))
        target = v - from_keys
    couplings = mx.where(strict_ancestors(block), beta * products(k, k, decay), 0)
    written = substitute(couplings, beta * target, block)
    y = products(q, k, decay) @ written
    if state is not None:
        y = y + from_queries
    return y.swapaxes(1, 2), Tape(state, ((k, written),), log_gate)


def _read_decayed(state: mx.array, k: mx.array, q: mx.array, sums: mx.array) -> list[mx.array]:
    """The state that is left of S_0 at every node, read by its key and by its query, each [B, H, N, Dv]."""
    rows, decay = mx.concatenate([k, q], axis=2), mx.exp(mx.concatenate([sums, sums], axis=2))
    if decay.ndim == 3:
        read = decay[..., None] * read_state(state, rows)
    else:
        read = read_state(state, rows * decay)
    return mx.split(read, 2, axis=2)


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
