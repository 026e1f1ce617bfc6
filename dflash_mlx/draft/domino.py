"""What Domino adds: a recurrent network over the tokens chosen so far corrects every position's logits.

Logits of all positions come from one forward of the network; what is sequential is small: a GRU step, two narrow
matrices, and a shortlist of tokens in the place of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .candidates import largest
from .config import DraftConfig
from .drafted import Drafted
from .heads import rows_of

SHORTLIST = 2048  # tokens of a block that its tokens are chosen from


class DominoHead(nn.Module):
    """correction = widen(silu(narrow([hidden | state]))), state = GRU over the embeddings of anchor and tokens so far.

    biased: which of its four matrices have a bias. learned_start: the GRU's first state is a weight, else 0. The GRU's
    gates stand in the order reset, update, new.
    """

    def __init__(self, config: DraftConfig, biased: Collection[str] = (), learned_start: bool = False):
        super().__init__()
        head, hidden_size = config.domino, config.hidden_size
        assert head is not None
        self._plain, self._state_size = head.plain, head.state_size
        self.shortlist = SHORTLIST
        rows = config.draft_vocab_size or config.vocab_size
        self.input_gates = nn.Linear(hidden_size, 3 * head.state_size, bias="input_gates" in biased)
        self.state_gates = nn.Linear(head.state_size, 3 * head.state_size, bias="state_gates" in biased)
        self.narrow = nn.Linear(hidden_size + head.state_size, head.rank, bias="narrow" in biased)
        self.widen = nn.Linear(head.rank, rows, bias="widen" in biased)
        if learned_start:
            self.start = mx.zeros((head.state_size,))

    def step(self, state: mx.array, inputs: mx.array) -> mx.array:
        """The GRU's next state [W, S] from its state and inputs [W, E]."""
        from_input, from_state = (mx.split(x, 3, axis=-1) for x in (self.input_gates(inputs), self.state_gates(state)))
        reset, update = (mx.sigmoid(from_input[i] + from_state[i]) for i in range(2))
        new = mx.tanh(from_input[2] + reset * from_state[2])
        return new + update * (state - new)

    def code(self, hidden: mx.array, state: mx.array) -> mx.array:
        """What `widen` makes the correction of: [.., rank] from states [.., S] and hidden [.., E], or [E] for all."""
        hidden = mx.broadcast_to(hidden, (*state.shape[:-1], hidden.shape[-1]))
        return nn.silu(self.narrow(mx.concatenate([hidden, state], axis=-1)))

    def __call__(
        self, drafted: Drafted, hidden: mx.array, anchor: int, embed: Callable[[mx.array], mx.array]
    ) -> Drafted:
        """A draft [n, C] with its hidden states [n, E], corrected along paths."""
        logits, widen = drafted.logits, self.widen
        if self.shortlist < logits.shape[1]:
            columns = self._likely(logits)
            tokens = drafted.token_ids[columns] if drafted.token_ids is not None else columns
            drafted = replace(drafted, logits=logits[:, columns], token_ids=tokens)
            widen = rows_of(widen, columns)
        paths = Paths(self, drafted.logits, hidden, widen, embed, mx.array([anchor]))
        return replace(drafted, correction=paths)

    def _likely(self, logits: mx.array) -> mx.array:
        """Columns that some position finds likely, by their distance from that position's best."""
        distance = mx.max(logits - mx.max(logits, axis=-1, keepdims=True), axis=0)
        return mx.sort(largest(distance[None], self.shortlist)[1][0])

    def first_state(self, anchor: mx.array) -> mx.array:
        start = self.start[None] if "start" in self else mx.zeros((1, self._state_size), anchor.dtype)
        return self.step(start, anchor)

    def corrects(self, position: int) -> bool:
        return position >= self._plain


class Paths:
    """The correction; a path's state [W, S] is the GRU's behind its last token."""

    def __init__(
        self,
        head: DominoHead,
        logits: mx.array,
        hidden: mx.array,
        widen: Callable[[mx.array], mx.array],
        embed: Callable[[mx.array], mx.array],
        anchor: mx.array,
    ):
        self._head, self._logits, self._hidden, self._widen = head, logits, hidden, widen
        self._embed, self._anchor = embed, anchor

    def start(self) -> mx.array:
        return self._head.first_state(self._inputs(self._anchor))

    def logits(self, position: int, state: mx.array) -> mx.array:
        if not self._head.corrects(position):
            return mx.broadcast_to(self._logits[position], (state.shape[0], self._logits.shape[1]))
        return self._logits[position] + self._widen(self._head.code(self._hidden[position], state))

    def advance(self, position: int, state: mx.array, tokens: mx.array) -> mx.array:
        return self._head.step(state, self._inputs(tokens))

    def _inputs(self, tokens: mx.array) -> mx.array:
        return self._embed(tokens).astype(self._hidden.dtype)
