"""The speculators packaging of a draft, read as the published one.

Its config nests the layers' settings and counts captures by boundaries: id i is what enters layer i of the target, so
the output of layer i − 1. Its tensors hold the target's norm and head besides, for training, and a map of the draft's
vocabulary: draft id i stands for token i + d2t[i] of the target.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import CheckpointError

ARCHITECTURES = {"dflash": "DFlashDraftModel", "domino": "DominoDraftModel"}
# Keys that go into `dflash_config` under the same name.
MOVED = (
    "mask_token_id",
    "draft_vocab_size",
    "sample_from_anchor",
    "shift_label",
    "projector_type",
    "gru_hidden_dim",
    "emb_dim",
    "pure_draft_prefix_len",
)
# What a Domino draft means when it does not say.
DOMINO = {"sample_from_anchor": True, "gru_hidden_dim": 1024, "logits_correction_emb_dim": 256}
DOMINO |= {"pure_draft_prefix_len": 1}
# What the training kept of the target.
VERIFIER_TENSORS = ("verifier_lm_head.weight", "verifier_norm.weight")


def is_speculators(raw: dict[str, Any]) -> bool:
    return "speculators_model_type" in raw


def published(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The config in the published form; any other config as it is."""
    if not is_speculators(raw):
        return raw
    kind = raw["speculators_model_type"]
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: speculators_model_type is {kind!r}, known are {known}; use a DFlash draft.")
    if kind == "domino":
        raw = DOMINO | raw
        raw["emb_dim"] = raw.pop("logits_correction_emb_dim")
    layers = raw.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError(
            f"{where}: transformer_layer_config is {layers!r}, an object is needed; download the draft again."
        )
    rest = {key: value for key, value in raw.items() if key not in (*MOVED, "transformer_layer_config")}
    non_causal = rest.pop("sliding_window_non_causal", False)
    dflash = {key: raw[key] for key in MOVED if key in raw}
    dflash["target_layer_ids"] = _capture_layer_ids(rest.pop("aux_hidden_state_layer_ids", None), where)
    return {
        **layers,
        **rest,
        "architectures": [ARCHITECTURES[kind]],
        "is_causal": False if non_causal else None,
        "dflash_config": dflash,
    }


def _capture_layer_ids(ids: Any, where: str) -> Any:
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        return ids  # the reader of the published form refuses it
    if 0 in ids:
        raise CheckpointError(
            f"{where}: aux_hidden_state_layer_ids holds 0, the target's embeddings, which are not captured; "
            "use a draft that reads layers only."
        )
    return [i - 1 for i in ids]


def token_ids(weights: dict[str, mx.array], vocab_size: int, where: str) -> mx.array | None:
    """The target's tokens [draft_vocab_size] that the rows of the draft's head stand for; removes the maps."""
    offsets, selected = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        return None
    ids = mx.arange(offsets.size) + offsets.astype(mx.int32)
    if not (mx.all(ids >= 0) & mx.all(ids < vocab_size) & mx.all(ids[1:] > ids[:-1])).item():
        raise CheckpointError(
            f"{where}: d2t does not map the draft's {offsets.size} tokens to rising ones below {vocab_size}; "
            "download the draft again."
        )
    if selected is not None and (selected.size != vocab_size or not mx.all(selected[ids]).item()):
        raise CheckpointError(f"{where}: t2d and d2t name different tokens; download the draft again.")
    return ids
