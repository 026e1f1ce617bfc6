"""The proof of losslessness on the user's own machine: the same tokens when greedy, the same distribution when not.

Greedy: plain and speculative decoding of every prompt; where they part, the target's own margin between the two
tokens there. A margin within a few roundings of the weights' type is a tie, which the two widths of a forward may
break differently; anything else is a fault.

Sampling: every token of a speculative output is compared with the target's distribution at its place (recomputed
by one plain forward over the output). With the tokens ordered by falling probability, u = P(more probable tokens) +
v · P(token), v uniform, is uniform on [0, 1] and independent from place to place exactly when the tokens are draws
from those distributions (Rosenblatt 1952). A chi-square test over 20 bins looks at all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from .draft import DFlashDraft
from .generate import stream_generate
from .speculative.sampling import Sampler

BINS = 20
SIGNIFICANCE = 1e-3
TIE_ROUNDINGS = 8  # of the largest logit
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def check_greedy(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft | None,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 128,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Plain against speculative decoding; `options` go to stream_generate. "lossless" is the verdict."""
    results, lengths = [], []
    for prompt in tqdm(prompts, desc="prompts", disable=not progress):
        plain = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens)]
        responses = list(stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft, **options))
        results.append(compare(model, prompt, plain, [r.token for r in responses]))
        statistics = responses[-1].statistics  # type: ignore[attr-defined]
        lengths += [statistics.acceptance_length] if statistics.drafted_rounds else []
    return {
        "mode": "greedy",
        "prompts": len(results),
        "identical": sum(r["identical"] for r in results),
        "ties": sum(r.get("tie", False) for r in results),
        "divergences": [r | {"prompt": i} for i, r in enumerate(results) if not r["identical"]],
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
        "lossless": all(r["identical"] or r["tie"] for r in results),
    }


def compare(model: nn.Module, prompt: list[int], plain: list[int], speculative: list[int]) -> dict[str, Any]:
    """Identical, or where the two part, with the target's margin there."""
    if plain == speculative:
        return {"identical": True}
    at = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    if at is None:  # one is the beginning of the other: no tie explains that
        at = min(len(plain), len(speculative))
        return {"identical": False, "at": at, "tie": False, "lengths": [len(plain), len(speculative)]}
    logits = model(mx.array([prompt + plain[:at]]), cache=make_prompt_cache(model))[0, -1]
    wide = logits.astype(mx.float32)
    margin = abs(wide[plain[at]].item() - wide[speculative[at]].item())
    resolution = EPSILON.get(logits.dtype, EPSILON[mx.bfloat16]) * mx.max(mx.abs(wide)).item()
    return {
        "identical": False,
        "at": at,
        "plain_token": plain[at],
        "speculative_token": speculative[at],
        "margin": margin,
        "resolution": resolution,
        "tie": margin <= TIE_ROUNDINGS * resolution,
    }


def check_sampling(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft | None,
    prompts: Sequence[list[int]],
    sampler: Sampler,
    *,
    max_tokens: int = 64,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """A test of the distribution of all tokens of all prompts together. "lossless" is the verdict."""
    uniforms: list[float] = []
    for prompt in tqdm(prompts, desc="prompts", disable=not progress):
        responses = list(
            stream_generate(
                model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft, sampler=sampler, **options
            )
        )
        uniforms += transformed(model, prompt, [r.token for r in responses], sampler)
    statistic, p_value = uniformity(np.array(uniforms))
    return {
        "mode": "sampling",
        "temperature": sampler.temperature,
        "tokens": len(uniforms),
        "chi_square": statistic,
        "degrees_of_freedom": BINS - 1,
        "p_value": p_value,
        "lossless": p_value >= SIGNIFICANCE,
    }


def transformed(model: nn.Module, prompt: list[int], tokens: list[int], sampler: Sampler) -> list[float]:
    """u of every token; see the head of this file."""
    logits = model(mx.array([prompt + tokens[:-1]]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    probs = sampler.probs(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    own = mx.take_along_axis(probs, mx.array(tokens)[:, None], axis=-1)
    above = mx.sum(mx.where(probs > own, probs, 0), axis=-1)
    # Equally probable tokens share their stretch of [0, 1].
    level = mx.sum(mx.where(probs == own, probs, 0), axis=-1)
    return (above + mx.random.uniform(shape=above.shape) * level).tolist()


def uniformity(uniforms: np.ndarray) -> tuple[float, float]:
    """Chi-square statistic of `uniforms` over equal bins, and its p-value."""
    counts, _ = np.histogram(uniforms, bins=BINS, range=(0.0, 1.0 + 1e-6))
    expected = len(uniforms) / BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, chi_square_tail(statistic, BINS - 1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with odd `freedom` ≥ statistic), in closed form (Abramowitz and Stegun 26.4.4)."""
    assert freedom % 2 == 1
    root = math.sqrt(statistic)
    term, series = root, 0.0
    for k in range(1, freedom, 2):
        series += term
        term *= statistic / (k + 2)
    density = math.exp(-statistic / 2) / math.sqrt(2 * math.pi)
    return min(1.0, math.erfc(root / math.sqrt(2)) + 2 * density * series)


def render(result: dict[str, Any]) -> str:
    """The verdict for a terminal."""
    verdict = "LOSSLESS" if result["lossless"] else "NOT LOSSLESS"
    if result["mode"] == "sampling":
        return (
            f"{verdict}: {result['tokens']} sampled tokens at temperature {result['temperature']} against the target's "
            f"distribution, chi-square {result['chi_square']:.1f} with {result['degrees_of_freedom']} degrees of "
            f"freedom, p = {result['p_value']:.3f}"
        )
    length = result["acceptance_length"]
    lines = [
        f"{verdict}: {result['identical']} of {result['prompts']} outputs identical, {result['ties']} apart at a tie, "
        + ("nothing drafted" if length is None else f"{length:.2f} tokens committed per target forward")
    ]
    for d in result["divergences"]:
        if "margin" in d:
            lines.append(
                f"  prompt {d['prompt']}: token {d['at']} is {d['speculative_token']}, plain {d['plain_token']}; the "
                f"target's margin there is {d['margin']:.2e}, one rounding is {d['resolution']:.2e}"
            )
        else:
            lines.append(f"  prompt {d['prompt']}: lengths {d['lengths']}")
    return "\n".join(lines)
