"""Elementwise recurrences go level by level: all nodes of a depth at once, each from its own parent's state.

The arithmetic per step, its order and its dtype are mlx-lm's, so a node has the very bits of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ...cache.block import Block
from .ancestry import levels, node_order

# (parents' states [B, n, ...] or None for zeros, the nodes) → (states [B, n, ...], outputs [B, n, ...])
Step = Callable[[mx.array | None, mx.array], tuple[mx.array, mx.array]]


def scan_levels(state: mx.array | None, step: Step, block: Block) -> mx.array:
    """Outputs of every node in the block's order, [B, N, ...]; state: [B, ...] before the block, or None.

    Only two levels of states are alive at a time.
    """
    above = None if state is None else state[:, None]
    outputs = []
    for level in levels(block):
        parents = above if above is None or level.parents is None else mx.take(above, level.parents, axis=1)
        above, out = step(parents, level.nodes)
        outputs.append(out)
    laid = mx.concatenate(outputs, axis=1)
    return laid if block.is_chain else mx.take(laid, node_order(block), axis=1)


def gated_scan(x: mx.array, a: mx.array, state: mx.array | None, block: Block) -> mx.array:
    """h_i = a_i h_parent + x_i for every node, [B, N, C]: the RG-LRU (De et al., Griffin, 2024).

    x, a: [B, N, C]; state: [B, C] or None. The state after a node is its h.
    """

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        h = mx.take(x, nodes, axis=1)
        if parents is not None:
            h = mx.take(a, nodes, axis=1) * parents + h
        return h, h

    return scan_levels(state, step, block)


@dataclass(frozen=True)
class SelectiveTape:
    """What the states of a block follow from; as in `selective_scan`, with inputs = delta · x."""

    state: mx.array | None
    delta: mx.array
    inputs: mx.array
    B: mx.array
    A: mx.array

    def step(self, parents: mx.array | None, nodes: mx.array) -> mx.array:
        """States of some nodes from their parents', [B, n, C, S]."""
        delta, inputs, B = (mx.take(x, nodes, axis=1) for x in (self.delta, self.inputs, self.B))
        written = inputs[..., None] * B[:, :, None]
        return written if parents is None else written + parents * mx.exp(delta[..., None] * self.A)

    def after(self, path: tuple[int, ...]) -> mx.array:
        """The state behind the path's last node, [B, C, S]."""
        state = None if self.state is None else self.state[:, None]
        for node in path:
            state = self.step(state, mx.array([node], mx.int32))
        return state.squeeze(1)


def selective_scan(
    x: mx.array, delta: mx.array, A: mx.array, B: mx.array, C: mx.array, state: mx.array | None, block: Block
) -> tuple[mx.array, SelectiveTape]:
    """Every node's y_i = S_i C_i with S_i = e^{δ_i A} S_parent + δ_i x_i B_iᵀ, elementwise, and the tape: Mamba-1.

    x, delta: [B, N, C]; A: [C, S], negative; B, C: [B, N, S]; state: [B, C, S] or None. Returns y [B, N, C].
    A state per node would be the size of the model's activations many times over, so the tape keeps what they follow
    from and takes the elementwise steps of one path again.
    """
    tape = SelectiveTape(state, delta, delta * x, B, A)

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        states = tape.step(parents, nodes)
        return states, (states @ mx.take(C, nodes, axis=1)[..., None]).squeeze(-1)

    return scan_levels(state, step, block), tape
