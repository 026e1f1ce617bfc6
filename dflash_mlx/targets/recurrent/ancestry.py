"""A node reads its own ancestors, never its neighbour in the flat order.

Indices derived from a block's geometry, made once per block. They are built from Python lists, so that a cached
array is evaluated and may be used in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ...cache.block import Block

# Substitution goes through the nodes in panels of this many rows.
PANEL = 16


@lru_cache(maxsize=256)
def windows(block: Block, width: int) -> mx.array:
    """Each node and the width − 1 rows before it on its own path, int32 [N, width].

    Rows count from the stored history: width − 1 rows of it, then the block's N nodes.
    """
    keep = width - 1
    history = list(range(keep))
    return mx.array([(history + [keep + n for n in block.path_to(i)])[-width:] for i in range(block.size)], mx.int32)


def last_rows(path: tuple[int, ...], keep: int) -> list[int]:
    """The `keep` rows that become the history after a path, counted as in `windows`."""
    rows = list(range(keep)) + [keep + node for node in path]
    return rows[len(rows) - keep :]


@lru_cache(maxsize=256)
def strict_ancestors(block: Block) -> mx.array:
    """Bool [N, N]: entry i, j is true when j is an ancestor of node i and not i itself."""
    above = [set(block.path_to(i)[:-1]) for i in range(block.size)]
    return mx.array([[j in above[i] for j in range(block.size)] for i in range(block.size)])


@lru_cache(maxsize=256)
def hops(block: Block) -> tuple[mx.array, ...]:
    """Each node's ancestor 1, 2, 4, ... generations up, int32 [N], as far as the block is deep; N beyond the anchor."""
    paths = [block.path_to(node) for node in range(block.size)]
    strides = [1 << i for i in range(max(block.depths).bit_length())]
    return tuple(
        mx.array([path[-1 - stride] if len(path) > stride else block.size for path in paths], mx.int32)
        for stride in strides
    )


@dataclass(frozen=True)
class Panel:
    """Rows start..stop − 1 of a block and the longest line of descent among them."""

    start: int
    stop: int
    generations: int


@lru_cache(maxsize=256)
def panels(block: Block) -> tuple[Panel, ...]:
    """The block's nodes in order, cut into panels for forward substitution."""
    return tuple(_panel(block, start) for start in range(0, block.size, PANEL))


def _panel(block: Block, start: int) -> Panel:
    stop = min(start + PANEL, block.size)
    lines = [sum(node >= start for node in block.path_to(i)) for i in range(start, stop)]
    return Panel(start, stop, max(lines))


@dataclass(frozen=True)
class Level:
    """Nodes of one depth: their indices, and for each the place of its parent within the level above.

    parents is None where the level above has one node.
    """

    nodes: mx.array
    parents: mx.array | None


@lru_cache(maxsize=256)
def levels(block: Block) -> tuple[Level, ...]:
    """The block's nodes by depth."""
    by_depth: list[list[int]] = [[] for _ in range(max(block.depths) + 1)]
    for node, depth in enumerate(block.depths):
        by_depth[depth].append(node)
    places = {node: place for nodes in by_depth for place, node in enumerate(nodes)}
    above = [[-1], *by_depth]
    return tuple(
        Level(
            mx.array(nodes, mx.int32),
            None if len(above[depth]) == 1 else mx.array([places[block.parents[n]] for n in nodes], mx.int32),
        )
        for depth, nodes in enumerate(by_depth)
    )


@lru_cache(maxsize=256)
def node_order(block: Block) -> mx.array:
    """Where each node stands when the levels are laid one after another, int32 [N]."""
    laid = sorted(range(block.size), key=lambda node: (block.depths[node], node))
    places = {node: place for place, node in enumerate(laid)}
    return mx.array([places[node] for node in range(block.size)], mx.int32)
