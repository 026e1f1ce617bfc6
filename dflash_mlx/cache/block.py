"""A block is written behind the committed tokens, and nothing committed is overwritten before commit.

One forward over a proposal opens a block in every cache of the target; `commit` keeps the accepted path's rows and
drops the rest. The types here are all that the caches share: the geometry of a block and the protocol of a cache
that carries one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True)
class Block:
    """Geometry of a proposal of N nodes.

    parents: for each node the index of its parent, -1 for the anchor (node 0); parents stand before their children.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents and self.parents[0] == -1, "node 0 is the anchor"
        assert all(0 <= p < i for i, p in enumerate(self.parents[1:], 1)), "parents stand before their children"

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(size: int) -> Block:
        """The one-branch block: the anchor and `size` − 1 tokens behind it."""
        return Block(tuple(range(-1, size - 1)))

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth_array(self) -> mx.array:
        """Depth of each node, int32 [N]."""
        return mx.array(self.depths, dtype=mx.int32)

    @cached_property
    def parent_array(self) -> mx.array:
        """Parent of each node, int32 [N]; the anchor is its own."""
        return mx.array([max(p, 0) for p in self.parents], dtype=mx.int32)

    @cached_property
    def ancestors(self) -> mx.array:
        """Bool [N, N]: entry i, j is true when j is node i or an ancestor of it."""
        rows = [[False] * self.size for _ in self.parents]
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                rows[i][: parent + 1] = rows[parent][: parent + 1]
            rows[i][i] = True
        return mx.array(rows)

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the anchor to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))


class Positions(int):
    """A cache's offset while a tree is open: an integer (tokens committed) that knows the position of every node."""

    nodes: mx.array

    def __new__(cls, base: int, block: Block) -> Positions:
        self = super().__new__(cls, base)
        self.nodes = block.depth_array + base
        return self


def is_prefix(path: tuple[int, ...]) -> bool:
    """Whether the path's rows already stand at the front of the block, in order."""
    return all(node == row for row, node in enumerate(path))


def tree_mask(block: Block, base: int, *, first: int = 0, window: int | None = None) -> mx.array:
    """Bool [N, base − first + N]: which cached tokens and nodes each node attends.

    Columns are the committed tokens at positions first..base − 1, then the block's nodes. A node sees itself, its
    ancestors and the committed tokens, all within `window` positions where one is given.
    """
    nodes = block.ancestors
    if window is None:
        return mx.concatenate([mx.ones((block.size, base - first), dtype=mx.bool_), nodes], axis=1)
    depth = block.depth_array
    committed = (depth[:, None] + base - mx.arange(first, base)[None]) < window
    return mx.concatenate([committed, nodes & (depth[:, None] - depth[None] < window)], axis=1)


class BlockCache(Protocol):
    """One mlx-lm cache of the target while we generate; it also speaks mlx-lm's own cache protocol to the model.

    Every forward happens between `open` and `commit`. Until the next `open`, `rewind(rows)` shortens what the block
    left behind to the first `rows` rows of the committed path; `rewind(0)` undoes the block, committed or not, also
    when the forward or the commit failed half way.
    """

    def open(self, block: Block) -> None: ...

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the rows of `path` (nodes, anchor first), drop the block's others."""

    def rewind(self, rows: int) -> None: ...

    def snapshot(self) -> Any:
        """What `restore` needs to come back to the committed state of now; O(1), no copy of K/V."""

    def restore(self, snapshot: Any) -> None: ...

    def release(self) -> Any:
        """mlx-lm's own cache object, holding exactly the committed tokens."""

    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate so that nothing is pending."""
