"""docs/SPEED.md from the benchmarks' JSON in docs/benchmarks.

PYTHONPATH=. python tools/speed_doc.py > docs/SPEED.md
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from dflash_mlx.bench.report import table

DIRECTORY = Path(__file__).parent.parent / "docs" / "benchmarks"
SECTIONS = {
    "best": (
        "The default pair",
        "With the settings that pay most here, on chat, code, arithmetic, rewriting and lists.",
    ),
    "widths": ("Fixed and automatic width", "`--width auto` against trees of fixed size."),
    "budgets": (
        "Tree budgets",
        "A chain (the first row) and trees, all of full width; answers of 20 tokens.",
    ),
    "costs": (
        "What a round costs",
        "The parts of a chain's round. Overhead is its time over that of a bare forward of the target and one of the "
        "draft; host is the time that Python takes to build a round's graphs.",
    ),
}


def by_kind(result: dict) -> list[str]:
    """Median ratios for each kind of prompt."""
    kinds = list(result["settings"][0]["ratio_by_kind"])
    lines = ["| tree | width | " + " | ".join(kinds) + " |", "|" + "---|" * (len(kinds) + 2)]
    for row in result["settings"]:
        ratios = " | ".join(f"{ratio:.2f}×" for ratio in row["ratio_by_kind"].values())
        lines.append(f"| {row['tree_budget'] or 'chain'} | {row['width']} | {ratios} |")
    return lines


def main() -> None:
    results = {name: json.loads((DIRECTORY / f"{name}.json").read_text()) for name in SECTIONS}
    machine, versions = results["best"]["machine"], results["best"]["versions"]
    print("# Speed\n")
    chip = machine["chip"].replace("(R)", "")
    text = f"""Measured on {machine["cores"]} cores of an {chip}, {machine["system"]}, without a GPU: float32,
    OpenBLAS preloaded, mlx {versions["mlx"]}, mlx-lm {versions["mlx_lm"]}, greedy. Plain and speculative runs take
    turns, prompt by prompt; ratios are medians over prompts. No figure for Apple GPUs is given, because nobody has
    measured one with this code yet: `dflash-mlx bench` measures your own pair on your own machine. The tables' JSON
    is in [benchmarks](benchmarks); this page is made by `tools/speed_doc.py`."""
    print(textwrap.fill(" ".join(text.split()), 120))
    for name, (title, meaning) in SECTIONS.items():
        result = results[name]
        print(f"\n## {title}\n\n{meaning}\n\n    {result['command']}\n\n{table(result)}")
        if name != "costs":
            print("\nRatios by kind of prompt:\n\n" + "\n".join(by_kind(result)))


if __name__ == "__main__":
    main()
