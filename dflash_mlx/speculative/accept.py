"""Every committed token is the target's own choice: its argmax, its sample, or an exact rejection step.

A rule looks at a proposal and its verification and returns an `Acceptance`. Rules whose parts are free of side
effects work in graph and read one small array, the round's only host sync. Where the caller's sampler or logits
processors are unknown code, the walk is done on the host instead, so that they are called exactly once for every
committed token and never for a rejected one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm import sample_utils

from ..cache import Block
from ..targets.verification import Verification, log_softmax
from .proposal import Proposal
from .sampling import LogitsProcessor, Sampler, SamplerFunction, all_stateless, is_greedy, is_stateless


@dataclass(frozen=True)
class Acceptance:
    """The outcome of a round.

    path: accepted nodes, the anchor first. tokens: what the round commits, one per node of the path: the accepted
    draft tokens, then the bonus token. logprobs: lazy [len(path), V], the target's, row i for tokens[i].
    draft_finite: false when the draft's activations overflowed.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: mx.array
    draft_finite: bool = True

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1

    @property
    def bonus_token(self) -> int:
        return self.tokens[-1]


class AcceptanceRule(Protocol):
    def __call__(self, proposal: Proposal, verification: Verification) -> Acceptance: ...


def follow(block: Block, tokens: mx.array, chosen: mx.array) -> mx.array:
    """The deepest node whose whole path holds the target's tokens; int, 0-d, in graph.

    tokens [N]: the nodes' tokens. chosen [N]: the target's token after each node. Example: the chain 5 7 9 with
    chosen 7 8 1 gives node 1, since 7 was chosen after 5 but 8, not 9, after 7.
    """
    agrees = (tokens == chosen[block.parent_array]) | (block.depth_array == 0)
    reached = mx.all(agrees[None] | ~block.ancestors, axis=1)
    return mx.argmax(mx.where(reached, block.depth_array + 1, 0))


def pack(proposal: Proposal, node: mx.array, bonus: mx.array) -> mx.array:
    """All that the host has to know of a round in one int array, so that reading it is the round's one sync."""
    finite = mx.array(True) if proposal.finite is None else proposal.finite
    scalars = mx.stack([node.astype(mx.int32), bonus.astype(mx.int32), finite.astype(mx.int32)])
    return mx.concatenate([scalars, proposal.tokens[0]])


def unpack(proposal: Proposal, packed: mx.array, logprobs: mx.array) -> Acceptance:
    last, bonus_token, draft_finite, *tokens = packed.tolist()
    path = proposal.block.path_to(last)
    return Acceptance(path, (*(tokens[i] for i in path[1:]), bonus_token), along(logprobs, path), bool(draft_finite))


def along(rows: mx.array, path: tuple[int, ...]) -> mx.array:
    """Rows [N, ..] of the path's nodes; for a chain a slice."""
    return rows[: len(path)] if path[-1] == len(path) - 1 else rows[mx.array(path)]


def best(logits: mx.array) -> mx.array:
    """Greedy tokens [N], as mlx-lm's argmax of log-probabilities gives them.

    In half precision subtracting the log-sum makes ties, which fall to the first; in float32 it does not within what
    two widths of a forward differ by, so the sum over the vocabulary, costly on a CPU, is left out.
    """
    return mx.argmax(logits if logits.dtype == mx.float32 else log_softmax(logits), axis=-1)


class History:
    """The tokens fed so far in this call, as mlx-lm's logits processors want them."""

    def __init__(self, processors: Sequence[LogitsProcessor], prompt: mx.array):
        self._processors = processors
        self._tokens = prompt[:-1]  # the prompt's last token is the first anchor

    def logits(self, proposal: Proposal, verification: Verification) -> mx.array:
        """Logits [N, V] of every node, processed with the node's own prefix."""
        if not self._processors:
            return verification.logits[0]
        paths = (proposal.block.path_to(node) for node in range(proposal.block.size))
        return mx.concatenate([self.node_logits(proposal, verification, path) for path in paths])

    def node_logits(self, proposal: Proposal, verification: Verification, path: tuple[int, ...]) -> mx.array:
        """Logits [1, V] of the path's last node; calls each processor once."""
        logits = verification.logits[:, path[-1]]
        if self._processors:
            tokens = mx.concatenate([self._tokens, along(proposal.tokens[0], path)])
            for processor in self._processors:
                logits = processor(tokens, logits)
        return logits

    def extend(self, proposal: Proposal, path: tuple[int, ...]) -> None:
        if self._processors:
            self._tokens = mx.concatenate([self._tokens, along(proposal.tokens[0], path)])


