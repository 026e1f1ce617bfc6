"""A proposer sees every committed token in order and proposes what may come next; it never decides anything."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..draft import DFlashDraft, DraftContext
from ..draft.drafted import Drafted
from ..targets.target import Target
from ..targets.verification import log_softmax
from .candidates import top_candidates
from .causal import children_along, followed
from .ngram import Branch, Copies, Source
from .proposal import Proposal
from .sampling import Sampler, SamplerFunction
from .tree import Tree, build_conditioned_tree, build_tree
from .width import FullWidth, Width


class Proposer(Protocol):
    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Take in n more committed tokens [n] and their target hidden [1, n, n_captured × E]; lazy."""

    def propose(self, anchor: int, width: int, depth: int) -> Proposal:
        """At most `width` nodes, at most `depth` of them on a path, the anchor included in both; lazy."""

    def rewind(self, position: int) -> None:
        """Forget the committed tokens at and behind this absolute position."""

    def arrays(self) -> list[mx.array]:
        """What is pending."""

    def mend(self) -> None:
        """The last proposal's numbers were not finite: do better or stop proposing, and say so."""


@dataclass(frozen=True)
class Shape:
    """What a proposal may look like.

    block_size: nodes of a chain and of the draft's block, the anchor included. tree_budget: nodes of a tree besides
    the anchor; 0 for a chain. tree_top_k: tokens of every position that a tree may hold.
    """

    block_size: int
    tree_budget: int = 0
    tree_top_k: int = 16


class DraftProposer:
    """A block of the draft, as a chain or as the tree of its most probable prefixes.

    sampler: where it knows its distribution the tokens of a chain are sampled from the draft's, else they are its
    argmax. context: of an earlier generation that this one continues. sources: of copied continuations; in a tree they
    are branches of their own, of a chain one takes the place and spares the draft's forward. width: how much of the
    block and of the budget is used.

    The topology of a tree and an adaptive width depend on the draft's numbers, so they cost a second read-back a round:
    the top K, one array of [depth, 2 K] or, where tokens depend on those before, one of every depth. Chains of full
    width need none.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        target: Target,
        *,
        shape: Shape | None = None,
        sampler: SamplerFunction | None = None,
        context: DraftContext | None = None,
        sources: Sequence[Source] = (),
        width: Width | None = None,
    ):
        self._draft, self._target = draft, target
        self._shape = shape or Shape(draft.block_size)
        self._width = width or FullWidth()
        self._num_nodes: int | None = None  # of the proposal whose outcome the width has yet to learn
        self._sampler = sampler if isinstance(sampler, Sampler) else None
        self._copies = Copies(sources, target.position)
        self._drafting = True
        self.context = draft.make_context(target.position) if context is None else context

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None, "the target captures what the draft reads"
        if self._num_nodes is not None:
            self._width.observe(self._num_nodes, tokens.size - 1)
            self._num_nodes = None
        self._draft.extend(self.context, hidden)
        self._copies.extend(tokens)

    def propose(self, anchor: int, width: int, depth: int) -> Proposal:
        largest = min(self._shape.block_size, width, depth) - 1
        budget = min(self._shape.tree_budget, width - 1) if depth > 1 else 0
        # A copy has half of a tree that it shares with the draft.
        branches = self._copies.branches(anchor, min((budget + 1) // 2, depth - 1) if budget else largest)
        if not self._drafting or (branches and not budget):
            return copied(anchor, branches, budget)
        proposal = self._drafted(anchor, self._width.positions(largest), budget, branches)
        self._num_nodes = proposal.block.size
        return proposal

    def _drafted(self, anchor: int, positions: int, budget: int, branches: Sequence[Branch]) -> Proposal:
        if not positions:
            return copied(anchor, branches, budget)
        drafted = self._draft.draft(anchor, positions, self.context, self._target.embed, self._target.lm_head)
        if budget:
            return tree_proposal(anchor, self._tree(drafted, budget, branches), branches, drafted.finite)
        chosen, draft_probs = self._choose(drafted)
        tokens = mx.concatenate([mx.array([anchor]), chosen.astype(mx.int32)])[None]
        return Proposal.chain(tokens, draft_probs, drafted.finite)

    def _choose(self, drafted: Drafted) -> tuple[mx.array, mx.array | None]:
        """A chain's tokens, and their distributions where they are samples, as long as the width finds worth it."""
        columns = None
        if drafted.correction is not None:
            drafted, columns = followed(drafted, self._column)
        if self._sampler is None:
            if not self._width.reads_probabilities:
                columns = mx.argmax(drafted.logits, axis=-1) if columns is None else columns
                return drafted.tokens(columns[:, None])[:, 0], None
            logprobs, best = top_candidates(drafted.logits, 1)
            columns = best[:, 0] if columns is None else columns
            return drafted.tokens(columns[:, None])[: self._length(mx.exp(logprobs[:, 0])), 0], None
        probs = self._sampler.probs(log_softmax(drafted.logits))
        draft_probs = drafted.spread(probs, self._target.anatomy.vocab_size)
        if self._width.reads_probabilities:
            # Not the sample's own probability: whether a position is proposed may depend on the samples before it only.
            draft_probs = draft_probs[: self._length(mx.max(draft_probs, axis=-1))]
            if not draft_probs.size:
                return mx.zeros((0,), dtype=mx.int32), None
        if columns is None:
            return mx.random.categorical(mx.log(draft_probs)), draft_probs
        return drafted.tokens(columns[:, None])[: draft_probs.shape[0], 0], draft_probs

    def _column(self, logits: mx.array) -> mx.array:
        """One column of every row [W, C]: the best, or a sample."""
        if self._sampler is None:
            return mx.argmax(logits, axis=-1)
        return mx.random.categorical(mx.log(self._sampler.probs(log_softmax(logits))))

    def _length(self, probabilities: mx.array) -> int:
        path = 1.0
        for position, probability in enumerate(probabilities.tolist()):
            path *= probability
            if not self._width.worth(path, 1 + position):
                return position
        return probabilities.size

    def _tree(self, drafted: Drafted, budget: int, branches: Sequence[Branch]) -> Tree:
        temperature = 1.0 if self._sampler is None else self._sampler.temperature
        k, copies, worth = self._shape.tree_top_k, [branch.tokens for branch in branches], self._width.worth
        if drafted.correction is not None:
            children = children_along(drafted, budget, k, temperature)
            return build_conditioned_tree(children, budget, branches=copies, worth=worth)
        logprobs, columns = top_candidates(drafted.logits / temperature, k)
        ids = drafted.tokens(columns)
        k = ids.shape[1]
        rows = mx.concatenate([logprobs, ids.astype(mx.float32)], axis=1).tolist()  # ids are exact below 2 ** 24
        return build_tree(
            [row[:k] for row in rows],
            [[int(token) for token in row[k:]] for row in rows],
            budget,
            branches=copies,
            worth=worth,
        )

    def rewind(self, position: int) -> None:
        # Behind a failed round or an overflow the context may be shorter already.
        self.context.trim(max(0, self.context.position - position))
        self._copies.rewind(position)

    def arrays(self) -> list[mx.array]:
        return self.context.arrays()

    def mend(self) -> None:
        if self._draft.dtype == mx.float32:
            warnings.warn("The draft's activations are not finite in float32 either; decoding plainly.", stacklevel=2)
            self._drafting = False
            return
        warnings.warn(f"The draft's activations overflow in {self._draft.dtype}; it runs in float32.", stacklevel=2)
        self._draft.set_dtype(mx.float32)
        self.context = self._draft.make_context(self.context.position)


