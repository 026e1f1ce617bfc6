"""A draft whose logits depend on the tokens chosen before is asked along paths, all in one graph.

A chain is one path. The most probable prefixes of a tree are among the best paths of every depth, so that those are
followed side by side and no answer has to be read back before the next question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from ..draft.candidates import where_largest
from ..draft.drafted import Drafted
from .candidates import top_candidates
from .tree import Children, Path


def followed(drafted: Drafted, choose: Callable[[mx.array], mx.array]) -> tuple[Drafted, mx.array]:
    """The draft as it is along one path, and the path's columns [n]; `choose` maps logits [1, C] to a column [1]."""
    assert drafted.correction is not None
    state, rows, columns = drafted.correction.start(), [], []
    for position in range(drafted.num_positions):
        rows.append(drafted.correction.logits(position, state))
        columns.append(choose(rows[-1]))
        if position + 1 < drafted.num_positions:
            state = drafted.correction.advance(position, state, drafted.tokens_at(position, columns[-1]))
    return replace(drafted, logits=mx.concatenate(rows), correction=None), mx.concatenate(columns)


def children_along(drafted: Drafted, budget: int, k: int, temperature: float = 1.0) -> Children:
    """The k most probable tokens behind every path that can be among the `budget` most probable prefixes.

    A path of d tokens that has a child among them leaves room for budget − d of its length: that many are followed.
    """
    assert drafted.correction is not None
    state, scores = drafted.correction.start(), mx.zeros(1)
    asked, followed_on = [], []  # of every depth: log-probabilities and tokens [W, 2 K]; [W'] indices into [W, K]
    for position in range(min(drafted.num_positions, budget)):
        logprobs, columns = top_candidates(drafted.correction.logits(position, state) / temperature, k)
        tokens = drafted.tokens_at(position, columns)
        asked.append(mx.concatenate([logprobs, tokens.astype(mx.float32)], axis=1))  # tokens are exact below 2 ** 24
        totals = (scores[:, None] + logprobs).reshape(-1)
        chosen = where_largest(totals[None], max(1, budget - position - 1))[0]
        followed_on.append(chosen)
        state = drafted.correction.advance(position, state[chosen // logprobs.shape[1]], tokens.reshape(-1)[chosen])
        scores = totals[chosen]
    mx.eval(asked, followed_on)
    return _table(asked, followed_on).__getitem__


def _table(asked: list[mx.array], followed_on: list[mx.array]) -> _Table:
    table, paths = _Table(), [()]
    for answers, chosen in zip(asked, followed_on, strict=True):
        k = answers.shape[1] // 2
        rows = [(row[:k], [int(token) for token in row[k:]]) for row in answers.tolist()]
        table |= zip(paths, rows, strict=True)
        paths = [(*paths[i // k], rows[i // k][1][i % k]) for i in chosen.tolist()]
    return table


class _Table(dict[Path, tuple[list[float], list[int]]]):
    """Children of paths; none of those that were not followed."""

    def __missing__(self, path: Path) -> tuple[list[float], list[int]]:
        return [], []
