"""A benchmark's result is one JSON object with the machine it was measured on; the table is drawn from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from .. import machine
from ..draft import DFlashDraft
from ..speculative.statistics import Statistics
from .measure import Timed, round_cost, run_plain, run_speculative
from .prompts import Prompt

DEFINITIONS = {
    "tokens_per_s": "tokens behind the first ÷ seconds from the first token to the last; median over prompts",
    "ratio": "speculative ÷ plain tokens_per_s of the same prompt, run in turn; median over prompts",
    "acceptance_length": "tokens committed per target forward, the first forward left out",
    "accepted_of_proposed": "accepted ÷ proposed draft tokens",
    "acceptance_by_position": "share accepted among the rounds that accepted all positions before",
    "identical": "prompts whose speculative tokens equal plain decoding's",
    "overhead": "round_s ÷ (target_forward_s + draft_forward_s)",
    "host_s": "seconds that building one round's graphs takes in Python",
}


def run_bench(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft,
    prompts: Sequence[Prompt],
    *,
    block_sizes: Sequence[int],
    max_tokens: int = 128,
    costs: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Plain decoding and every block size in turn on every prompt, greedy."""
    encoded = [
        tokenizer.apply_chat_template([{"role": "user", "content": p.text}], add_generation_prompt=True)
        for p in prompts
    ]
    mx.reset_peak_memory()
    run_plain(model, tokenizer, encoded[0], 8)
    for size in block_sizes:  # the first runs compile kernels
        run_speculative(model, tokenizer, encoded[0], 2 * size + 2, draft, block_size=size)
    plain: list[Timed] = []
    runs: dict[int, list[Timed]] = {size: [] for size in block_sizes}
    for tokens in tqdm(encoded, desc="prompts", disable=not progress):
        plain.append(run_plain(model, tokenizer, tokens, max_tokens))
        for size in block_sizes:
            runs[size].append(run_speculative(model, tokenizer, tokens, max_tokens, draft, block_size=size))
    peak_bytes = mx.get_peak_memory()
    rows = [_row(size, plain, runs[size], prompts) for size in block_sizes]
    if costs:
        for row in tqdm(rows, desc="rounds", disable=not progress):
            cost = round_cost(model, tokenizer, draft, row["block_size"], encoded[:5])
            row |= {name: getattr(cost, name) for name in ("round_s", "target_forward_s", "draft_forward_s", "host_s")}
            row["overhead"] = cost.overhead
    return {
        "plain_tokens_per_s": statistics.median(run.tokens_per_s for run in plain),
        "block_sizes": rows,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "peak_bytes": peak_bytes,
        "weights_bytes": weights_bytes(model) + weights_bytes(draft),
        "definitions": DEFINITIONS,
        "machine": machine.device_facts() | {"blas": machine.blas()},
        "versions": machine.versions(),
        "slow": machine.slowness(model),
    }


def weights_bytes(module: nn.Module) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _row(size: int, plain: list[Timed], runs: list[Timed], prompts: Sequence[Prompt]) -> dict[str, Any]:
    ratios = [run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, plain, strict=True) if base.tokens_per_s]
    merged = Statistics()
    merged.rounds = [r for run in runs for r in (run.statistics.drafted_rounds if run.statistics else [])]
    merged.rounds.insert(0, merged.rounds[0])  # stands for the first forwards, which every mean leaves out
    kinds = {}
    for kind in dict.fromkeys(p.kind for p in prompts):
        of_kind = [run for run, prompt in zip(runs, prompts, strict=True) if prompt.kind == kind]
        rounds = [r for run in of_kind for r in (run.statistics.drafted_rounds if run.statistics else [])]
        kinds[kind] = sum(r.committed for r in rounds) / len(rounds) if rounds else 0.0
    return {
        "block_size": size,
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "ratio": statistics.median(ratios) if ratios else 0.0,
        "acceptance_length": merged.acceptance_length,
        "acceptance_length_by_kind": kinds,
        "accepted_of_proposed": merged.accepted_of_proposed,
        "acceptance_by_position": merged.acceptance_by_position,
        "identical": sum(run.tokens == base.tokens for run, base in zip(runs, plain, strict=True)),
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        f"plain decoding: {result['plain_tokens_per_s']:.1f} tokens/s, {result['prompts']} prompts × "
        f"{result['max_tokens']} tokens, {result['machine']['chip']} ({result['machine']['device']}), "
        f"peak {result['peak_bytes'] / 1e9:.2f} GB",
        "",
        "| block | tokens/s | ratio | acceptance length | accepted/proposed | identical | round ms "
        "| target + draft ms | overhead | host ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["block_sizes"]:
        cells = [
            f"{row['block_size']}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}×",
            f"{row['acceptance_length']:.2f}",
            f"{row['accepted_of_proposed']:.2f}",
            f"{row['identical']}/{result['prompts']}",
        ]
        if "round_s" in row:
            cells += [
                f"{row['round_s'] * 1e3:.0f}",
                f"{row['target_forward_s'] * 1e3:.0f} + {row['draft_forward_s'] * 1e3:.0f}",
                f"{row['overhead']:.2f}",
                f"{row['host_s'] * 1e3:.1f}",
            ]
        else:
            cells += ["–"] * 4
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines + [f"! {note}" for note in result["slow"]])
