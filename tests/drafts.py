"""Tiny random drafts, and directories that hold them as published."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from dflash_mlx.draft import DFlashDraft, Drafted, parse_config
from dflash_mlx.draft.checkpoint import unstack

CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "block_size": 8,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]},
}


def random_draft(raw: dict = CONFIG, seed: int = 0) -> DFlashDraft:
    mx.random.seed(seed)
    config = parse_config(raw, "config.json")
    size = config.draft_vocab_size  # its tokens are spread over the target's
    draft = DFlashDraft(config, None if size is None else mx.arange(size) * config.vocab_size // size)
    for layer in draft.layers:
        for name in ("attention_conv", "mlp_conv"):
            if name in layer:
                layer[name].base_kernel = 0.5 * mx.random.normal(layer[name].base_kernel.shape)
    if "domino" in draft:  # strong enough to change what is chosen
        draft.domino.update(tree_map(lambda x: 8 * x, draft.domino.parameters()))
    draft.eval()
    mx.eval(draft.parameters())
    return draft


def write_draft(directory: Path, raw: dict = CONFIG, *, shards: int = 1, seed: int = 0) -> dict[str, mx.array]:
    """A draft directory as published; returns its tensors."""
    draft = random_draft(raw, seed)
    weights = unstack(dict(tree_flatten(draft.parameters())), draft.config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save(directory, weights, shards)
    return weights


def save(directory: Path, weights: dict[str, mx.array], shards: int = 1) -> None:
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), weights)
        return
    names = sorted(weights)
    files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
    for file, part in files.items():
        mx.save_safetensors(str(directory / file), {name: weights[name] for name in part})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def with_dflash(raw: dict, **changes: object) -> dict:
    return raw | {"dflash_config": raw["dflash_config"] | changes}


def dflash2(raw: dict = CONFIG, *, top_k: int = 6) -> dict:
    sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": top_k}
    return with_dflash(raw | {"architectures": ["DFlash2DraftModel"]}, **sizes)


def domino(raw: dict = CONFIG, *, plain: int = 1, shift: bool = True) -> dict:
    head = {"projector_type": "domino", "gru_hidden_dim": 12, "emb_dim": 8}
    return with_dflash(raw, **head, pure_draft_prefix_len=plain, shift_label=shift)


def shifted_domino(raw: dict = CONFIG) -> dict:
    return domino(raw, plain=0)


def unshifted_domino(raw: dict = CONFIG) -> dict:
    return domino(raw, shift=False)


def along(drafted: Drafted, tokens: list[int]) -> mx.array:
    """The logits [n, C] of every position when `tokens` are chosen."""
    assert drafted.correction is not None
    state, rows = drafted.correction.start(), []
    for position, token in enumerate(tokens):
        rows.append(drafted.correction.logits(position, state))
        state = drafted.correction.advance(position, state, mx.array([token]))
    return mx.concatenate(rows)
