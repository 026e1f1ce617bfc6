"""A scripted proposer: the reference continuation, corrupted every n-th token, so that acceptance is known exactly."""

from __future__ import annotations

import mlx.core as mx

from dflash_mlx.speculative.proposal import Proposal


class InertProposer:
    """What proposers of the tests have in common: nothing to remember, nothing pending, nothing that overflows."""

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        pass

    def rewind(self, position: int) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []

    def mend(self) -> None:
        raise AssertionError("a scripted proposal is always finite")


class ScriptedProposer(InertProposer):
    """Proposes `width` − 1 tokens of `text` behind what is committed.

    corrupt_every: 0 proposes the truth, 1 only errors, n an error at every n-th token of the text.
    """

    def __init__(
        self, text: list[int], vocab_size: int, *, block_size: int = 8, corrupt_every: int = 0, start: int = 0
    ):
        self._text, self._vocab_size = text, vocab_size
        self._block_size, self._corrupt_every = block_size, corrupt_every
        self.committed = start
        self.seen: list[int] = []
        self.hidden_rows = 0

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.committed += tokens.size
        self.seen += tokens.tolist()
        self.hidden_rows += 0 if hidden is None else hidden.shape[1]

    def propose(self, anchor: int, width: int, depth: int) -> Proposal:
        assert self._text[self.committed : self.committed + 1] in ([], [anchor]), "the proposer lost its place"
        positions = range(self.committed + 1, self.committed + min(width, depth, self._block_size))
        return Proposal.chain(mx.array([[anchor] + [self._drafted(p) for p in positions]]))

    def _drafted(self, position: int) -> int:
        token = self._text[position] if position < len(self._text) else 0
        wrong = self._corrupt_every and position % self._corrupt_every == 0
        return (token + 1) % self._vocab_size if wrong else token

    def rewind(self, position: int) -> None:
        assert position <= self.committed
