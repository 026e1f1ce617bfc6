"""Only the most probable tokens of a draft's row leave the device."""

from __future__ import annotations

import mlx.core as mx

GROUP = 64  # tokens of one group
GROUPS = 64  # groups looked into


def top_candidates(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k most probable tokens of every row [D, V], best first: log-probabilities and ids, float32 and int32 [D, k].

    The k largest logits lie in the k groups with the largest maxima, which spares sorting the vocabulary. The sum of
    exponentials runs over the best groups too (4,096 tokens), since an exponential per token of the vocabulary costs
    a CPU more than the rest of the draft's head; the mass left out is small and can only change which tokens are
    proposed.
    """
    logits = logits.astype(mx.float32)
    rows, vocab_size = logits.shape
    k = min(k, vocab_size)
    grouped = mx.pad(logits, ((0, 0), (0, -vocab_size % GROUP)), constant_values=-mx.inf).reshape(rows, -1, GROUP)
    groups = _largest(mx.max(grouped, axis=-1), max(k, GROUPS))
    values = mx.take_along_axis(grouped, groups[..., None], axis=1).reshape(rows, -1)
    best = _largest(values, k)
    logprobs = mx.take_along_axis(values, best, axis=-1) - mx.logsumexp(values, axis=-1, keepdims=True)
    ids = mx.take_along_axis(groups, best // GROUP, axis=-1) * GROUP + best % GROUP
    order = mx.argsort(-logprobs, axis=-1)
    return mx.take_along_axis(logprobs, order, axis=-1), mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)


def _largest(x: mx.array, n: int) -> mx.array:
    """Where the n largest of every row [D, M] stand, in any order."""
    if n >= x.shape[-1]:
        return mx.broadcast_to(mx.arange(x.shape[-1], dtype=mx.uint32), x.shape)
    return mx.argpartition(-x, n - 1, axis=-1)[..., :n]
