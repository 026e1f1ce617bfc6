"""A draft is judged by really decoding: what the loop's own statistics say over many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from tqdm import tqdm

from ..draft import DFlashDraft
from ..generate import stream_generate
from ..speculative.statistics import Statistics


def decode_all(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 128,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Greedy decoding of every prompt; `options` go to stream_generate.

    acceptance_length is over all rounds of all prompts; acceptance_by_position likewise.
    """
    total = Statistics(rounds=[])
    lengths: list[float] = []
    num_tokens = 0
    for prompt in tqdm(prompts, desc="eval", unit="prompt", disable=not progress):
        statistics = None
        for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft, **options):
            statistics, num_tokens = response.statistics, num_tokens + 1  # type: ignore[attr-defined]
        assert statistics is not None
        lengths.append(statistics.acceptance_length)
        total.rounds += statistics.drafted_rounds if total.rounds else statistics.rounds
    return {
        "prompts": len(prompts),
        "tokens": num_tokens,
        "acceptance_length": total.acceptance_length,
        "acceptance_by_position": total.acceptance_by_position,
        "lowest": min(lengths),
        "highest": max(lengths),
    }
