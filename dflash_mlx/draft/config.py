"""A draft's config is read once at the edge: what is missing, ill-typed or unknown is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

ARCHITECTURES = ("DFlashDraftModel",)
LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys of `dflash_config` that are implemented, and those that describe a training or a packaging only.
DFLASH_KEYS = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
}
HARMLESS_KEYS = {
    "target_model",
    "target_model_name",
    "version",
    "num_anchors",
    "loss_decay_gamma",
    "training",
    "source",
}


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash 1 draft. block_size counts the anchor; capture_layer_ids index the target's layers from 0."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    num_target_layers: int
    capture_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope_scaling: dict[str, Any] | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def window(self, layer: int) -> int | None:
        """Positions a layer's rows look back over, themselves included; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether the rows of the block are causal among themselves in this layer."""
        return self.window(layer) is not None if self.is_causal is None else self.is_causal


class _Reader:
    """Typed access to a raw config; every refusal names the key, the value and the file."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where

    def refuse(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} {problem}; this is not a usable DFlash draft config.")

    def integer(self, source: dict[str, Any], key: str, minimum: int, default: int | None = None) -> int:
        value = source.get(key, default)
        if value is None:
            raise self.refuse(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(key, f"is {value!r}, an integer of at least {minimum} is needed")
        return value

    def number(self, source: dict[str, Any], key: str, default: float | None = None) -> float:
        value = source.get(key, default)
        if value is None:
            raise self.refuse(key, "is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}, a number is needed")
        return float(value)


def parse_config(raw: dict[str, Any], where: str) -> DraftConfig:
    """The config of a published draft; `where` names the file in errors. CheckpointError when it is unusable."""
    reader = _Reader(raw, where)
    architectures = raw.get("architectures") or ["(none)"]
    if not any(name in ARCHITECTURES for name in architectures):
        raise reader.refuse("architectures", f"names {', '.join(architectures)}, known is {', '.join(ARCHITECTURES)}")
    dflash = raw.get("dflash_config")
    if not isinstance(dflash, dict):
        raise reader.refuse("dflash_config", "is missing")
    for key in dflash:
        if key not in DFLASH_KEYS | HARMLESS_KEYS:
            raise reader.refuse(f"dflash_config.{key}", "is a key this version does not know")
    num_hidden_layers = reader.integer(raw, "num_hidden_layers", 1)
    num_target_layers = reader.integer(raw, "num_target_layers", 1)
    hidden_size = reader.integer(raw, "hidden_size", 1)
    num_attention_heads = reader.integer(raw, "num_attention_heads", 1)
    vocab_size = reader.integer(raw, "vocab_size", 1)
    layer_types, sliding_window = _layers(reader, num_hidden_layers)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    mask_token_id = reader.integer(dflash, "mask_token_id", 0)
    if mask_token_id >= vocab_size:
        raise reader.refuse("mask_token_id", f"is {mask_token_id} but vocab_size is {vocab_size}")
    soft_cap = dflash.get("final_logit_softcapping", raw.get("final_logit_softcapping"))
    return DraftConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=reader.integer(raw, "num_key_value_heads", 1, num_attention_heads),
        head_dim=reader.integer(raw, "head_dim", 1, hidden_size // num_attention_heads),
        intermediate_size=reader.integer(raw, "intermediate_size", 1),
        vocab_size=vocab_size,
        rms_norm_eps=reader.number(raw, "rms_norm_eps"),
        rope_theta=reader.number(raw, "rope_theta", (rope or {}).get("rope_theta", 10000.0)),
        max_position_embeddings=reader.integer(raw, "max_position_embeddings", 1),
        block_size=reader.integer(dflash if "block_size" in dflash else raw, "block_size", 2, 16),
        num_target_layers=num_target_layers,
        capture_layer_ids=_capture_layer_ids(reader, dflash, num_target_layers),
        mask_token_id=mask_token_id,
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=raw.get("is_causal"),
        attention_bias=bool(raw.get("attention_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_scaling=rope,
        input_embedding_scale=reader.number(dflash, "input_embedding_scale", 1.0),
        output_multiplier=reader.number(dflash, "output_multiplier", 1.0),
        final_logit_softcapping=None if not soft_cap else float(soft_cap),
    )


def _layers(reader: _Reader, num_hidden_layers: int) -> tuple[tuple[str, ...], int | None]:
    layer_types = tuple(reader.raw.get("layer_types") or ["full_attention"] * num_hidden_layers)
    if len(layer_types) != num_hidden_layers:
        raise reader.refuse(
            "layer_types", f"has {len(layer_types)} entries but num_hidden_layers is {num_hidden_layers}"
        )
    for layer_type in layer_types:
        if layer_type not in LAYER_TYPES:
            raise reader.refuse("layer_types", f"holds {layer_type!r}, known are {', '.join(LAYER_TYPES)}")
    if "sliding_attention" not in layer_types:
        return layer_types, None
    return layer_types, reader.integer(reader.raw, "sliding_window", 2)


def _capture_layer_ids(reader: _Reader, dflash: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise reader.refuse("dflash_config.target_layer_ids", f"is {ids!r}, a list of layer numbers is needed")
    for layer_id in ids:
        if not isinstance(layer_id, int) or not 0 <= layer_id < num_target_layers:
            raise reader.refuse(
                "dflash_config.target_layer_ids",
                f"holds {layer_id!r}, outside 0..{num_target_layers - 1} (num_target_layers is {num_target_layers})",
            )
    return tuple(ids)