class CopyProposer:
    """Copied continuations alone, without any draft: the first source's as a chain or all of them as a tree."""

    def __init__(self, target: Target, sources: Sequence[Source], *, shape: Shape):
        self._copies, self._shape = Copies(sources, target.position), shape

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self._copies.extend(tokens)

    def propose(self, anchor: int, width: int, depth: int) -> Proposal:
        budget = min(self._shape.tree_budget, width - 1) if depth > 1 else 0
        limit = min(budget or min(self._shape.block_size, width) - 1, depth - 1)
        return copied(anchor, self._copies.branches(anchor, limit), budget)

    def rewind(self, position: int) -> None:
        self._copies.rewind(position)

    def arrays(self) -> list[mx.array]:
        return []

    def mend(self) -> None:
        """Copies are always finite."""


def copied(anchor: int, branches: Sequence[Branch], budget: int) -> Proposal:
    """Branches without a draft's tokens: all in a tree where it has a budget, else the first."""
    nodes = budget or max([len(b.tokens) for b in branches[:1]], default=0)
    tree = build_tree([], [], nodes, branches=[b.tokens for b in branches])
    return tree_proposal(anchor, tree, branches)


def tree_proposal(anchor: int, tree: Tree, branches: Sequence[Branch], finite: mx.array | None = None) -> Proposal:
    hinted = frozenset(node for branch in branches if branch.hinted for node in tree.nodes_along(branch.tokens))
    return Proposal(mx.array([[anchor, *tree.tokens]]), tree.block, finite=finite, hinted=hinted)
