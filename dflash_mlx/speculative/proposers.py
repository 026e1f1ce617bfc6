"""A proposer sees every committed token in order and proposes what may come next; it never decides anything."""

from __future__ import annotations

import warnings
from typing import Protocol

import mlx.core as mx

from ..draft import DFlashDraft, DraftContext
from ..targets.target import Target
from ..targets.verification import log_softmax
from .proposal import Proposal
from .sampling import Sampler, SamplerFunction


class Proposer(Protocol):
    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Take in n more committed tokens [n] and their target hidden [1, n, n_captured × E]; lazy."""

    def propose(self, anchor: int, width: int) -> Proposal:
        """At most `width` nodes, the anchor included; lazy."""

    def rewind(self, position: int) -> None:
        """Forget the committed tokens at and behind this absolute position."""

    def arrays(self) -> list[mx.array]:
        """What is pending."""

    def mend(self) -> None:
        """The last proposal's numbers were not finite: do better or stop proposing, and say so."""


class DraftProposer:
    """A block of the draft as a chain.

    block_size: nodes of the block, the anchor included; the draft's own by default. sampler: where it knows its
    distribution the draft tokens are sampled from the draft's, else they are its argmax. context: of an earlier
    generation that this one continues.
    """

    def __init__(
        self,
        draft: DFlashDraft,
        target: Target,
        *,
        block_size: int | None = None,
        sampler: SamplerFunction | None = None,
        context: DraftContext | None = None,
    ):
        self._draft, self._target = draft, target
        self._block_size = block_size or draft.block_size
        self._sampler = sampler if isinstance(sampler, Sampler) else None
        self.context = draft.make_context(target.position) if context is None else context

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None, "the target captures what the draft reads"
        self._draft.extend(self.context, hidden)

    def propose(self, anchor: int, width: int) -> Proposal:
        size = min(self._block_size, width)
        if size == 1:
            return Proposal.single(anchor)
        block = mx.array([[anchor] + [self._draft.mask_token_id] * (size - 1)])
        hidden = self._draft(self._draft.embed(block, self._target.embed), self.context)
        # A draft in float16 can overflow; any finite distribution keeps the acceptance exact (FIELD: float16 drafts).
        finite = mx.isfinite(hidden)
        logits = self._draft.logits(mx.where(finite, hidden, 0)[:, 1:], self._target.lm_head)[0]
        drafted, draft_probs = self._choose(logits)
        tokens = mx.concatenate([block[0, :1], drafted.astype(block.dtype)])[None]
        return Proposal.chain(tokens, draft_probs, mx.all(finite))

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        if self._sampler is None:
            return mx.argmax(logits, axis=-1), None
        draft_probs = self._sampler.probs(log_softmax(logits))
        return mx.random.categorical(mx.log(draft_probs)), draft_probs

    def rewind(self, position: int) -> None:
        # Behind a failed round or an overflow the context may be shorter already.
        self.context.trim(max(0, self.context.position - position))

    def arrays(self) -> list[mx.array]:
        return self.context.arrays()

    def mend(self) -> None:
        if self._draft.dtype == mx.float32:
            warnings.warn("The draft's activations are not finite in float32 either; decoding plainly.", stacklevel=2)
            self._block_size = 1
            return
        warnings.warn(f"The draft's activations overflow in {self._draft.dtype}; it runs in float32.", stacklevel=2)
        self._draft.set_dtype(mx.float32)
        self.context = self._draft.make_context(self.context.position)
