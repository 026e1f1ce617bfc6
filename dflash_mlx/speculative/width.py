"""How wide a proposal pays: all of it, its nodes above a probability, or what commits the most tokens per second.

A node is worth verifying while its chance of being committed outweighs what its row costs. Chances are the draft's
own (the product of the probabilities along the path), corrected by how they came true so far; costs are those of the
rounds so far, by least squares over nodes verified and positions drafted.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from ..errors import DFlashError

# Nodes of a proposal, the anchor included: few sizes, so that graphs and kernels are used again.
SIZES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256))


class Width(Protocol):
    reads_probabilities: bool  # whether a chain's probabilities have to be read back for `worth`

    def positions(self, largest: int) -> int:
        """How many positions to draft, 0..largest; a new round starts."""

    def worth(self, probability: float, num_nodes: int) -> bool:
        """Whether a node of this path probability joins the `num_nodes` chosen so far; asked by falling probability."""

    def observe(self, num_nodes: int, num_accepted: int) -> None:
        """The round verified so many nodes, the anchor included, and accepted so many."""


class FullWidth:
    """The whole block, the whole budget, always."""

    reads_probabilities = False

    def positions(self, largest: int) -> int:
        return largest

    def worth(self, probability: float, num_nodes: int) -> bool:
        return True

    def observe(self, num_nodes: int, num_accepted: int) -> None:
        pass


class ThresholdWidth(FullWidth):
    """Nodes whose path is at least so probable, filled up to the next of SIZES with the most probable others."""

    reads_probabilities = True

    def __init__(self, threshold: float):
        self._threshold = threshold

    def worth(self, probability: float, num_nodes: int) -> bool:
        return probability >= self._threshold or num_nodes not in SIZES


class AutoWidth:
    """What commits the most tokens per second, as far as this generation has shown.

    timed: costs are measured round by round; else they stay those assumed at the start, so that a seed gives the same
    tokens every time.
    """

    reads_probabilities = True

    def __init__(self, *, timed: bool):
        self._costs = Costs()
        self._timed = timed
        self._survival = Survival()
        self._came_true, self._expected = 4.0, 4.0  # accepted nodes and the draft's expectation of them, with a prior
        self._pause, self._resting = 1, 0  # rounds without a draft, when it does not pay
        self._drafted, self._started = 0, 0.0

    def positions(self, largest: int) -> int:
        self._hoped, self._committed = 0.0, 1.0
        self._started = time.perf_counter()
        self._drafted = self._best_positions(largest)
        return self._drafted

    def _best_positions(self, largest: int) -> int:
        if self._resting:
            self._resting -= 1
            return 0
        expected = self._survival.expected(largest)
        rates = [expected[n] / self._costs(1 + n, n) for n in range(largest + 1)]
        best = max(range(largest + 1), key=rates.__getitem__)
        if best:
            self._pause = 1
            return best
        # The text may become easier: look again, less and less often.
        self._resting, self._pause = self._pause, min(2 * self._pause, 32)
        return min(2, largest)

    def worth(self, probability: float, num_nodes: int) -> bool:
        chance = probability * self._came_true / self._expected
        cost = self._costs(num_nodes, self._drafted)
        gain = chance * cost > self._committed * (self._costs(num_nodes + 1, self._drafted) - cost)
        if gain or num_nodes not in SIZES:
            self._hoped += probability
            self._committed += chance
            return True
        return False

    def observe(self, num_nodes: int, num_accepted: int) -> None:
        if self._timed:
            self._costs.observe(num_nodes, self._drafted, time.perf_counter() - self._started)
        self._survival.observe(self._drafted, num_accepted)
        if self._drafted:
            self._came_true = 0.98 * self._came_true + min(num_accepted, self._drafted)
            self._expected = 0.98 * self._expected + self._hoped


class Survival:
    """How often the draft is right up to each position, from the rounds so far; older rounds count less."""

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._passed: list[float] = []

    def observe(self, drafted: int, accepted: int) -> None:
        for position in range(drafted):
            if position == len(self._tried):
                self._tried.append(2.0)
                self._passed.append(1.2)
            if accepted >= position:
                self._tried[position] = 0.97 * self._tried[position] + 1
                self._passed[position] = 0.97 * self._passed[position] + (accepted > position)

    def expected(self, largest: int) -> list[float]:
        """Tokens committed by a round of 0, 1, .. `largest` positions; what was never tried is as its predecessor."""
        committed, reach, share = [1.0], 1.0, 0.6
        for position in range(largest):
            if position < len(self._tried):
                share = self._passed[position] / self._tried[position]
            reach *= share
            committed.append(committed[-1] + reach)
        return committed


class Costs:
    """Time of a round: fixed + per node verified + for drafting at all + per position drafted.

    Least squares with a weak prior, in units of the fixed part. A draft's weights are read once for all positions, so
    that asking it costs more than asking it for one position more.
    """

    PRIOR = np.array([1.0, 0.045, 0.12, 0.01])

    def __init__(self) -> None:
        self._line = self.PRIOR
        self._moments = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self._unit = 0.0  # seconds of the prior's unit, from the first round on

    def __call__(self, num_nodes: int, drafted: int) -> float:
        return float(self._line @ _features(num_nodes, drafted))

    def observe(self, num_nodes: int, drafted: int, seconds: float) -> None:
        x = _features(num_nodes, drafted)
        if not self._unit:
            self._unit = seconds / float(self.PRIOR @ x)
        elif seconds > 3 * self._unit * self(num_nodes, drafted):
            return  # the consumer paused, or the machine did
        self._moments = 0.98 * self._moments + np.outer(x, x)
        self._sums = 0.98 * self._sums + x * (seconds / self._unit)
        # The prior weighs less than a few rounds, but directions in which nothing was tried stay as assumed.
        weight = np.diag([0.04, 8.0, 1.0, 8.0])
        line = np.linalg.solve(self._moments + weight, self._sums + weight @ self.PRIOR)
        self._line = np.maximum(line, self.PRIOR * 0.05)


def _features(num_nodes: int, drafted: int) -> np.ndarray:
    return np.array([1.0, num_nodes, drafted > 0, drafted])


def make_width(value: str | float, *, timed: bool) -> Width:
    """The width that "full", "auto" or a probability names; DFlashError for anything else."""
    if value == "full":
        return FullWidth()
    if value == "auto":
        return AutoWidth(timed=timed)
    try:
        threshold = float(value)
    except (TypeError, ValueError):
        threshold = -1.0
    if not 0 < threshold < 1:
        raise DFlashError(f"width {value!r} is neither 'full' nor 'auto' nor a probability between 0 and 1.")
    return ThresholdWidth(threshold)
