"""Statistics are counted from finished rounds and never change what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from .loop import Step


@dataclass(frozen=True)
class Round:
    """width: nodes verified, the anchor included. num_accepted: draft tokens accepted, the accepted path without the
    anchor. committed: tokens committed. depth: of the deepest node. num_hinted: hint tokens among the accepted;
    hint_width: hint tokens among the nodes.
    """

    width: int
    num_accepted: int
    committed: int
    round_s: float
    depth: int = 0
    num_hinted: int = 0
    hint_width: int = 0

    @staticmethod
    def of(step: Step, round_s: float) -> Round:
        block, hinted = step.proposal.block, step.proposal.hinted
        return Round(
            width=block.size,
            num_accepted=step.num_accepted,
            committed=len(step.tokens),
            round_s=round_s,
            depth=max(block.depths),
            num_hinted=sum(node in hinted for node in step.path[1 : 1 + step.num_accepted]),
            hint_width=len(hinted),
        )


@dataclass
class Statistics:
    """What one generation's rounds did; grows while it runs.

    The first round, which turns the prompt's last token into the first token, has no draft and is left out of
    every mean. unseen_tokens: tokens of the prompt cache handed in that the draft knows nothing of.
    """

    rounds: list[Round] = field(default_factory=list)
    unseen_tokens: int = 0

    @property
    def drafted_rounds(self) -> list[Round]:
        return self.rounds[1:]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target forward; 0 before the second round."""
        rounds = self.drafted_rounds
        return sum(r.committed for r in rounds) / len(rounds) if rounds else 0.0

    @property
    def accepted_of_proposed(self) -> float:
        """Accepted draft tokens ÷ proposed draft tokens; 0 when nothing was proposed."""
        proposed = sum(r.width - 1 for r in self.drafted_rounds)
        return sum(r.num_accepted for r in self.drafted_rounds) / proposed if proposed else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each draft position: share accepted among the rounds that proposed it and accepted all before it."""
        shares = []
        for position in range(1, 1 + max((r.depth for r in self.drafted_rounds), default=0)):
            tried = [r for r in self.drafted_rounds if r.depth >= position and r.num_accepted >= position - 1]
            if not tried:
                break
            shares.append(sum(r.num_accepted >= position for r in tried) / len(tried))
        return shares

    def summary(self) -> dict:
        """For JSON."""
        return {
            "target_forwards": len(self.rounds),
            "acceptance_length": self.acceptance_length,
            "accepted_of_proposed": self.accepted_of_proposed,
            "acceptance_by_position": self.acceptance_by_position,
            "unseen_tokens": self.unseen_tokens,
            "max_width": max((r.width for r in self.rounds), default=0),
            "widths": [r.width for r in self.rounds],
            "mean_depth": sum(r.depth for r in self.drafted_rounds) / max(1, len(self.drafted_rounds)),
            "hint_tokens_proposed": sum(r.hint_width for r in self.rounds),
            "hint_tokens_accepted": sum(r.num_hinted for r in self.rounds),
        }
