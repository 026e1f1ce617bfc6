"""The smallest training run: the target writes conversations, a new draft learns from them, acceptance rises.

A few minutes on two cores: make demo once, then .venv/bin/python examples/train_draft.py. Run it again to go on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dflash_mlx.cli import main

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "train_draft_example")

data = ["train", "data", "--out", OUT / "data", "--num-shards", 2, "--rows", 24, "--length", 256]
fit = ["train", "fit", "--data", OUT / "data", "--out", OUT / "run", "--num-held-out", 8, "--evaluate-every", 20]
fit += ["--num-steps", 60, "--batch-size", 2, "--num-anchors", 48, "--vocabulary", 4096, "--block-size", 4]
evaluation = ["train", "eval", "--draft", OUT / "run" / "draft", "--num-prompts", 5, "--max-tokens", 64]

for command in (data, fit, evaluation):
    if status := main([str(word) for word in command]):
        sys.exit(status)
for point in json.loads((OUT / "run" / "curve.json").read_text()):
    print(f"after {point['step']:3} steps: acceptance length {point['acceptance_length']:.3f}")
print(f"The curve is {OUT / 'run' / 'curve.svg'}.")
