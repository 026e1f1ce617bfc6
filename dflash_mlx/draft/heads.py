"""A head over some of its tokens: their rows are gathered once, the other logits are never computed."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

Head = Callable[[mx.array], mx.array]
"""Hidden [.., E] to logits [.., V]."""


class PrunedHead:
    """Some rows of whichever head it is given; those of the last one are kept until its weight is another."""

    def __init__(self, rows: mx.array):
        self._rows = rows
        self._weight: weakref.ref[mx.array] | None = None  # a target that is done with must not live on here
        self._gathered: Head | None = None

    def of(self, head: Head) -> Head:
        """The same logits [.., R] of the rows [R] alone; a head that is no plain matrix computes the others too."""
        module = _matrix(head)
        if module is None:
            return lambda x: head(x)[..., self._rows]
        if self._gathered is None or self._weight is None or self._weight() is not module.weight:
            self._weight, self._gathered = weakref.ref(module.weight), rows_of(module, self._rows)
        return self._gathered


def rows_of(module: nn.Module, rows: mx.array) -> Head:
    """A linear map, or an embedding used as one, to some of its outputs; the rows are gathered once."""
    weight, bias = module.weight[rows], module.bias[rows] if "bias" in module else 0
    if "scales" not in module:
        return lambda x: x @ weight.T + bias
    scales, biases = module.scales[rows], module.biases[rows] if "biases" in module else None
    options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return lambda x: mx.quantized_matmul(x, weight, scales=scales, biases=biases, transpose=True, **options) + bias


def _matrix(head: Head) -> nn.Module | None:
    """The module that `head` is, or whose `as_linear` it is; None where it may do more than multiply."""
    if inspect.ismethod(head) and type(head.__self__) in (nn.Embedding, nn.QuantizedEmbedding):
        return head.__self__ if head.__name__ == "as_linear" else None
    return head if type(head) in (nn.Linear, nn.QuantizedLinear) else None
