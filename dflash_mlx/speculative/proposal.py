"""A proposal is what the target checks in one forward: the anchor first, parents before their children."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..cache import Block


@dataclass(frozen=True)
class Proposal:
    """Tokens for one verify.

    tokens: int [1, N], the anchor at node 0; lazy, so that draft and verify are one graph.
    block: the geometry of the N nodes; a chain is a tree with one branch.
    draft_probs: float32 [N − 1, V], the distribution that node i + 1 of a chain was sampled from; None when the
        draft tokens are not samples (argmax, n-gram, scripted).
    finite: bool, 0-d; false when the draft's activations overflowed, so that its tokens mean nothing.
    hinted: nodes that the caller's hint holds too.
    """

    tokens: mx.array
    block: Block
    draft_probs: mx.array | None = None
    finite: mx.array | None = None
    hinted: frozenset[int] = frozenset()

    @staticmethod
    def single(token: int) -> Proposal:
        """No draft: one plain decoding step."""
        return Proposal(mx.array([[token]]), Block.chain(1))

    @staticmethod
    def chain(tokens: mx.array, draft_probs: mx.array | None = None, finite: mx.array | None = None) -> Proposal:
        return Proposal(tokens, Block.chain(tokens.shape[1]), draft_probs, finite)
