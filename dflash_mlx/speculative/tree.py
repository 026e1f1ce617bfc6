"""The tree of a proposal holds the most probable prefixes of the draft, parents before children, best branch first.

Under the draft's per-position distributions a prefix has the product of its tokens' probabilities; best-first search
gives exactly the budget-many most probable prefixes (DDTree). Equal prefixes in probability are settled by rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf

from ..cache import Block

Path = tuple[int, ...]  # the tokens from the anchor, left out, to a node
# Whether a node of this probability joins so many others, the anchor among them; asked by falling probability.
Worth = Callable[[float, int], bool]
# Of a path: its children's log-probabilities, falling, and their tokens; both empty where nothing follows.
Children = Callable[[Path], tuple[Sequence[float], Sequence[int]]]


@dataclass(frozen=True)
class Tree:
    """parents: of every node, the anchor's -1 first. tokens: of every node behind the anchor, so one fewer."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def block(self) -> Block:
        return Block(self.parents)

    def nodes_along(self, branch: Sequence[int]) -> list[int]:
        """The nodes that hold the branch's tokens, as far as it is in the tree."""
        nodes: list[int] = []
        for node, (parent, token) in enumerate(zip(self.parents[1:], self.tokens, strict=True), 1):
            if token in branch[len(nodes) : len(nodes) + 1] and parent == (nodes[-1] if nodes else 0):
                nodes.append(node)
        return nodes


def build_tree(
    logprobs: Sequence[Sequence[float]],
    ids: Sequence[Sequence[int]],
    budget: int,
    *,
    chain_seed: bool = False,
    tau: float | None = None,
    branches: Iterable[Sequence[int]] = (),
    worth: Worth = lambda probability, num_nodes: True,
) -> Tree:
    """The `budget` most probable prefixes from the top K of every depth.

    logprobs, ids [depth, K], each row best first. chain_seed: the chain of first choices is in the tree whatever its
    probability. tau: leave out prefixes whose log-probability is more than this below the best node's. branches:
    token sequences behind the anchor that are in the tree before anything else, as far as the budget goes. worth: ends
    the tree at the first node that is not.
    """

    def children(path: Path) -> tuple[Sequence[float], Sequence[int]]:
        return (logprobs[len(path)], ids[len(path)]) if len(path) < len(ids) else ((), ())

    first_choices = [[row[0] for row in ids]] if chain_seed else []
    return build_conditioned_tree(children, budget, tau=tau, branches=[*branches, *first_choices], worth=worth)


def build_conditioned_tree(
    children: Children,
    budget: int,
    *,
    tau: float | None = None,
    branches: Iterable[Sequence[int]] = (),
    worth: Worth = lambda probability, num_nodes: True,
) -> Tree:
    """`build_tree` where a token's probability depends on the path before it; `children` is asked once a path."""
    nodes: dict[Path, None] = {}  # in the order of their choice
    for branch in branches:
        for depth in range(1, 1 + min(len(branch), budget - len(nodes))):
            nodes.setdefault(tuple(branch[:depth]))
    for path, logprob in _best_first(children, tau):
        if len(nodes) >= budget or (path not in nodes and not worth(exp(logprob), 1 + len(nodes))):
            break
        nodes.setdefault(path)
    return _flatten(nodes)


def _best_first(children: Children, tau: float | None) -> Iterator[tuple[Path, float]]:
    """Paths and their log-probabilities, falling.

    A node of the heap stands for itself and its later siblings: it sorts before its next sibling and its first child,
    so nothing better is ever missing from the heap.
    """
    heap: list[tuple[float, tuple[int, ...], Path, float, Sequence[float], Sequence[int]]] = []

    def offer(ranks: tuple[int, ...], parent: Path, score: float, logprobs: Sequence[float], ids: Sequence[int]):
        if ranks[-1] < len(ids):
            # Rounding can leave a log-probability above zero; a child is never better than its parent.
            cost = -(score + min(0.0, logprobs[ranks[-1]]))
            heapq.heappush(heap, (cost, ranks, parent, score, logprobs, ids))

    offer((0,), (), 0.0, *children(()))
    limit = inf if tau is None or not heap else heap[0][0] + tau
    while heap and heap[0][0] <= limit:
        cost, ranks, parent, score, logprobs, ids = heapq.heappop(heap)
        path = (*parent, ids[ranks[-1]])
        yield path, -cost
        offer((*ranks[:-1], ranks[-1] + 1), parent, score, logprobs, ids)
        offer((*ranks, 0), path, -cost, *children(path))


def _flatten(nodes: Iterable[Path]) -> Tree:
    """Depth first, siblings in the order of their choice, so that the likeliest path stands at the front."""
    followers: dict[Path, list[Path]] = {}
    for path in nodes:
        followers.setdefault(path[:-1], []).append(path)
    parents, tokens = [-1], []
    stack = [(path, 0) for path in reversed(followers.get((), []))]
    while stack:
        path, parent = stack.pop()
        stack += [(follower, len(parents)) for follower in reversed(followers.get(path, []))]
        parents.append(parent)
        tokens.append(path[-1])
    return Tree(tuple(parents), tuple(tokens))
