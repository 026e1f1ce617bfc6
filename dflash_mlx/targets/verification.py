"""What a verify returns: lazy arrays; what is not read is not evaluated."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Verification:
    """logits [1, N, V] in the target's dtype; hidden [1, N, n_captured × E], None when nothing is captured."""

    logits: mx.array
    hidden: mx.array | None

    def row(self, node: int) -> mx.array:
        """Logits of one node, float32 [V]."""
        return self.logits[0, node].astype(mx.float32)

    def top(self, n: int) -> tuple[mx.array, mx.array]:
        """The n largest logits of every node, best first: values float32 and ids int32, each [1, N, n]."""
        ids = mx.argpartition(-self.logits, n - 1, axis=-1)[..., :n]
        values = mx.take_along_axis(self.logits, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        values = mx.take_along_axis(values, order, axis=-1).astype(mx.float32)
        return values, mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities over the last axis as mlx-lm's generate_step computes them."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
