"""Statistics are counted from finished rounds and never change what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """width: rows verified, the anchor included. num_accepted: draft tokens accepted. committed: tokens committed."""

    width: int
    num_accepted: int
    committed: int
    round_s: float


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
        for position in range(1, max((r.width for r in self.drafted_rounds), default=1)):
            tried = [r for r in self.drafted_rounds if r.width > position and r.num_accepted >= position - 1]
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
        }
