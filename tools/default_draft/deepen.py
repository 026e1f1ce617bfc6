"""A draft with one more layer that says what it said before: a copy of its first layer whose outputs are zero.

Training goes on from there (block expansion, arXiv 2401.02415).

    python tools/default_draft/deepen.py DRAFT OUT
"""

import json
import re
import sys
from pathlib import Path

import mlx.core as mx

draft, out = map(Path, sys.argv[1:])
config = json.loads((draft / "config.json").read_text())
weights = mx.load(str(draft / "model.safetensors"))
deeper = {re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + 1}", name): x for name, x in weights.items()}
for name, x in weights.items():
    if name.startswith("layers.0."):
        deeper[name] = mx.zeros_like(x) if "o_proj" in name or "down_proj" in name else x
config["num_hidden_layers"] += 1
config["layer_types"].insert(0, config["layer_types"][0])
out.mkdir(parents=True, exist_ok=True)
(out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
mx.save_safetensors(str(out / "model.safetensors"), deeper, {"format": "mlx"})
