"""The largest logits of a row are found without sorting the vocabulary."""

from __future__ import annotations

import mlx.core as mx

GROUP = 64  # tokens of one group


def likely(logits: mx.array, num_groups: int) -> tuple[mx.array, mx.array]:
    """The best groups of every row [D, V], whole: logits and ids, each [D, num_groups × GROUP].

    The k largest logits lie in the k groups with the largest maxima.
    """
    rows, vocab_size = logits.shape
    grouped = mx.pad(logits, ((0, 0), (0, -vocab_size % GROUP)), constant_values=-mx.inf).reshape(rows, -1, GROUP)
    groups = where_largest(mx.max(grouped, axis=-1), num_groups)
    ids = mx.expand_dims(groups, -1) * GROUP + mx.arange(GROUP, dtype=groups.dtype)
    return mx.take_along_axis(grouped, groups[..., None], axis=1).reshape(rows, -1), ids.reshape(rows, -1)


def largest(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest of every row [D, V] in any order: logits and ids, each [D, k]."""
    values, ids = likely(logits, k)
    best = where_largest(values, min(k, logits.shape[-1]))
    return mx.take_along_axis(values, best, axis=-1), mx.take_along_axis(ids, best, axis=-1)


def where_largest(x: mx.array, n: int) -> mx.array:
    """Where the n largest of every row [D, M] stand, in any order."""
    if n >= x.shape[-1]:
        return mx.broadcast_to(mx.arange(x.shape[-1], dtype=mx.uint32), x.shape)
    return mx.argpartition(-x, n - 1, axis=-1)[..., :n]
