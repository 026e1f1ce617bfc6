"""The reference values in tests/data/draft_reference are what the official `dflash` package computes.

Run it in an environment that has dflash 0.1.0 and its MLX backend (nothing of this project is imported), then
commit what it wrote:

    python tools/draft_reference.py [CASE ..]

Each case is one draft with random weights and a few rounds of decoding: n more committed tokens, then a block of L.
Every round is computed twice: with the caches grown round by round as the official loop grows them, and with fresh
caches over the whole context. The fresh value is saved. The two agree except where a full rotating cache takes a
single row: it then returns its rows in ring order while the official mask takes them to be in order of position;
`ring_order` marks those cases. Weights and inputs are drawn by name (see `draw`), so only seeds and results are saved.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from dflash.model_mlx import DFlash2DraftModel, DFlashConfig, DFlashDraftModel
from mlx.utils import tree_flatten

OUT = Path(__file__).parent.parent / "tests" / "data" / "draft_reference"
FULL, SLIDING = "full_attention", "sliding_attention"
VOCAB = 61
BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "block_size": 8,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
ROUNDS = [(11, 8), (1, 8), (8, 8), (3, 8), (5, 2)]


def window(size: int, *layer_types: str, **more: Any) -> dict[str, Any]:
    return {"layer_types": layer_types, "num_hidden_layers": len(layer_types), "sliding_window": size, **more}


def published(pattern: str, heads: int, kv_heads: int, block_size: int, **more: Any) -> Any:
    """A draft's structure as published, at small widths: "ssf" is two sliding layers and a full one.

    Vocabulary, width and depth of the target are those of the tiny models of tools/conformance.py.
    """
    kinds = [{"s": SLIDING, "f": FULL}[kind] for kind in pattern]
    dflash = {"target_layer_ids": [0, 1, 2, 3], **more.pop("dflash", {})}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 97, "num_target_layers": 4}
    changes = window(24, *kinds, **sizes, block_size=block_size, rope_theta=1e6, **more)
    rounds = [(19, block_size), (block_size, block_size), (1, block_size), (5, block_size // 2)]
    return changes, dflash, rounds, {"ring_order": SLIDING in kinds}


def dflash2(kernel_size: int, group_size: int, rank: int, top_k: int, *kinds: str, **more: Any) -> Any:
    """A DFlash 2 draft; the last rounds draft fewer rows than the convolutions' kernels reach."""
    sizes = {"conv_kernel_size": kernel_size, "conv_group_size": group_size}
    dflash = sizes | {"selector_rank": rank, "selector_top_k": top_k} | more.pop("dflash", {})
    kinds = kinds or (FULL, FULL)
    changes = window(12, *kinds, architectures=["DFlash2DraftModel"], **more)
    return changes, dflash, [(11, 8), (1, 8), (8, 8), (3, 3), (5, 2)], {"ring_order": SLIDING in kinds}


