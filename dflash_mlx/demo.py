"""One prompt, decoded speculatively before the user's eyes, then plainly: one honest line compares the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import mlx_lm

from .bench.measure import Timed, timed
from .draft import DFlashDraft
from .generate import stream_generate
from .text import chat_prompt


def demo(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft | None,
    prompt: str,
    *,
    max_tokens: int = 128,
    write: Callable[[str], None],
    **options: Any,
) -> dict[str, Any]:
    """Stream the answer through `write`; `options` go to stream_generate. Returns the figures of the last line."""
    tokens = chat_prompt(tokenizer, prompt)

    def speculative(limit: int, show: Callable[[str], None]) -> Timed:
        def responses():
            for response in stream_generate(model, tokenizer, tokens, max_tokens=limit, draft_model=draft, **options):
                show(response.text)
                yield response

        return timed(responses())

    started = time.perf_counter()
    speculative(4, lambda text: None)  # compiles kernels, so that neither side pays for them below
    run = speculative(max_tokens, write)
    plain = timed(mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=max_tokens))
    return {
        "tokens": len(run.tokens),
        "plain_tokens_per_s": plain.tokens_per_s,
        "speculative_tokens_per_s": run.tokens_per_s,
        "ratio": run.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0,
        "acceptance_length": run.statistics.acceptance_length
        if run.statistics and run.statistics.drafted_rounds
        else None,
        "identical": run.tokens == plain.tokens,
        "total_s": time.perf_counter() - started,
    }


def render(result: dict[str, Any]) -> str:
    length = result["acceptance_length"]
    accepted = "nothing drafted" if length is None else f"acceptance length {length:.2f}"
    same = "identical" if result["identical"] else "NOT identical (run dflash-mlx check)"
    return (
        f"{result['tokens']} tokens · plain {result['plain_tokens_per_s']:.1f} tokens/s, speculative "
        f"{result['speculative_tokens_per_s']:.1f} ({result['ratio']:.2f}×) · {accepted} · outputs {same}"
    )
