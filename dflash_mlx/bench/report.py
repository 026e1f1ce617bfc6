"""A benchmark's result is one JSON object with the machine it was measured on; the table is drawn from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from .. import machine
from ..draft import DFlashDraft
from ..speculative.statistics import Statistics
from ..text import chat_prompt
from .measure import Timed, round_cost, run_plain, run_speculative
from .prompts import Prompt

DEFINITIONS = {
    "tokens_per_s": "tokens behind the first ÷ seconds from the first token to the last; median over prompts",
    "ratio": "speculative ÷ plain tokens_per_s of the same prompt, run in turn; median over prompts",
    "acceptance_length": "tokens committed per target forward, the first forward left out; null: nothing was drafted",
    "accepted_of_proposed": "accepted ÷ proposed draft tokens",
    "acceptance_by_position": "share accepted among the rounds that accepted all positions before",
    "identical": "prompts whose speculative tokens equal plain decoding's",
    "overhead": "round_s ÷ (target_forward_s + draft_forward_s)",
    "host_s": "seconds that building one round's graphs takes in Python",
}


@dataclass(frozen=True)
class Setting:
    """What stream_generate is told about proposals in one column of the comparison."""

    block_size: int | None
    tree_budget: int = 0
    tree_top_k: int | None = None
    width: str = "full"
    ngram: bool = False

    @property
    def is_plain_chain(self) -> bool:
        return not (self.tree_budget or self.ngram or self.width != "full")


def run_bench(
    model: nn.Module,
    tokenizer: Any,
    draft: DFlashDraft | None,
    prompts: Sequence[Prompt],
    *,
    settings: Sequence[Setting],
    max_tokens: int = 128,
    costs: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Plain decoding and every setting in turn on every prompt, greedy."""
    encoded = [chat_prompt(tokenizer, p.text) for p in prompts]
    mx.reset_peak_memory()
    run_plain(model, tokenizer, encoded[0], 8)
    for setting in settings:  # the first runs compile kernels
        run_speculative(model, tokenizer, encoded[0], 24, draft, **asdict(setting))
    plain: list[Timed] = []
    runs: list[list[Timed]] = [[] for _ in settings]
    for tokens in tqdm(encoded, desc="prompts", disable=not progress):
        plain.append(run_plain(model, tokenizer, tokens, max_tokens))
        for setting, done in zip(settings, runs, strict=True):
            done.append(run_speculative(model, tokenizer, tokens, max_tokens, draft, **asdict(setting)))
    peak_bytes = mx.get_peak_memory()
    rows = [_row(setting, plain, done, prompts) for setting, done in zip(settings, runs, strict=True)]
    if costs and draft is not None:
        chains = [row for setting, row in zip(settings, rows, strict=True) if setting.is_plain_chain]
        for row in tqdm(chains, desc="rounds", disable=not progress):
            cost = round_cost(model, tokenizer, draft, row["block_size"] or draft.block_size, encoded[:5])
            if cost is None:
                continue
            row |= {name: getattr(cost, name) for name in ("round_s", "target_forward_s", "draft_forward_s", "host_s")}
            row["overhead"] = cost.overhead
    return {
        "plain_tokens_per_s": statistics.median(run.tokens_per_s for run in plain),
        "settings": rows,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "peak_bytes": peak_bytes,
        "weights_bytes": weights_bytes(model) + (weights_bytes(draft) if draft is not None else 0),
        "definitions": DEFINITIONS,
        "machine": machine.device_facts() | {"blas": machine.blas()},
        "versions": machine.versions(),
        "slow": machine.slowness(model),
    }


def weights_bytes(module: nn.Module) -> int:
    from mlx.utils import tree_flatten

    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _row(setting: Setting, plain: list[Timed], runs: list[Timed], prompts: Sequence[Prompt]) -> dict[str, Any]:
    ratios = [
        run.tokens_per_s / base.tokens_per_s if base.tokens_per_s else 0.0
        for run, base in zip(runs, plain, strict=True)
    ]
    merged = Statistics()
    merged.rounds = [r for run in runs for r in (run.statistics.drafted_rounds if run.statistics else [])]
    drafted = bool(merged.rounds)
    merged.rounds[:0] = merged.rounds[:1]  # stands for the first forwards, which every mean leaves out
    kinds, ratio_by_kind = {}, {}
    for kind in dict.fromkeys(p.kind for p in prompts):
        of_kind = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
        rounds = [r for run in (runs[i] for i in of_kind) if run.statistics for r in run.statistics.drafted_rounds]
        kinds[kind] = sum(r.committed for r in rounds) / len(rounds) if rounds else None
        ratio_by_kind[kind] = statistics.median(ratios[i] for i in of_kind)
    return asdict(setting) | {
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "ratio": statistics.median(ratios),
        "ratio_by_kind": ratio_by_kind,
        "acceptance_length": merged.acceptance_length if drafted else None,
        "mean_width": sum(r.width for r in merged.drafted_rounds) / len(merged.drafted_rounds) if drafted else None,
        "acceptance_length_by_kind": kinds,
        "accepted_of_proposed": merged.accepted_of_proposed if drafted else None,
        "acceptance_by_position": merged.acceptance_by_position,
        "identical": sum(run.tokens == base.tokens for run, base in zip(runs, plain, strict=True)),
    }


def _cell(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    lines = [
        f"plain decoding: {result['plain_tokens_per_s']:.1f} tokens/s, {result['prompts']} prompts × "
        f"{result['max_tokens']} tokens, {result['machine']['chip']} ({result['machine']['device']}), "
        f"peak {result['peak_bytes'] / 1e9:.2f} GB",
        "",
        "| block | tree | width | tokens/s | ratio | acceptance length | mean width | accepted/proposed | identical "
        "| round ms | target + draft ms | overhead | host ms |",
        "|" + "---|" * 13,
    ]
    for row in result["settings"]:
        cells = [
            f"{row['block_size'] or 'own'}" + (" + n-gram" if row["ngram"] else ""),
            f"{row['tree_budget'] or 'chain'}",
            row["width"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}×",
            _cell(row["acceptance_length"], 2),
            _cell(row["mean_width"], 1),
            _cell(row["accepted_of_proposed"], 2),
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