class GraphRule:
    """A rule whose decision is made in graph; subclasses say how."""

    def __init__(self, sampler: SamplerFunction, history: History):
        self._sampler, self._history = sampler, history

    def __call__(self, proposal: Proposal, verification: Verification) -> Acceptance:
        packed, logprobs = self.graph(proposal, verification)
        acceptance = unpack(proposal, packed, logprobs)
        self._history.extend(proposal, acceptance.path)
        return acceptance

    def graph(self, proposal: Proposal, verification: Verification) -> tuple[mx.array, mx.array]:
        """The packed outcome and the processed log-probabilities [N, V], both lazy."""
        logits = self._history.logits(proposal, verification)
        logprobs = log_softmax(logits)
        return pack(proposal, *self._decide(proposal, logits, logprobs)), logprobs

    def _decide(self, proposal: Proposal, logits: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        """The last accepted node and the bonus token, both 0-d."""
        raise NotImplementedError


class WalkRule(GraphRule):
    """Choose the target's token at every node, then follow the child that holds it; exact for any tree."""

    def _decide(self, proposal: Proposal, logits: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        chosen = best(logits) if is_greedy(self._sampler) else self._choose(logprobs)
        node = follow(proposal.block, proposal.tokens[0], chosen)
        return node, chosen[node]

    def _choose(self, logprobs: mx.array) -> mx.array:
        if isinstance(self._sampler, Sampler):
            return self._sampler(logprobs)
        # XTC draws once per call: a call per row keeps the rows independent.
        return mx.concatenate([self._sampler(row[None]) for row in logprobs])


class RatioRule(WalkRule):
    """Rejection sampling along a chain of sampled draft tokens (Leviathan et al. 2023, algorithm 1).

    Accept x with probability min(1, target_probs(x) / draft_probs(x)); at the first rejection draw the bonus token
    from the normalised positive part of target_probs − draft_probs; after the last node from target_probs.
    """

    def _decide(self, proposal: Proposal, logits: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
        if proposal.draft_probs is None:
            return super()._decide(proposal, logits, logprobs)
        return ratio_accept(proposal.tokens[0, 1:], self._sampler.probs(logprobs), proposal.draft_probs)


def ratio_accept(draft_tokens: mx.array, target_probs: mx.array, draft_probs: mx.array) -> tuple[mx.array, mx.array]:
    """Number of accepted draft tokens and the bonus token, both 0-d, in graph.

    draft_tokens int [N − 1]; target_probs [N, V]; draft_probs [N − 1, V].
    """
    at_draft = draft_tokens[:, None]
    p = mx.take_along_axis(target_probs[:-1], at_draft, axis=-1)[:, 0]
    q = mx.take_along_axis(draft_probs, at_draft, axis=-1)[:, 0]
    accepted = mx.random.uniform(shape=q.shape) * q < p
    num_accepted = mx.cumprod(accepted.astype(mx.int32)).sum()
    # Behind the last draft token nothing is subtracted.
    subtracted = mx.concatenate([draft_probs, mx.zeros_like(target_probs[:1])])[num_accepted]
    residual = mx.maximum(target_probs[num_accepted] - subtracted, 0)
    # Rounding can leave nothing where the two distributions agree; the target's own is then right.
    residual = mx.where(residual.sum() > 0, residual, target_probs[num_accepted])
    return num_accepted, mx.random.categorical(mx.log(residual))


class StepwiseRule:
    """Walk on the host, one node at a time: exact for samplers and processors that are any code at all.

    ends: whether the output ends with the round's next token, so that nothing is called for what would stand behind.
    """

    def __init__(self, sampler: SamplerFunction, history: History, ends: Callable[[int], bool]):
        self._sampler, self._history, self._ends = sampler, history, ends

    def __call__(self, proposal: Proposal, verification: Verification) -> Acceptance:
        drafted = proposal.tokens[0].tolist()
        path: tuple[int, ...] = (0,)
        tokens: list[int] = []
        rows: list[mx.array] = []
        while True:
            rows.append(log_softmax(self._history.node_logits(proposal, verification, path)))
            tokens.append(int(self._sampler(rows[-1]).item()))
            child = None if self._ends(tokens[-1]) else _child(proposal.block, path[-1], drafted, tokens[-1])
            if child is None:
                break
            path += (child,)
        self._history.extend(proposal, path)
        finite = proposal.finite is None or bool(proposal.finite.item())
        return Acceptance(path, tuple(tokens), mx.concatenate(rows), finite)


def _child(block: Block, node: int, tokens: list[int], token: int) -> int | None:
    return next((i for i, parent in enumerate(block.parents) if parent == node and tokens[i] == token), None)


def make_rule(
    sampler: SamplerFunction | None,
    processors: Sequence[LogitsProcessor],
    prompt: mx.array,
    ends: Callable[[int], bool],
) -> AcceptanceRule:
    """The rule that is exact for this sampler and these processors at the least cost."""
    sampler = sampler or sample_utils.greedy_sampler
    history = History(processors, prompt)
    if not (is_stateless(sampler) and all_stateless(processors)):
        return StepwiseRule(sampler, history, ends)
    if isinstance(sampler, Sampler):
        return RatioRule(sampler, history)
    return WalkRule(sampler, history)
