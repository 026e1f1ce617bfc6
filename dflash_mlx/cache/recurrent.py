"""Recurrent state is never overwritten: a block leaves a tape, and commit reads the state after a path from it.

The layers run over the block from the committed state and record how the state after any of its paths follows from
that state (targets/recurrent). Commit and rewind ask for one path each, without a second forward, and stay lazy: the
next forward consumes the result. All arrays are immutable, so a snapshot is a list of references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..errors import TargetStateError, UnsupportedTargetError
from .block import Block

State: TypeAlias = Any  # an mx.array, or None before the first token
StatesAfter = Callable[[tuple[int, ...]], Sequence[State]]


class RecurrentBlock:
    """Carries a block over mlx-lm's ArraysCache.

    A layer reads the committed state with `cache[slot]` and `cache.block`, and hands its tape to `record`.
    """

    # Padding belongs to batches; no layer is told of any.
    lengths = None
    left_padding = None

    def __init__(self, cache: ArraysCache):
        if cache.lengths is not None or (cache.left_padding is not None and mx.any(cache.left_padding > 0).item()):
            raise UnsupportedTargetError(
                "This prompt cache belongs to a padded batch, whose recurrent state cannot be rolled back row by row; "
                "start from a fresh prompt cache."
            )
        self._cache = cache
        self._states: tuple[State, ...] = tuple(cache.cache)
        self._base = self._states
        self._tape: dict[int, tuple[StatesAfter, int]] = {}
        self._path: tuple[int, ...] = ()
        self.block = Block.chain(1)

    # What the model sees.

    def __getitem__(self, slot: int) -> State:
        return self._base[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        raise UnsupportedTargetError(
            "A recurrent layer of this target overwrites its state and cannot be rolled back; generate without a draft."
        )

    def make_mask(self, N: int) -> None:
        return None

    def advance(self, N: int) -> None:
        pass

    def empty(self) -> bool:
        return self._base[0] is None

    @property
    def batch_size(self) -> int:
        return next((state.shape[0] for state in self._base if state is not None), 1)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states if state is not None)

    # What a layer does.

    def record(self, states_after: StatesAfter, slots: Sequence[int] | None = None) -> None:
        """Take a layer's tape: `states_after(path)` gives the states, one per slot, after the path's last node.

        Layers that share a cache name the slots that are theirs.
        """
        for i, slot in enumerate(range(len(self._base)) if slots is None else slots):
            self._tape[slot] = (states_after, i)

    def one_row(self, slots: Sequence[int] | None = None) -> ArraysCache:
        """mlx-lm's own cache at the committed state, for a layer that takes its own step over a one-row block."""
        plain = ArraysCache(len(self._base))
        plain.cache = list(self._base)
        taken = range(len(self._base)) if slots is None else slots
        self.record(lambda path: [plain[slot] for slot in taken], taken)
        return plain

    # What the engine sees.

    def open(self, block: Block) -> None:
        self.block = block
        self._base = self._states
        self._tape = {}
        self._path = ()

    def commit(self, path: tuple[int, ...]) -> None:
        unrecorded = [slot for slot in range(len(self._base)) if slot not in self._tape]
        if unrecorded:
            raise TargetStateError(
                f"No layer recorded the states {unrecorded} of a recurrent cache in this round; "
                "start from a fresh prompt cache."
            )
        self._states = self._after(path)
        self._path = path

    def rewind(self, rows: int) -> None:
        if rows == 0:  # also where the commit stopped half way
            self._states, self._path = self._base, ()
        elif rows != len(self._path):
            self._states, self._path = self._after(self._path[:rows]), self._path[:rows]

    def snapshot(self) -> tuple[State, ...]:
        return self._states

    def restore(self, snapshot: tuple[State, ...]) -> None:
        self._states = snapshot
        self.open(self.block)

    def release(self) -> ArraysCache:
        self._cache.cache = list(self._states)
        return self._cache

    def arrays(self) -> list[mx.array]:
        return [state for state in self._states if state is not None]

    def _after(self, path: tuple[int, ...]) -> tuple[State, ...]:
        states = {tape: tape(path) for tape, _ in self._tape.values()}
        return tuple(states[tape][i] for tape, i in (self._tape[slot] for slot in range(len(self._base))))
