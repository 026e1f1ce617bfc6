"""Speeds are compared inside one process, run by run in turn, so that a drifting machine hits both sides alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ..draft import DFlashDraft
from ..generate import stream_generate
from ..speculative.accept import History, WalkRule
from ..speculative.proposers import DraftProposer, Shape
from ..speculative.statistics import Statistics
from ..targets.target import Target


@dataclass(frozen=True)
class Timed:
    """One generation. decode_s counts from the first token to the last."""

    tokens: tuple[int, ...]
    decode_s: float
    statistics: Statistics | None

    @property
    def tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else 0.0


def timed(responses: Any) -> Timed:
    tokens: list[int] = []
    statistics, first = None, 0.0
    for response in responses:
        if not tokens:
            first = time.perf_counter()
        tokens.append(response.token)
        statistics = getattr(response, "statistics", None)
    return Timed(tuple(tokens), time.perf_counter() - first, statistics)


def run_plain(model: nn.Module, tokenizer: Any, prompt: list[int], max_tokens: int) -> Timed:
    """mlx-lm's own decoding."""
    return timed(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))


def run_speculative(
    model: nn.Module, tokenizer: Any, prompt: list[int], max_tokens: int, draft: DFlashDraft | None, **options: Any
) -> Timed:
    return timed(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft, **options))


def median_s(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call that evaluates what it builds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@dataclass(frozen=True)
class RoundCost:
    """Median seconds of a round and of its parts at one block size, measured in turn at the same depth.

    round_s: a round of real decoding. target_forward_s: a bare forward of the target, logits evaluated.
    draft_forward_s: a bare draft forward with the context of one token, head and argmax. host_s: Python's time to
    build the graphs of a round; handing them to the device is left out, since the CPU backend works while it takes
    them.
    """

    block_size: int
    round_s: float
    target_forward_s: float
    draft_forward_s: float
    host_s: float

    @property
    def overhead(self) -> float:
        """round_s ÷ (target_forward_s + draft_forward_s); 1.00 is an engine that costs nothing."""
        return self.round_s / (self.target_forward_s + self.draft_forward_s)


class RoundBench:
    """The parts of a round on their own, behind a prompt of tokens."""

    def __init__(self, model: nn.Module, draft: DFlashDraft, block_size: int, prompt: Sequence[int]):
        self._model, self._block_size, self._anchor = model, block_size, prompt[-1]
        self._cache = make_prompt_cache(model)
        self._target = Target(model, self._cache, capture_layer_ids=draft.capture_layer_ids)
        self._proposer = DraftProposer(draft, self._target, shape=Shape(block_size))
        tokens = mx.array(list(prompt))
        self._rule = WalkRule(greedy_sampler, History((), tokens))
        with mx.stream(generation_stream):
            for _, hidden in self._target.prefill(tokens, len(prompt)):
                self._proposer.extend(tokens[:-1], hidden)
        self._last = tokens[-2:-1], None if hidden is None else hidden[:, -1:]
        mx.eval(self._last, self._proposer.arrays())

    def target_forward(self) -> None:
        with mx.stream(generation_stream):
            mx.eval(self._model(mx.full((1, self._block_size), self._anchor), cache=self._cache))
            for cache in self._cache:
                cache.trim(self._block_size)

    def draft_forward(self) -> None:
        """With the context of one committed token, the least that a round brings."""
        with mx.stream(generation_stream):
            self._proposer.extend(*self._last)
            mx.eval(self._proposer.propose(self._anchor, self._block_size, self._block_size).tokens)
            self._proposer.rewind(self._target.position)

    def host_s(self) -> float:
        """Seconds that building the graphs of one round takes; the round accepts nothing."""
        with mx.stream(generation_stream):
            proposal = self._proposer.propose(self._anchor, self._block_size, self._block_size)
            mx.eval(proposal.tokens)
            started = time.perf_counter()
            verification = self._target.verify(proposal)
            packed, _ = self._rule.graph(proposal, verification)
            built = time.perf_counter()
            packed.tolist()
            read = time.perf_counter()
            self._target.commit((0,))
            hidden = verification.hidden
            self._proposer.extend(proposal.tokens[0, :1], None if hidden is None else hidden[:, :1])
            proposal = self._proposer.propose(self._anchor, self._block_size, self._block_size)
            committed = time.perf_counter()
            mx.eval(proposal.tokens)
            self._target.seal()
        return built - started + committed - read


def round_cost(
    model: nn.Module, tokenizer: Any, draft: DFlashDraft, block_size: int, prompts: Sequence[list[int]]
) -> RoundCost | None:
    """Real rounds and their bare parts in turn, prompt by prompt; None when no answer has a whole round."""
    rounds: list[float] = []
    targets, drafts, hosts = [], [], []
    for number, prompt in enumerate([prompts[0], *prompts] if len(prompts) == 1 else prompts):
        run = run_speculative(model, tokenizer, prompt, 3 * block_size + 16, draft, block_size=block_size)
        assert run.statistics is not None
        full = [r.round_s for r in run.statistics.drafted_rounds if r.width == block_size]
        if not full:
            continue
        parts = RoundBench(model, draft, block_size, [*prompt, *run.tokens[: len(run.tokens) // 2]])
        parts.target_forward()
        if number == 0:
            continue  # the first turn compiles kernels
        for _ in range(len(full)):
            targets.append(median_s(parts.target_forward, 1))
            drafts.append(median_s(parts.draft_forward, 1))
        rounds += full
        hosts += [parts.host_s() for _ in range(4)]
    if not rounds:
        return None
    return RoundCost(block_size, *(statistics.median(x) for x in (rounds, targets, drafts, hosts)))
