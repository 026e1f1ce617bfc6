"""A sampler is mlx-lm's: log-probabilities [B, V] to tokens [B]; ours also knows the distribution it draws from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx_lm import sample_utils

from ..errors import DFlashError

SamplerFunction = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Sampler:
    """Temperature with top-p, min-p and top-k, filtered by mlx-lm's own functions in mlx-lm's order."""

    temperature: float
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0

    def _filtered(self, logprobs: mx.array) -> mx.array:
        if 0 < self.top_p < 1:
            logprobs = sample_utils.apply_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = sample_utils.apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = sample_utils.apply_top_k(logprobs, self.top_k)
        return logprobs

    def __call__(self, logprobs: mx.array) -> mx.array:
        """One token per row: [B, V] to [B]."""
        return sample_utils.categorical_sampling(self._filtered(logprobs), self.temperature)

    def probs(self, logprobs: mx.array) -> mx.array:
        """The distribution of each row, float32 [B, V]."""
        return mx.softmax(self._filtered(logprobs).astype(mx.float32) / self.temperature, axis=-1)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: list[int] | None = None,
) -> SamplerFunction:
    """mlx-lm's `make_sampler`: same arguments, same draws; DFlashError names a value outside its range."""
    _require(
        math.isfinite(temp) and temp >= 0, f"temperature {temp} is negative or not a number; use 0 (greedy) or more"
    )
    _require(0 <= top_p <= 1, f"top_p {top_p} is outside (0, 1]; use 1 to switch it off")
    _require(0 <= min_p <= 1, f"min_p {min_p} is outside [0, 1]; use 0 to switch it off")
    _require(top_k >= 0, f"top_k {top_k} is negative; use 0 to switch it off")
    _require(min_tokens_to_keep >= 1, f"min_tokens_to_keep {min_tokens_to_keep} is below 1; use 1 or more")
    _require(0 <= xtc_probability <= 1, f"xtc_probability {xtc_probability} is outside [0, 1]; use 0 to switch it off")
    _require(0 <= xtc_threshold <= 0.5, f"xtc_threshold {xtc_threshold} is outside [0, 0.5]; 0.1 is usual")
    if temp == 0:
        return sample_utils.greedy_sampler
    if xtc_probability > 0:
        return sample_utils.make_sampler(
            temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, xtc_special_tokens
        )
    return Sampler(temp, top_p, min_p, min_tokens_to_keep, top_k)


def is_greedy(sampler: SamplerFunction | None) -> bool:
    return sampler is None or sampler is sample_utils.greedy_sampler


def is_stateless(function: Callable) -> bool:
    """Whether calling it for tokens that are then rejected can do no harm: true of what mlx-lm and we make.

    Told by where the code stands, since functools.wraps gives any code the name and module of what it wraps.
    """
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, Sampler):
        return type(function) is Sampler
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == sample_utils.greedy_sampler.__code__.co_filename


def all_stateless(functions: Sequence[Callable]) -> bool:
    return all(is_stateless(function) for function in functions)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DFlashError(message + ".")
