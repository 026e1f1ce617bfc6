"""What a draft says of the tokens behind an anchor: lazy numbers, no decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


class Correction(Protocol):
    """Logits that depend on the tokens chosen before; row w of a state belongs to the w-th of W paths."""

    def start(self) -> mx.array:
        """The state [1, ..] behind the anchor."""

    def logits(self, position: int, state: mx.array) -> mx.array:
        """Logits [W, C] of a position behind the paths of `state`."""

    def advance(self, position: int, state: mx.array, tokens: mx.array) -> mx.array:
        """The state when tokens [W] have been chosen at a position."""


@dataclass(frozen=True)
class Drafted:
    """The n positions behind an anchor.

    logits [n, C]: of every position, as far as it can be told before anything is chosen. token_ids: the tokens that the
    columns stand for, int [C] or, where they differ by position, [n, C]; None where column i is token i. finite: 0-d,
    false when the draft's activations overflowed. correction: how the logits change with what was chosen; None where
    they do not.
    """

    logits: mx.array
    finite: mx.array
    token_ids: mx.array | None = None
    correction: Correction | None = None

    @property
    def num_positions(self) -> int:
        return self.logits.shape[0]

    def tokens(self, columns: mx.array) -> mx.array:
        """The tokens [n, ..] of columns [n, ..] of every position."""
        if self.token_ids is None:
            return columns
        if self.token_ids.ndim == 1:
            return self.token_ids[columns]
        return mx.take_along_axis(self.token_ids, columns.reshape(columns.shape[0], -1), axis=1).reshape(columns.shape)

    def tokens_at(self, position: int, columns: mx.array) -> mx.array:
        """The tokens of columns [..] of one position."""
        if self.token_ids is None:
            return columns
        return (self.token_ids if self.token_ids.ndim == 1 else self.token_ids[position])[columns]

    def spread(self, probs: mx.array, vocab_size: int) -> mx.array:
        """Probabilities [n, C] of the columns as those [n, V] of the tokens."""
        if self.token_ids is None:
            return probs
        ids = mx.broadcast_to(self.token_ids, probs.shape)
        return mx.put_along_axis(mx.zeros((probs.shape[0], vocab_size), probs.dtype), ids, probs, axis=1)
