"""Drives the whole loop with a scripted proposer, as stream_generate does with a draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.generate import Request, decode
from dflash_mlx.speculative.ending import Ending
from dflash_mlx.speculative.loop import Step
from dflash_mlx.targets.target import Target

STREAM = mx.default_stream(mx.default_device())


@dataclass
class Run:
    tokens: list[int]
    cache: list
    steps: list[Step] = field(default_factory=list)


def request(prompt: list[int], num_tokens: int, *, sampler=None, processors=(), eos=(), prefill_step_size=7) -> Request:
    return Request(
        mx.array(prompt), num_tokens, sampler, tuple(processors), frozenset(eos), prefill_step_size, lambda *_: None
    )


def run(
    model, prompt, proposer, num_tokens, *, cache=None, stop_after=None, stops=None, capture=(), target=None, **kw
) -> Run:
    """Decode `num_tokens`, or until the consumer stops in the middle of a round after `stop_after` tokens."""
    kv_quantization = kw.pop("kv_quantization", None)
    wanted = request(prompt, num_tokens, **kw)
    cache = make_prompt_cache(model) if cache is None else cache
    target = target or Target(model, cache, capture_layer_ids=capture, kv_quantization=kv_quantization)
    ending = Ending(wanted.eos_token_ids, num_tokens, stops)
    result = Run([], cache)
    steps = decode(target, proposer, wanted, ending, stream=STREAM)
    for step in steps:
        result.steps.append(step)
        for i, token in enumerate(step.tokens):
            step.taken = i + 1
            result.tokens.append(token)
            if len(result.tokens) == stop_after:
                steps.close()
                return result
    return result
