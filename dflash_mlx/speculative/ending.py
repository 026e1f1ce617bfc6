"""A round is cut where the output ends, before it is committed: never a token more than asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

UNLIMITED = 1 << 30


@dataclass
class Ending:
    """When to stop: end-of-sequence, a number of tokens, or the caller's own test on each token.

    max_tokens: −1 for no limit. stops: called once for every token, in order; true at the last token to keep.
    """

    eos_token_ids: frozenset[int]
    max_tokens: int = -1
    stops: Callable[[int], bool] | None = None
    num_tokens: int = 0

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return UNLIMITED if self.max_tokens < 0 else self.max_tokens - self.num_tokens

    def cut(self, tokens: tuple[int, ...]) -> tuple[int, str | None]:
        """How many of a round's tokens to keep, and mlx-lm's finish reason when the output ends with them."""
        for kept, token in enumerate(tokens, 1):
            self.num_tokens += 1
            if token in self.eos_token_ids or (self.stops is not None and self.stops(token)):
                return kept, "stop"
            if self.num_tokens == self.max_tokens:
                return kept, "length"
        return len(tokens), None
