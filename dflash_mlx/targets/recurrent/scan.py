"""A step by step recurrence goes level by level: all nodes of a depth at once, each from its own parent's state.

The step's arithmetic, its order and its dtype are mlx-lm's, so a node has the very bits of plain decoding. This is
for elementwise recurrences, and for every state that mlx-lm keeps in low precision: plain decoding rounds it at each
token, so rounding once a block would be another model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...cache.block import Block
from .ancestry import levels, node_order

# (parents' states [B, n, ...] or None for zeros, the nodes [n]) → (states [B, n, ...], outputs [B, n, ...])
Step = Callable[[mx.array | None, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class Steps:
    """The tape of a scan. state: [B, ...] before the block, or None.

    A state per node would be the size of the activations many times over, so `after` takes the steps of one path
    again; the outputs on the way are never evaluated.
    """

    state: mx.array | None
    step: Step

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, [B, ...]."""
        state: Any = None if self.state is None else self.state[:, None]
        for node in path:
            state, _ = self.step(state, mx.array([node], mx.int32))
        return state.squeeze(1)


def scan(state: mx.array | None, step: Step, block: Block) -> tuple[mx.array, Steps]:
    """Outputs of every node in the block's order, [B, N, ...], and the tape; two levels of states live at a time."""
    above = None if state is None else state[:, None]
    outputs = []
    for level in levels(block):
        parents = above if above is None or level.parents is None else mx.take(above, level.parents, axis=1)
        above, out = step(parents, level.nodes)
        outputs.append(out)
    laid = mx.concatenate(outputs, axis=1)
    return laid if block.is_chain else mx.take(laid, node_order(block), axis=1), Steps(state, step)


def gated_scan(x: mx.array, a: mx.array, state: mx.array | None, block: Block) -> mx.array:
    """h_i = a_i h_parent + x_i for every node, [B, N, C]: the RG-LRU (De et al., Griffin, 2024).

    x, a: [B, N, C]; state: [B, C] or None. The state after a node is its h.
    """

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        h = mx.take(x, nodes, axis=1)
        if parents is not None:
            h = mx.take(a, nodes, axis=1) * parents + h
        return h, h

    return scan(state, step, block)[0]


def selective_scan(
    x: mx.array, delta: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array | None, block: Block
) -> tuple[mx.array, Steps]:
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
) -> tuple[mx.array, Steps]:
    """y_i = q_i S_i with S_i = decay S_parent + k_iᵀ v_i for every node, all in the dtype of the state.

    q, k, v: [B, N, H, D]; decay: [H]; state: [B, H, D, D] or None. Returns y [B, N, H, D].
    """

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        q_, k_, v_ = (mx.take(part, nodes, axis=1)[..., None, :] for part in (q, k, v))
        states = k_.swapaxes(-1, -2) @ v_
        if parents is not None:
            states = parents * decay[:, None, None] + states
        return states, (q_ @ states).squeeze(-2)

    return scan(state, step, block)
