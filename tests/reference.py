"""Plain autoregressive decoding, written to be obviously right: one token per forward, nothing clever."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache


def plain_tokens(
    model,
    prompt: list[int],
    num_tokens: int,
    *,
    choose: Callable[[mx.array], int] | None = None,
    processors=(),
    cache=None,
) -> list[int]:
    """The tokens that plain decoding yields behind `prompt`; `choose` maps log-probabilities [V] to a token."""
    choose = choose or (lambda logprobs: int(mx.argmax(logprobs).item()))
    cache = make_prompt_cache(model) if cache is None else cache
    fed = list(prompt)
    if len(prompt) > 1:
        model(mx.array([prompt[:-1]]), cache=cache)
        mx.eval([c.state for c in cache])
    tokens = []
    for _ in range(num_tokens):
        logits = model(mx.array([fed[-1:]]), cache=cache)[:, -1]
        for processor in processors:
            logits = processor(mx.array(fed), logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        tokens.append(choose(logprobs[0]))
        fed.append(tokens[-1])
    return tokens


def margin(model, context: list[int], a: int, b: int) -> float:
    """How far apart the target's logits of two tokens are behind `context`, relative to the largest logit."""
    logits = model(mx.array([context]))[0, -1].astype(mx.float32)
    return float((mx.abs(logits[a] - logits[b]) / mx.max(mx.abs(logits))).item())


def fresh_prefill(model, tokens: list[int]):
    """A cache that holds exactly `tokens`, made in one forward, and the logits behind the last of them [V]."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    mx.eval([c.state for c in cache], logits)
    return cache, logits
