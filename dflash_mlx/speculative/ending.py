"""A round is cut where the output ends, before it is committed: never a token more than asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    _round: list[str | None] = field(default_factory=list)  # what each token of the current round, so far, ends with

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return UNLIMITED if self.max_tokens < 0 else self.max_tokens - self.num_tokens

    def ends(self, token: int) -> bool:
        """Whether the output ends with the round's next token."""
        self.num_tokens += 1
        stopped = token in self.eos_token_ids or (self.stops is not None and self.stops(token))
        self._round.append("stop" if stopped else "length" if self.num_tokens == self.max_tokens else None)
        return self._round[-1] is not None

    def cut(self, tokens: tuple[int, ...]) -> tuple[int, str | None]:
        """How many of a round's tokens to keep, and mlx-lm's finish reason when the output ends with them.

        The next token is then the first of another round. Tokens that `ends` was asked about are not looked at again.
        """
        for token in tokens[len(self._round) :]:
            if self._round and self._round[-1] is not None:
                break
            self.ends(token)
        kept, reason = len(self._round), self._round[-1]
        self._round = []
        return kept, reason
