"""A list of caches carries a block in each of its members, and they advance and go back together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from .block import Block, BlockCache


class ListBlock:
    """Carries a block over mlx-lm's CacheList; a layer takes its members by index."""

    def __init__(self, cache: CacheList, members: Sequence[BlockCache]):
        self._cache = cache
        self._members = tuple(members)

    # What the model sees.

    def __getitem__(self, index: int) -> BlockCache:
        return self._members[index]

    # What the engine sees.

    def open(self, block: Block) -> None:
        for member in self._members:
            member.open(block)

    def commit(self, path: tuple[int, ...]) -> None:
        for member in self._members:
            member.commit(path)

    def rewind(self, rows: int) -> None:
        for member in self._members:
            member.rewind(rows)

    def snapshot(self) -> list[Any]:
        return [member.snapshot() for member in self._members]

    def restore(self, snapshot: list[Any]) -> None:
        for member, state in zip(self._members, snapshot, strict=True):
            member.restore(state)

    def release(self) -> CacheList:
        # Each member releases into the object that it carries, which the list still holds.
        for member in self._members:
            member.release()
        return self._cache

    def arrays(self) -> list[mx.array]:
        return [array for member in self._members for array in member.arrays()]