# name: (changes to BASE, changes to dflash_config, rounds of (committed tokens, block), other options)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[int, int]], dict[str, Any]]] = {
    "full": ({}, {}, ROUNDS, {}),
    "full_late_start": ({}, {}, ROUNDS, {"position": 37}),
    "full_causal": ({"is_causal": True}, {}, ROUNDS, {}),
    "full_not_causal": ({"is_causal": False}, {}, ROUNDS, {}),
    "one_layer_one_capture": ({"num_hidden_layers": 1}, {"target_layer_ids": [5]}, ROUNDS, {}),
    "five_layers_unordered_captures": ({"num_hidden_layers": 5}, {"target_layer_ids": [4, 0, 2]}, ROUNDS, {}),
    "no_grouping": ({"num_key_value_heads": 4}, {}, ROUNDS, {}),
    "one_kv_head": ({"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8}, {}, ROUNDS, {}),
    "heads_wider_than_hidden": ({"head_dim": 24}, {}, ROUNDS, {}),
    "attention_bias": ({"attention_bias": True}, {}, ROUNDS, {}),
    "block_2": ({"block_size": 2}, {}, [(4, 2), (1, 2), (2, 2)], {}),
    "block_5_of_config": ({"block_size": 16}, {"block_size": 5}, [(4, 5), (1, 5), (5, 3)], {}),
    "block_16": ({"block_size": 16}, {}, [(40, 16), (16, 16), (1, 16), (7, 9)], {}),
    "sliding_within_window": (window(64, SLIDING, SLIDING), {}, ROUNDS, {}),
    "sliding_wraps": (window(12, SLIDING, SLIDING), {}, [(5, 8), (6, 8), (2, 8), (8, 8), (3, 5)], {}),
    "sliding_one_row_rounds": (window(12, SLIDING), {}, [(30, 8), (1, 8), (1, 8), (1, 8)], {"ring_order": True}),
    "sliding_block_above_window": (window(5, SLIDING, SLIDING), {}, [(9, 8), (4, 8), (3, 8)], {}),
    "sliding_not_causal": (window(12, SLIDING, SLIDING, is_causal=False), {}, [(30, 8), (2, 8), (8, 8)], {}),
    "sliding_late_start": (window(12, SLIDING, SLIDING), {}, [(30, 8), (2, 8), (8, 8)], {"position": 21}),
    "mixed": (window(12, SLIDING, SLIDING, FULL), {}, [(30, 8), (2, 8), (8, 8), (3, 8)], {}),
    "mixed_causal": (window(12, FULL, SLIDING, is_causal=True), {}, [(30, 8), (2, 8), (8, 8)], {}),
    "mixed_not_causal": (window(12, FULL, SLIDING, is_causal=False), {}, [(30, 8), (2, 8), (8, 8)], {}),
    "rope_llama3": ({"rope_scaling": LLAMA3}, {}, ROUNDS, {"position": 90}),
    "rope_yarn": ({"rope_scaling": YARN}, {}, ROUNDS, {"position": 90}),
    "rope_linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, ROUNDS, {"position": 90}),
    "rope_dynamic": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 100},
        {},
        ROUNDS,
        {"position": 20},
    ),
    "rope_parameters": (
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 250.0}},
        {},
        ROUNDS,
        {},
    ),
    "output_transforms": (
        {},
        {"input_embedding_scale": 5.5, "output_multiplier": 0.4, "final_logit_softcapping": 3.0},
        ROUNDS,
        {"embed_scale": 2.0},
    ),
    "soft_cap_beside": ({"final_logit_softcapping": 3.0}, {}, ROUNDS, {}),
    "soft_cap_off": ({"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 0.0}, ROUNDS, {}),
    "published_qwen3": published("fffff", 8, 2, 16),
    "published_qwen3_coder_30b_a3b": published("ffffffff", 8, 1, 16),
    "published_qwen3_coder_next": published("ffffffff", 8, 1, 16),
    "published_qwen3_5": published("sssssf", 8, 2, 16),
    "published_qwen3_5_moe": published("sssssf", 8, 2, 16),
    "published_qwen3_6_27b": published("ssssf", 8, 2, 16),
    "published_gpt_oss_20b": published("ffffffff", 8, 1, 8, head_dim=8),
    "published_gpt_oss_120b": published("ffffffff", 8, 1, 10, head_dim=8),
    "published_llama_3_1": published("fffff", 8, 2, 10, rope_scaling=LLAMA3),
    "published_gemma_4": published("ssssf", 8, 2, 16, final_logit_softcapping=30.0),
    "published_kimi_k2": published("ffffff", 8, 1, 8, rope_scaling=YARN),
    "published_minimax_m2": published("fffff", 8, 2, 16),
    "published_glm_5_1": published("sssss", 8, 2, 16, is_causal=False),
    "dflash2": dflash2(4, 8, 16, 5),
    "dflash2_kernel_1": dflash2(1, 8, 16, 5),
    "dflash2_kernel_above_block": dflash2(9, 8, 16, 5),
    "dflash2_group_1": dflash2(3, 1, 4, 8),
    "dflash2_one_group": dflash2(2, 32, 8, 1),
    "dflash2_all_tokens": dflash2(2, 16, 8, VOCAB),
    "dflash2_sliding": dflash2(4, 8, 16, 5, SLIDING, SLIDING, FULL),
    "dflash2_causal": dflash2(4, 8, 16, 5, is_causal=True),
    "dflash2_transforms": dflash2(
        4,
        8,
        16,
        5,
        dflash={"input_embedding_scale": 5.5, "output_multiplier": 0.4, "final_logit_softcapping": 3.0},
    ),
}


def draw(seed: int, name: str, shape: tuple[int, ...]) -> mx.array:
    """Random values that depend on the seed and the tensor's name only; the test draws them the same way."""
    values = np.random.RandomState(seed + zlib.crc32(name.encode()) % 2**31).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("weight") and len(shape) == 2 and not name.startswith("target_embed"):
        values *= 1.5 / shape[1] ** 0.5
    elif name.endswith("base_kernel"):
        values *= 0.7
    return mx.array(values.astype(np.float32))


class Target(nn.Module):
    """What the official `bind` asks of a target."""

    def __init__(self, seed: int, vocab_size: int, hidden_size: int, embed_scale: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_tokens.weight = draw(seed, "target_embed.weight", (vocab_size, hidden_size))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = draw(seed, "target_head.weight", (vocab_size, hidden_size))
        self.embed_scale = embed_scale


def official_draft(raw: dict[str, Any], seed: int) -> tuple[DFlashDraftModel, dict[str, list[int]]]:
    """The official module for a raw config, and the names and shapes of its tensors."""
    dflash = raw["dflash_config"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    plain = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    plain += ("intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_target_layers")
    scales = ("input_embedding_scale", "output_multiplier")
    scales += ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    draft = (DFlash2DraftModel if raw["architectures"] == ["DFlash2DraftModel"] else DFlashDraftModel)(
        DFlashConfig(
            **{key: raw[key] for key in plain},
            **{key: dflash[key] for key in scales if key in dflash},
            rope_theta=raw.get("rope_theta") or rope["rope_theta"],
            rope_scaling=rope,
            block_size=dflash.get("block_size", raw["block_size"]),
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            mask_token_id=dflash["mask_token_id"],
            layer_types=tuple(raw.get("layer_types") or ()),
            sliding_window=raw.get("sliding_window"),
            final_logit_softcapping=dflash.get("final_logit_softcapping", raw.get("final_logit_softcapping")),
            is_causal=raw.get("is_causal"),
        )
    )
    if raw.get("attention_bias"):  # the official MLX file leaves the biases out; its PyTorch file has them on all four
        for layer in draft.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                rows, columns = layer.self_attn[name].weight.shape
                layer.self_attn[name] = nn.Linear(columns, rows, bias=True)
    tensors = {name: tuple(value.shape) for name, value in tree_flatten(draft.parameters())}
    # Codebooks are published without the suffix; the official loader adds it.
    names = {name: name.removesuffix(".weight") if name.endswith("codebook.weight") else name for name in tensors}
    draft.load_weights([(name, draw(seed, names[name], shape)) for name, shape in tensors.items()])
    return draft, {names[name]: list(shape) for name, shape in tensors.items()}


class LateRope(nn.Module):
    """Rotation as if `position` tokens came before the first one."""

    def __init__(self, rope: nn.Module, position: int):
        super().__init__()
        self.rope, self.position = rope, position

    def __call__(self, x: mx.array, offset: int) -> mx.array:
        return self.rope(x, offset=offset + self.position)


def start_late(draft: DFlashDraftModel, position: int) -> int:
    """Make the draft start at `position`; the offset that its caches must begin with.

    The official loop sets the caches' offset, which only rotating caches take without showing rows never written.
    """
    if all(layer_type == SLIDING for layer_type in draft.config.layer_types):
        return position
    draft.rope = LateRope(draft.rope, position)
    return 0


def caches(draft: DFlashDraftModel, offset: int) -> list[Any]:
    made = draft.make_cache()
    for cache in made:
        cache.offset = offset
    return made


def selections(draft: DFlash2DraftModel, hidden: mx.array, anchor: int, i: int) -> dict[str, np.ndarray]:
    """The greedy path, and the distributions along one sampled path (its tokens are saved with them)."""
    logits, anchors = draft.compute_logits(hidden), mx.array([anchor])
    greedy, _, _ = draft.candidate_selector.select(hidden, logits, anchors, 0.0)
    mx.random.seed(i)
    path, candidates, probs = draft.candidate_selector.select(hidden, logits, anchors, 0.8)
    over_tokens = mx.put_along_axis(mx.zeros(logits.shape), candidates, probs, axis=-1)
    found = {"greedy": greedy, "sampled": path, "draft_probs": over_tokens}
    return {f"{name}_{i}": np.array(x[0]) for name, x in found.items()}


def run_case(name: str) -> None:
    changes, dflash_changes, rounds, options = CASES[name]
    raw = {**BASE, **changes, "dflash_config": {**BASE["dflash_config"], **dflash_changes}}
    raw = {key: value for key, value in raw.items() if value is not None}
    seed = zlib.crc32(name.encode()) % 10000
    draft, tensors = official_draft(raw, seed)
    offset = start_late(draft, options.get("position", 0))
    draft.bind(Target(seed, raw["vocab_size"], raw["hidden_size"], options.get("embed_scale", 1.0)))
    width = len(raw["dflash_config"]["target_layer_ids"]) * raw["hidden_size"]
    total = sum(n for n, _ in rounds)
    features = draw(seed, "target_hidden", (1, total, width))
    grown, seen, results = caches(draft, offset), 0, {}
    for i, (n, length) in enumerate(rounds):
        anchor = int(np.random.RandomState(seed + i).randint(raw["vocab_size"]))
        block = mx.array([[anchor] + [raw["dflash_config"]["mask_token_id"]] * (length - 1)])
        by_round = draft.hidden_states(block, features[:, seen : seen + n], grown)
        seen += n
        hidden = draft.hidden_states(block, features[:, :seen], caches(draft, offset))
        difference = mx.abs(hidden - by_round).max().item()
        assert difference < 1e-4 or options.get("ring_order"), (name, i, difference)
        results[f"hidden_{i}"] = np.array(hidden)
        results[f"logits_{i}"] = np.array(draft.compute_logits(hidden))
        if isinstance(draft, DFlash2DraftModel):
            results |= selections(draft, hidden[:, 1:], anchor, i)
    description = {"config": raw, "seed": seed, "tensors": tensors, "rounds": rounds, "options": options}
    np.savez_compressed(OUT / f"{name}.npz", description=json.dumps(description), **results)
    print(f"{name}: {len(rounds)} rounds, last difference of grown and fresh caches {difference:.1e}")


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CASES:
        run_case(name)


if __name__ == "__main__":
    main()
