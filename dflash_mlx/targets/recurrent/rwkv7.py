"""RWKV-7's delta rule over a block: two rank-one writes per node, one of which depends on the ancestors' state."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import strict_ancestors
from .gated_delta import substitute
from .linear_attention import Tape, decay_between, path_sums, products, read_state


@dataclass(frozen=True)
class TwoWrites:
    """Each node wrote twice: rows 0..N − 1 of the tape, and rows N..2N − 1."""

    tape: Tape
    nodes: int

    def after(self, path: tuple[int, ...]) -> mx.array:
        return self.tape.after((*path, *(self.nodes + node for node in path)))


def rwkv7(
    r: mx.array,
    log_w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None,
    block: Block,
) -> tuple[mx.array, TwoWrites]:
    """Every node's y_i = S_i r_i with S_i = S_parent diag(w_i) + (S_parent a_i) b_iᵀ + v_i k_iᵀ, and the tape.

    r, log_w, k, v, a, b: [B, N, H, D]; state: [B, H, D, D] or None. Returns y float32 [B, N, H, D].

    With c the sums of log w along the paths, x_i = S_parent a_i solves
    x_i = S_0 (e^{c_parent} a_i) + Σ_j e^{c_parent − c_j} ((a_i·k_j) v_j + (a_i·b_j) x_j) over strict ancestors, the
    exponentials inside the products channel by channel.
    """
    r, log_w, k, v, a, b = (x.astype(mx.float32).swapaxes(1, 2) for x in (r, log_w, k, v, a, b))
    sums = path_sums(log_w, block)
    before = sums - log_w
    to_node = decay_between(sums, sums, block.ancestors)
    to_parent = decay_between(before, sums, strict_ancestors(block))
    right = products(a, k, to_parent) @ v
    y = products(r, k, to_node) @ v
    if state is not None:
        rows = mx.concatenate([a * mx.exp(before), r * mx.exp(sums)], axis=2)
        from_a, from_r = mx.split(read_state(state.astype(mx.float32), rows), 2, axis=2)
        right, y = right + from_a, y + from_r
    x = substitute(-products(a, b, to_parent), right, block)
    y = y + products(r, b, to_node) @ x
    tape = Tape(
        state,
        keys=mx.concatenate([b, k], axis=2),
        values=mx.concatenate([x, v], axis=2),
        decay=mx.concatenate([sums, sums], axis=2),
    )
    return y.swapaxes(1, 2), TwoWrites(tape, block.size)
