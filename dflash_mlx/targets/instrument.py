"""A target is instrumented for the length of one forward and is untouched between forwards.

The instances involved get a subclass of their own class for that time: parameters, `isinstance`, attributes and
quantization stay as they are, and neither a class nor a module is ever changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache import Block, Positions
from .anatomy import family

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


def _gathered_positions(base: type, block: Block) -> type:
    """A table of learned positions: it is asked for consecutive rows, and a node's is the row of its depth."""

    def call(table: nn.Module, position_ids: mx.array) -> mx.array:
        return base.__call__(table, position_ids)[..., block.depth_array, :]

    return type(f"Tree{base.__name__}", (base,), {"__call__": call})


def _gathered_scale(base: type, block: Block) -> type:
    """Attention that is handed the scales [L, 1] of consecutive positions."""

    def call(attention: nn.Module, x: mx.array, attn_scale: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return base.__call__(attention, x, attn_scale[block.depth_array], *args, **kwargs)

    return type(f"Tree{base.__name__}", (base,), {"__call__": call})


def _rotating_method(base: type, block: Block) -> type:
    """Attention that rotates in a method of its own."""

    def rope(attention: nn.Module, x: mx.array, offset: Any) -> mx.array:
        return base._rope(attention, x.transpose(2, 1, 0, 3), offset.nodes).transpose(2, 1, 0, 3)

    return type(f"Tree{base.__name__}", (base,), {"_rope": rope})


# Model file and module name → the subclass of the module's class that positions the rows of a tree.
POSITIONED: dict[tuple[str, str], Callable[[type, Block], type]] = {
    ("gpt2", "wpe"): _gathered_positions,
    ("gpt_bigcode", "wpe"): _gathered_positions,
    ("ministral3", "self_attn"): _gathered_scale,
    ("mistral4", "self_attn"): _gathered_scale,
    ("talkie", "attn"): _rotating_method,
}


def tree_swaps(model: nn.Module, block: Block) -> Swaps:
    """Every module that positions rows, with the subclass that gives the nodes of this tree their own positions."""
    files = {family(module) for module in model.modules()}
    wanted = {name: make for (file, name), make in POSITIONED.items() if file in files}
    named = ((wanted.get(name.rpartition(".")[2]), module) for name, module in model.named_modules())
    return [*rope_swaps(model, block), *((m, make(type(m), block)) for make, m in named if make is not None)]
