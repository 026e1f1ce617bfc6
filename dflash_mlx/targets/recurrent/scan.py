"""A state that mlx-lm rounds at every token goes step by step, in its arithmetic, order and dtype.

Plain decoding rounds such a state once a token, so rounding it once a block would be another model. All nodes of a
depth take their step at once, each from its own parent's state, and have the very bits of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import levels

# (parents' states [B, n, ...] or None for zeros, the nodes [n]) → (states [B, n, ...], outputs [B, n, ...])
Step = Callable[[mx.array | None, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class States:
    """The tape of a scan: the states of every level, [B, n, ...] each, kept until the next block opens."""

    by_level: tuple[mx.array, ...]
    block: Block

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, [B, ...]."""
        return self.by_level[len(path) - 1][:, levels(self.block).places[path[-1]]]


def scan(state: mx.array | None, step: Step, block: Block) -> tuple[mx.array, States]:
    """Outputs of every node in the block's order, [B, N, ...], and the tape; state: [B, ...] or None for zeros."""
    geometry = levels(block)
    above = None if state is None else state[:, None]
    states, outputs = [], []
    for nodes, places in zip(geometry.nodes, geometry.parents, strict=True):
        parents = above if above is None or places is None else mx.take(above, places, axis=1)
        above, out = step(parents, nodes)
        states.append(above)
        outputs.append(out)
    laid = mx.concatenate(outputs, axis=1)
    return laid if block.is_chain else mx.take(laid, geometry.order, axis=1), States(tuple(states), block)


def gated_scan(x: mx.array, a: mx.array, state: mx.array | None, block: Block) -> tuple[mx.array, States]:
    """h_i = a_i h_parent + x_i for every node, [B, N, C]: the RG-LRU (De et al., Griffin, 2024).

    x, a: [B, N, C]; state: [B, C] or None.
    """

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        h = mx.take(x, nodes, axis=1)
        if parents is not None:
            h = mx.take(a, nodes, axis=1) * parents + h
        return h, h

    return scan(state, step, block)


def selective_scan(
    x: mx.array, delta: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array | None, block: Block
) -> tuple[mx.array, States]:
    """y_i = S_i C_i with S_i = e^{δ_i A} S_parent + δ_i x_i B_iᵀ, elementwise, for every node: Mamba-1.

    x, delta: [B, N, C]; A: [C, S], negative; B, C: [B, N, S]; state: [B, C, S] or None. Returns y [B, N, C].
    """
    inputs = delta * x

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        states = mx.take(inputs, nodes, axis=1)[..., None] * mx.take(B, nodes, axis=1)[:, :, None]
        if parents is not None:
            states = states + parents * mx.exp(mx.take(delta, nodes, axis=1)[..., None] * A)
        return states, (states @ mx.take(C, nodes, axis=1)[..., None]).squeeze(-1)

    return scan(state, step, block)


def decayed_scan(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, state: mx.array | None, block: Block
) -> tuple[mx.array, States]:
    """y_i = q_i S_i with S_i = decay S_parent + k_iᵀ v_i for every node: lightning attention.

    q, k, v: [B, N, H, D]; decay: [H]; state: [B, H, D, D] or None. Returns y [B, N, H, D].
    """

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        q_, k_, v_ = (mx.take(part, nodes, axis=1)[..., None, :] for part in (q, k, v))
        states = k_.swapaxes(-1, -2) @ v_
        if parents is not None:
            states = parents * decay[:, None, None] + states
        return states, (q_ @ states).squeeze(-2)

    return scan(state, step, block)
