"""A new draft starts from the target's last layers: its context's values equal the target's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..draft import DFlashDraft, parse_config
from ..draft.checkpoint import stack
from ..draft.published import FORMAT
from ..errors import DFlashError, UnsupportedTargetError
from ..targets.anatomy import dissect

NUM_CAPTURED = 5


def draft_config(
    model: nn.Module, config: dict[str, Any], *, num_layers: int, block_size: int, mask_token_id: int
) -> dict[str, Any]:
    """The published config of a draft for a target that has mlx-lm's `config`.

    The captured layers are spread evenly; the last is the one whose output the first copied layer reads.
    """
    depth = len(model.layers)
    if not 1 <= num_layers < depth:
        raise DFlashError(
            f"A draft of {num_layers} layers cannot start from a target of {depth}; use 1 to {depth - 1}."
        )
    if block_size < 2:
        raise DFlashError(f"block_size is {block_size}; use 2 or more.")
    config = config.get("text_config", config)
    heads = config["num_attention_heads"]
    return {
        **FORMAT,
        "hidden_size": dissect(model).hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": dissect(model).vocab_size,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": config.get("rope_theta", 10000.0),
        "max_position_embeddings": config.get("max_position_embeddings", 8192),
        "block_size": block_size,
        "num_target_layers": depth,
        "layer_types": ["full_attention"] * num_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": spread(depth - 1 - num_layers)},
    }


def spread(last: int) -> list[int]:
    """Layers from 1 to `last`, as even as whole numbers allow."""
    first = min(1, last)
    return sorted({round(first + (last - first) * i / (NUM_CAPTURED - 1)) for i in range(NUM_CAPTURED)})


def from_target(model: nn.Module, raw_config: dict[str, Any]) -> DFlashDraft:
    """A draft whose layers are the target's last ones and whose `fc` passes the last captured layer on.

    Norm weights before a projection move into it, because the draft has one norm for the context of all layers. Where
    the target has no norms of queries and keys, theirs give heads their usual size. UnsupportedTargetError when the
    target's layers are not of the draft's shape.
    """
    config = parse_config(raw_config, "the new draft's config")
    draft = DFlashDraft(config)
    wanted = {name: array.shape for name, array in tree_flatten(draft.parameters())}
    width, captured = config.hidden_size, len(config.capture_layer_ids)
    others = 1e-3 * mx.random.normal((width, width * (captured - 1)), key=mx.random.key(0))
    weights = {
        "fc.weight": mx.concatenate([others, mx.eye(width)], axis=1),
        "hidden_norm.weight": mx.ones(width),
        "norm.weight": _final_norm(model),
    }
    for i, layer in enumerate(list(model.layers)[-config.num_hidden_layers :]):
        named = {f"layers.{i}.{name}.weight": _matrix(m) for name, m in layer.named_modules() if "weight" in m}
        weights |= _folded(named, f"layers.{i}.", config.head_dim)
    try:
        stacked = stack(weights, config)
    except KeyError as error:
        raise UnsupportedTargetError(_unlike(str(error))) from None
    problems = sorted(name for name, shape in wanted.items() if name not in stacked or stacked[name].shape != shape)
    if problems:
        raise UnsupportedTargetError(_unlike(problems[0]))
    draft.load_weights([(name, stacked[name]) for name in wanted])
    mx.eval(draft.parameters())
    return draft


def with_vocabulary(draft: DFlashDraft, raw: dict[str, Any], tokens: np.ndarray) -> tuple[DFlashDraft, dict[str, Any]]:
    """The draft and its published config with logits of these tokens alone, rising."""
    if len(tokens) >= draft.config.vocab_size:
        return draft, raw
    raw = raw | {"draft_vocab_size": len(tokens)}
    return _rebuilt(draft, raw, mx.array(tokens)), raw


def with_domino(
    draft: DFlashDraft, raw: dict[str, Any], *, state_size: int = 512, rank: int = 128
) -> tuple[DFlashDraft, dict[str, Any]]:
    """The draft and its published config with a new Domino head, which corrects nothing until it is trained."""
    sizes = {"gru_hidden_dim": state_size, "emb_dim": rank, "pure_draft_prefix_len": 1}
    dflash_config = raw.get("dflash_config", {}) | {"projector_type": "domino", "shift_label": False} | sizes
    raw = raw | {"dflash_config": dflash_config}
    deeper = _rebuilt(draft, raw, draft.token_ids)
    deeper.domino.widen.weight = mx.zeros_like(deeper.domino.widen.weight)
    return deeper, raw


def _rebuilt(draft: DFlashDraft, raw: dict[str, Any], token_ids: mx.array | None) -> DFlashDraft:
    mx.random.seed(0)
    rebuilt = DFlashDraft(parse_config(raw, "the new draft's config"), token_ids)
    weights = dict(tree_flatten(draft.parameters()))
    if token_ids is not None and draft.token_ids is None:  # a Domino head's last matrix has a row for every token
        weights |= {name: weights[name][token_ids] for name in weights if name.startswith("domino.widen.")}
    if lost := sorted(weights.keys() - dict(tree_flatten(rebuilt.parameters())).keys()):
        raise DFlashError(f"This draft's {lost[0]} cannot move to a new head; leave out --prune-head and --domino.")
    rebuilt.load_weights(list(weights.items()), strict=False)
    rebuilt.eval()
    mx.eval(rebuilt.parameters())
    return rebuilt


def _unlike(part: str) -> str:
    return f"The target's layers are not built as a draft's ({part} differs); start from a draft with --draft."


def _folded(named: dict[str, mx.array], prefix: str, head_dim: int) -> dict[str, mx.array]:
    """A layer's weights with the norm before attention moved into q, k and v, and with norms of q and k."""
    norm = f"{prefix}input_layernorm.weight"
    if norm not in named:
        return named
    moved = named[norm]
    named = named | {norm: mx.ones_like(moved)}
    for part in "qkv":
        name = f"{prefix}self_attn.{part}_proj.weight"
        if name in named and named[name].shape[-1] == moved.size:
            named[name] = named[name] * moved
            if part != "v":
                size = mx.sqrt(mx.mean(mx.sum(named[name] * named[name], axis=1)))
                named.setdefault(f"{prefix}self_attn.{part}_norm.weight", mx.full((head_dim,), size))
    return named


def _matrix(module: nn.Module) -> mx.array:
    if "scales" in module:
        weight = mx.dequantize(
            module.weight, module.scales, module.get("biases"), module.group_size, module.bits, mode=module.mode
        )
        return weight.astype(mx.float32)
    return module.weight.astype(mx.float32)


def _final_norm(model: nn.Module) -> mx.array:
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in ("norm", "ln_f")}
    if not found:
        raise UnsupportedTargetError(_unlike("the last norm"))
    return _matrix(found[min(found, key=len)])
