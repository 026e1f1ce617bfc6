"""Tokens are copied from text that is at hand: what followed the context's longest repeated suffix, or a hint.

Nothing is learned from one generation to the next: an index holds the tokens of one call and dies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

# A copied continuation is at most this many times as long as the text that speaks for it.
TRUST = 2
MATCH = 16  # tokens that are compared to find a place in a hint


class SuffixIndex:
    """A suffix automaton (Blumer et al. 1985): every substring of a growing text, amortised O(1) per token.

    A state stands for substrings with the same ends; `lengths` its longest, `links` the state of its longest suffix
    with more ends, `ends` the position behind the latest occurrence that was noticed.
    """

    def __init__(self, text: Sequence[int] = ()):
        self.text: list[int] = []
        self._moves: list[dict[int, int]] = [{}]
        self._links, self.lengths, self.ends = [-1], [0], [0]
        self._last = 0
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        self._notice()
        self.text.append(token)
        state, new = self._last, self._state({}, 0, self.lengths[self._last] + 1, len(self.text))
        while state >= 0 and token not in self._moves[state]:
            self._moves[state][token] = new
            state = self._links[state]
        if state >= 0:
            self._links[new] = self._split(state, token)
        self._last = new

    def repeated(self) -> tuple[int, int]:
        """The length of the text's longest suffix that stands in it earlier too, and the position behind it there."""
        state = max(0, self._links[self._last])
        return self.lengths[state], self.ends[state]

    def _notice(self) -> None:
        """Recent text is the better guide: suffixes that stand elsewhere too were met here last."""
        state = self._links[self._last]
        for _ in range(4):  # the longest few, so that it stays O(1)
            if state <= 0:
                break
            self.ends[state] = len(self.text)
            state = self._links[state]

    def _state(self, moves: dict[int, int], link: int, length: int, end: int) -> int:
        self._moves.append(moves)
        self._links.append(link)
        self.lengths.append(length)
        self.ends.append(end)
        return len(self._moves) - 1

    def _split(self, state: int, token: int) -> int:
        """The state that `token` leads to from `state`, cut down to substrings that end here as well."""
        target, length = self._moves[state][token], self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        clone = self._state(dict(self._moves[target]), self._links[target], length, self.ends[target])
        self._links[target] = clone
        while state >= 0 and self._moves[state].get(token) == target:
            self._moves[state][token] = clone
            state = self._links[state]
        return clone


class Source(Protocol):
    hinted: bool  # whether its accepted tokens are counted apart

    def continuation(self, text: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `text`, which has only grown since the last call."""

    def reset(self) -> None:
        """The text was shortened."""


class NgramSource:
    """What followed the longest suffix of the context that it holds twice; runs copy on into themselves."""

    hinted = False

    def __init__(self, min_match: int = 3):
        self._min_match = min_match
        self.reset()

    def reset(self) -> None:
        self._index = SuffixIndex()

    def continuation(self, text: list[int], limit: int) -> list[int]:
        for token in text[len(self._index.text) :]:
            self._index.append(token)
        length, end = self._index.repeated()
        if length < self._min_match:
            return []
        period = len(text) - end
        return [text[end + i % period] for i in range(min(limit, TRUST * length))]


class HintSource:
    """The continuation that the caller expects, as long as the output follows it.

    start: tokens of the text before the output. Where the output leaves the hint, it is found again by the longest end
    of the output, from `min_match` tokens on, that stands in the hint; the place nearest behind the one it left wins.
    """

    hinted = True

    def __init__(self, hint: Sequence[int], start: int, min_match: int = 2):
        self._hint, self._start, self._min_match = list(hint), start, min_match
        self.reset()

    def reset(self) -> None:
        self._seen = self._start
        self._next, self._astray = 0, False

    def continuation(self, text: list[int], limit: int) -> list[int]:
        for end in range(self._seen, len(text)):
            self._follow(text, end)
        self._seen = max(self._seen, len(text))
        return [] if self._astray else self._hint[self._next : self._next + limit]

    def _follow(self, text: list[int], at: int) -> None:
        if not self._astray and self._hint[self._next : self._next + 1] == [text[at]]:
            self._next += 1
            return
        places = [(self._match(text, at + 1, place), place) for place in range(1, len(self._hint))]
        length, place = max(places, key=lambda p: (p[0], p[1] >= self._next, -p[1]), default=(0, 0))
        self._astray = length < self._min_match
        self._next = self._next if self._astray else place

    def _match(self, text: list[int], end: int, place: int) -> int:
        """How many tokens before `place` in the hint are those before `end` in the output, up to MATCH."""
        most = min(MATCH, place, end - self._start)
        return next((n for n in range(most) if self._hint[place - 1 - n] != text[end - 1 - n]), most)


@dataclass(frozen=True)
class Branch:
    tokens: tuple[int, ...]
    hinted: bool


class Copies:
    """The tokens committed in this call and what its sources propose behind them.

    position: absolute, of the first token.
    """

    def __init__(self, sources: Sequence[Source], position: int):
        self._sources, self._position = sources, position
        self._tokens: list[int] = []

    def extend(self, tokens: mx.array) -> None:
        """Take in committed tokens [n]; the round that chose them is evaluated already."""
        if self._sources:
            self._tokens += tokens.tolist()

    def branches(self, anchor: int, limit: int) -> list[Branch]:
        """What may follow the committed tokens and the anchor, in the order of the sources."""
        if not self._sources or limit < 1:
            return []
        self._tokens.append(anchor)
        found = [(tuple(source.continuation(self._tokens, limit)), source.hinted) for source in self._sources]
        self._tokens.pop()  # it is committed with the next round
        return [Branch(tokens, hinted) for tokens, hinted in found if tokens]

    def rewind(self, position: int) -> None:
        del self._tokens[max(0, position - self._position) :]
        for source in self._sources:
            source.reset()
