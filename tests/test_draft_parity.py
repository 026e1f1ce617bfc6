"""Hidden states and logits equal the official package's on every config variant, round after round."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from drafts import along

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
    elif name.endswith("base_kernel"):
        values *= 0.7
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
        self.saved = saved
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

    def anchor(self, i: int) -> int:
        return int(np.random.RandomState(self.seed + i).randint(self.raw["vocab_size"]))

    def block(self, i: int, draft: DFlashDraft) -> mx.array:
        return mx.array([[self.anchor(i)] + [draft.mask_token_id] * (self.rounds[i][1] - 1)])


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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dflash2")])
def test_the_selectors_paths_equal_the_official_ones(name: str, tmp_path: Path) -> None:
    """Greedy: the same tokens. Sampled: the same distribution at every position of a path the official one took."""
    case = Case(name, tmp_path)
    draft = load_draft(tmp_path)
    context = draft.make_context()
    seen = 0
    for i, (n, length) in enumerate(case.rounds):
        draft.extend(context, case.target_hidden[:, seen : seen + n])
        seen += n
        drafted = draft.draft(case.anchor(i), length - 1, context, case.embed, case.head)
        greedy, sampled = case.saved[f"greedy_{i}"].tolist(), case.saved[f"sampled_{i}"].tolist()
        assert drafted.tokens(mx.argmax(along(drafted, greedy), axis=-1)[:, None])[:, 0].tolist() == greedy
        probs = drafted.spread(mx.softmax(along(drafted, sampled) / 0.8, axis=-1), case.raw["vocab_size"])
        # Probabilities; logits of up to some tens lose digits in the softmax.
        assert mx.abs(probs - mx.array(case.saved[f"draft_probs_{i}"])).max().item() < 5e-5


def test_the_reference_covers_the_variants() -> None:
    assert len(CASES) == 52
