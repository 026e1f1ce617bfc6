"""Hidden states and logits equal the official package's on every config variant, round after round."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.draft import DFlashDraft, load_draft

REFERENCE = Path(__file__).parent / "data" / "draft_reference"
CASES = sorted(path.stem for path in REFERENCE.glob("*.npz"))
# float32 sums in another order (one matmul over all layers' K/V instead of one per layer and side); values are O(1).
TOLERANCE = 2e-5


def draw(seed: int, name: str, shape: tuple[int, ...]) -> mx.array:
    """The random values of tools/draft_reference.py."""
    values = np.random.RandomState(seed + zlib.crc32(name.encode()) % 2**31).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("weight") and len(shape) == 2 and not name.startswith("target_embed"):
        values *= 1.5 / shape[1] ** 0.5
    return mx.array(values.astype(np.float32))


class Case:
    """One saved case: its draft as a checkpoint on disk, its inputs and the official results."""

    def __init__(self, name: str, path: Path):
        saved = np.load(REFERENCE / f"{name}.npz")
        description: dict[str, Any] = json.loads(str(saved["description"]))
        self.raw, self.seed, self.options = description["config"], description["seed"], description["options"]
        self.rounds: list[tuple[int, int]] = description["rounds"]
        self.results = [
            (mx.array(saved[f"hidden_{i}"]), mx.array(saved[f"logits_{i}"])) for i in range(len(self.rounds))
        ]
        self.path = path
        tensors = {key: draw(self.seed, key, tuple(shape)) for key, shape in description["tensors"].items()}
        (path / "config.json").write_text(json.dumps(self.raw))
        mx.save_safetensors(str(path / "model.safetensors"), tensors)
        shape = (self.raw["vocab_size"], self.raw["hidden_size"])
        self._embedding = draw(self.seed, "target_embed.weight", shape)
        self._head = draw(self.seed, "target_head.weight", shape)
        captured = len(self.raw["dflash_config"]["target_layer_ids"]) * self.raw["hidden_size"]
        self.target_hidden = draw(self.seed, "target_hidden", (1, sum(n for n, _ in self.rounds), captured))

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embedding[tokens] * self.options.get("embed_scale", 1.0)

    def head(self, hidden: mx.array) -> mx.array:
        return hidden @ self._head.T

    def block(self, i: int, draft: DFlashDraft) -> mx.array:
        anchor = int(np.random.RandomState(self.seed + i).randint(self.raw["vocab_size"]))
        return mx.array([[anchor] + [draft.mask_token_id] * (self.rounds[i][1] - 1)])


def max_difference(a: mx.array, b: mx.array) -> float:
    """Relative to the largest entry, where that is above 1: BLAS libraries sum in different orders."""
    assert a.shape == b.shape
    return (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1)).item()


@pytest.mark.parametrize("name", CASES)
def test_every_round_equals_the_official_module(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    draft = load_draft(tmp_path)
    context = draft.make_context(case.options.get("position", 0))
    seen = 0
    for i, (n, _) in enumerate(case.rounds):
        draft.extend(context, case.target_hidden[:, seen : seen + n])
        seen += n
        hidden = draft(draft.embed(case.block(i, draft), case.embed), context)
        logits = draft.logits(hidden, case.head)
        assert max_difference(hidden, case.results[i][0]) < TOLERANCE, f"hidden of round {i}"
        assert max_difference(logits, case.results[i][1]) < TOLERANCE, f"logits of round {i}"


def test_the_reference_covers_the_variants() -> None:
    assert len(CASES) == 43
