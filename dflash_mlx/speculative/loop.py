"""The one loop: verify, accept, commit, propose, yield; chain and tree, greedy and sampled, any proposer.

At every yield the state is consistent: the round is committed and the next draft is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from ..targets.target import Target
from .accept import AcceptanceRule, along
from .ending import Ending
from .proposal import Proposal
from .proposers import Proposer


@dataclass
class Step:
    """One round, already committed.

    tokens: the accepted draft tokens, then the bonus token, unless the output ended before it. logprobs: the
    target's, lazy [len(tokens), V]. num_accepted: draft tokens among them. proposal: what was verified. path: its
    nodes that went into the caches, the anchor first. finish_reason: "stop" or "length" on the last round. taken: how
    many of the tokens the consumer used; one who stops early lowers it before closing the loop.
    """

    tokens: tuple[int, ...]
    logprobs: mx.array
    num_accepted: int
    proposal: Proposal
    path: tuple[int, ...]
    finish_reason: str | None
    taken: int

    @property
    def width(self) -> int:
        """Nodes verified."""
        return self.proposal.block.size

    @property
    def rows(self) -> int:
        """Rows that went into the caches."""
        return len(self.path)


def speculate(
    target: Target,
    proposer: Proposer,
    rule: AcceptanceRule,
    ending: Ending,
    anchor: int,
    *,
    stream: mx.Stream,
    keep_cache: bool = True,
) -> Iterator[Step]:
    """Decode behind `anchor`, the prompt's last token, which is not in the caches yet.

    When the iterator ends, fails or is closed, the caches hold what stood before, the anchor, and the tokens taken;
    where a failure cannot be undone, using them raises TargetStateError.
    `keep_cache=False` says that nobody will look: the forward of a pending bonus token is then saved.
    """
    step: Step | None = None  # the round handed out last; None while one is under way
    try:
        with mx.stream(stream):
            proposal = Proposal.single(anchor)
        while True:
            with mx.stream(stream):
                verification = target.verify(proposal)
                acceptance = rule(proposal, verification)
                kept, finish_reason = ending.cut(acceptance.tokens)
                path = acceptance.path[: kept + 1]
                target.commit(path)
                if not acceptance.draft_finite:
                    proposer.mend()
                proposer.extend(along(proposal.tokens[0], path), _committed(verification.hidden, path))
                num_accepted = min(kept, acceptance.num_accepted)
                done = Step(
                    acceptance.tokens[:kept], acceptance.logprobs, num_accepted, proposal, path, finish_reason, kept
                )
                if finish_reason is None:
                    proposal = proposer.propose(acceptance.bonus_token, target.widest, ending.remaining)
                    mx.async_eval(proposal.tokens, proposer.arrays())
            step = done
            yield step
            if finish_reason is not None:
                return
            target.seal()
            anchor, step = acceptance.bonus_token, None
    except (RuntimeError, MemoryError):
        # MLX reports a failed evaluation so, and takes what it was evaluating for done: no array can be trusted.
        target.lose()
        raise
    finally:
        with mx.stream(stream):
            _settle(target, proposer, step, anchor, keep_cache)


def _committed(hidden: mx.array | None, path: tuple[int, ...]) -> mx.array | None:
    return None if hidden is None else along(hidden[0], path)[None]


def _settle(target: Target, proposer: Proposer, step: Step | None, anchor: int, keep_cache: bool) -> None:
    """Bring the caches and the proposer to the tokens taken and hand the caches back as mlx-lm's own.

    What fails here leaves the caches with the target: the caller's list says so when it is used.
    """
    if target.is_lost:
        return
    pending: int | None = None
    if step is None:  # the round failed half way
        target.abort()
        pending = anchor
    else:
        rows = min(1 + step.taken, step.rows)
        if rows < step.rows:
            target.rewind(rows)
        if step.taken == step.rows:
            pending = step.tokens[-1]
    proposer.rewind(target.position)
    if keep_cache and pending is not None:
        _run(target, proposer, pending)
    target.finish()


def _run(target: Target, proposer: Proposer, token: int) -> None:
    """Commit one token whose choice is already made."""
    try:
        proposal = Proposal.single(token)
        verification = target.verify(proposal)
        mx.eval(verification.logits)
        target.commit((0,))
    except BaseException:
        target.abort()
        raise
    proposer.extend(proposal.tokens[0], verification.hidden)
