"""A target is instrumented for the length of one forward and is untouched between forwards.

The instances involved get a subclass of their own class for that time: parameters, `isinstance`, attributes and
quantization stay as they are, and neither a class nor a module is ever changed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache import Block, Positions

# Forwards on one model object take turns; only the building of a graph is inside, so nobody waits for a device.
_swapping = threading.RLock()


Swaps = Sequence[tuple[nn.Module, type]]


@contextmanager
def swapped(swaps: Swaps) -> Iterator[None]:
    """Give each instance its subclass, and its own class back at the end, whatever happens inside."""
    with _swapping:
        originals = [(module, type(module)) for module, _ in swaps]
        try:
            for module, subclass in swaps:
                module.__class__ = subclass
            yield
        finally:
            for module, original in originals:
                module.__class__ = original


class Taps:
    """Records the outputs of the captured layers during a forward of the thread that owns it."""

    def __init__(self, layers: list[nn.Module], layer_ids: tuple[int, ...]):
        self._layer_ids = layer_ids
        self._recorded: dict[int, mx.array] = {}
        self._thread = threading.get_ident()
        self.swaps: Swaps = [(layers[i], self._subclass(type(layers[i]), i)) for i in sorted(set(layer_ids))]

    def _subclass(self, base: type, layer_id: int) -> type:
        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = base.__call__(layer, *args, **kwargs)
            if threading.get_ident() == self._thread:
                # A looped model calls a layer several times: its last output counts.
                self._recorded[layer_id] = out[0] if isinstance(out, tuple) else out
            return out

        return type(f"Tapped{base.__name__}", (base,), {"__call__": call})

    def take(self) -> mx.array | None:
        """The target hidden [B, L, n_captured × E] of the last forward, in the order of the layer ids."""
        if not self._layer_ids:
            return None
        hidden = mx.concatenate([self._recorded[i] for i in self._layer_ids], axis=-1)
        self._recorded.clear()
        return hidden


ROPE_NAMES = {"rope", "rotary_emb", "index_rope"}


def rope_swaps(model: nn.Module, block: Block | None = None) -> Swaps:
    """Every rope module of the model with its tree subclass.

    block: the tree that is open, for models that make a plain number of the cache's offset before they rotate.
    """
    ropes = {id(m): m for name, m in model.named_modules() if name.rpartition(".")[2] in ROPE_NAMES}
    return [(rope, _tree_rope(type(rope), block)) for rope in ropes.values()]  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _tree_rope(base: type, block: Block | None) -> type:
    """The subclass of a rope class that rotates every row of a tree by its own position.

    `mx.fast.rope` takes one offset per batch row, so x [1, H, L, D] becomes [L, H, 1, D] and comes back.
    """

    def positions(x: mx.array, offset: Any) -> mx.array | None:
        if isinstance(offset, Positions):
            return offset.nodes
        return block.depth_array + offset if block is not None and x.shape[2] == block.size else None

    def call(rope: nn.Module, x: mx.array, offset: Any = 0, **kwargs: Any) -> mx.array:
        nodes = positions(x, offset)
        if nodes is None:
            return base.__call__(rope, x, offset=offset, **kwargs)
        rows = base.__call__(rope, x.transpose(2, 1, 0, 3), offset=nodes, **kwargs)
        return rows.transpose(2, 1, 0, 3)

    return type(f"Tree{base.__name__}", (base,), {"__call__": call})
