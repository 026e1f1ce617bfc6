"""A node reads its own ancestors, never its neighbour in the flat order.

Indices and masks derived from a block's geometry, made once per block. They are built in numpy, so that a cached
array is evaluated and may be used in any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from ...cache.block import Block

# Substitution goes through the nodes in panels of this many rows.
PANEL = 16


@lru_cache(maxsize=64)
def windows(block: Block, width: int) -> mx.array:
    """Each node and the width − 1 rows before it on its own path, int32 [N, width].

    Rows count from the stored history: width − 1 rows of it, then the block's N nodes.
    """
    keep = width - 1
    rows = np.empty((block.size, width), np.int32)
    for node, parent in enumerate(block.parents):
        rows[node, :keep] = rows[parent, 1:] if parent >= 0 else np.arange(keep)
        rows[node, keep] = keep + node
    return mx.array(rows)


def last_rows(path: tuple[int, ...], keep: int) -> list[int]:
    """The `keep` rows that become the history after a path, counted as in `windows`."""
    rows = list(range(keep)) + [keep + node for node in path]
    return rows[len(rows) - keep :]


@lru_cache(maxsize=8)
def _on_path(block: Block) -> np.ndarray:
    """Bool [N, N]: entry i, j is true when j is node i or an ancestor of it."""
    rows = np.eye(block.size, dtype=bool)
    for node, parent in enumerate(block.parents):
        if parent >= 0:
            rows[node] |= rows[parent]
    return rows


@lru_cache(maxsize=64)
def on_path(block: Block) -> mx.array:
    """Bool [N, N]: entry i, j is true when j is node i or an ancestor of it."""
    return mx.array(_on_path(block))


@lru_cache(maxsize=64)
def strict_ancestors(block: Block) -> mx.array:
    """Bool [N, N]: entry i, j is true when j is an ancestor of node i and not i itself."""
    return mx.array(_on_path(block) & ~np.eye(block.size, dtype=bool))


@lru_cache(maxsize=8)
def routes(block: Block) -> mx.array:
    """Which nodes lie on the way to a node, float32 [N · (N + 1), N] of 0 and 1.

    Row (i, j) marks the nodes behind node j up to node i, nothing where j is no ancestor of i; row (i, N) marks the
    whole way from the anchor to i. A product with it adds up what happens on each way.
    """
    size, path = block.size, _on_path(block)
    marked = np.empty((size, size + 1, size), np.float32)
    marked[:, :size] = path[:, None] & (path & ~np.eye(size, dtype=bool)).T
    marked[:, size] = path
    return mx.array(marked.reshape(-1, size))


@dataclass(frozen=True)
class Panel:
    """Rows start..stop − 1 of a block and the longest line of descent among them."""

    start: int
    stop: int
    generations: int


@lru_cache(maxsize=64)
def panels(block: Block) -> tuple[Panel, ...]:
    """The block's nodes in order, cut into panels for forward substitution."""
    starts = range(0, block.size, PANEL)
    parts = [_on_path(block)[start : start + PANEL, start : start + PANEL] for start in starts]
    return tuple(
        Panel(start, start + len(part), int(part.sum(axis=1).max())) for start, part in zip(starts, parts, strict=True)
    )


@dataclass(frozen=True)
class Levels:
    """The block's nodes by depth.

    nodes: the indices of each depth's. parents: for each depth the places of its nodes' parents within the level
    above, None where that has one node. places: where each node stands within its level. order: where it stands when
    the levels are laid one after another.
    """

    nodes: tuple[mx.array, ...]
    parents: tuple[mx.array | None, ...]
    places: tuple[int, ...]
    order: mx.array


@lru_cache(maxsize=64)
def levels(block: Block) -> Levels:
    by_depth: list[list[int]] = [[] for _ in range(max(block.depths) + 1)]
    places = []
    for node, depth in enumerate(block.depths):
        places.append(len(by_depth[depth]))
        by_depth[depth].append(node)
    above = [[-1], *by_depth]
    return Levels(
        nodes=tuple(mx.array(nodes, mx.int32) for nodes in by_depth),
        parents=tuple(
            None if len(above[depth]) == 1 else mx.array([places[block.parents[n]] for n in nodes], mx.int32)
            for depth, nodes in enumerate(by_depth)
        ),
        places=tuple(places),
        order=mx.array(np.argsort(np.concatenate(by_depth)).astype(np.int32)),
    )
