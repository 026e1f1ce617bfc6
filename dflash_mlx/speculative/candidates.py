"""Only the most probable tokens of a draft's row leave the device."""

from __future__ import annotations

import mlx.core as mx

from ..draft.candidates import likely, where_largest

GROUPS = 64  # groups of tokens looked into


def top_candidates(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k most probable tokens of every row [D, V], best first: log-probabilities and ids, float32 and int32 [D, k].

    The sum of exponentials runs over the best groups too (4,096 tokens), since an exponential per token of the
    vocabulary costs a CPU more than the rest of the draft's head; the mass left out is small and can only change which
    tokens are proposed.
    """
    k = min(k, logits.shape[-1])
    values, ids = likely(logits.astype(mx.float32), max(k, GROUPS))
    best = where_largest(values, k)
    logprobs = mx.take_along_axis(values, best, axis=-1) - mx.logsumexp(values, axis=-1, keepdims=True)
    ids = mx.take_along_axis(ids, best, axis=-1)
    order = mx.argsort(-logprobs, axis=-1)
    return mx.take_along_axis(logprobs, order, axis=-1), mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)
