"""A draft's config is read once at the edge: what is missing, ill-typed or unknown is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from . import speculators

# What a draft's authors write under `architectures`.
DFLASH, DFLASH2, DOMINO = "DFlashDraftModel", "DFlash2DraftModel", "DominoDraftModel"
ARCHITECTURES = (DFLASH, DFLASH2, DOMINO)
LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that stand in `dflash_config` or, in older checkpoints, beside it.
DFLASH_KEYS = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "num_target_layers",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "draft_vocab_size",
    "sample_from_anchor",
}
# The same of DFlash 2 only.
DFLASH2_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
# The same of Domino only; `shift_label` is another name of `sample_from_anchor`.
DOMINO_KEYS = {"projector_type", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label"}
FAMILY_KEYS = DFLASH_KEYS | DFLASH2_KEYS | DOMINO_KEYS
# Keys of `dflash_config` that describe a training or a packaging and change nothing.
METADATA_KEYS = {
    "attention_backend",
    "dtype",
    "loss_decay_gamma",
    "mask_token",
    "num_anchors",
    "source",
    "target_model",
    "target_model_id",
    "target_model_name",
    "target_model_name_or_path",
    "training",
    "version",
}
# Keys that would change the mathematics, with the values that leave it as it is here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "qk_norm": (True,),
    "use_qk_norm": (True,),
    "attn_implementation": ("eager", "flash_attention_2", "flex_attention", "sdpa", "simple_flex_attention"),
}
# A key of the top level that is not read is refused where its name speaks of mathematics and it is switched on;
# others are taken for notes (token ids, versions, settings of the training).
MATHEMATICAL = re.compile(
    "attention_mode|attn_|bias|cap(ping)?$|causal|expert|fusion|gate|hidden_act|kernel|lora|mask_embed|markov|mlp_"
    "|multiplier|norm|partial_rotary|projector|query_pre|rank|residual|rope|rotary|scal(e|ing)|selector|shift|sink"
)
TOP_KEYS = {
    "attention_bias",
    "is_causal",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}
# What each kind of rotary scaling cannot do without.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor",),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "mrope": ("mrope_section",),
    "proportional": (),
}
ROPE_NUMBERS = {
    "rope_theta",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}
DOWNLOAD_AGAIN = "correct it or download the draft again"
OTHER_DRAFT = "use a draft without it or a version of dflash_mlx that has it"


@dataclass(frozen=True)
class Convolution:
    """Causal convolutions around attention and MLP; the channels of a group share what a row adds to its kernel."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class Selector:
    """The path through the `top_k` best tokens of every position is chosen by scores of neighbours, of this rank."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class Domino:
    """A recurrent network over the tokens chosen so far corrects the logits behind the first `plain` positions."""

    state_size: int
    rank: int
    plain: int


@dataclass(frozen=True)
class DraftConfig:
    """A draft, of whatever family.

    block_size: rows of the block, the anchor included. num_target_layers: None where the packaging does not say.
    capture_layer_ids: the target's layers, from 0, whose outputs the draft reads, in this order. sliding_window:
    positions a row of a sliding layer looks back over, itself included. is_causal: None makes the block causal in
    sliding layers only. rope_scaling: as mlx-lm reads it. draft_vocab_size: rows of its own head where they are fewer
    than the target's tokens. sample_from_anchor: the anchor's row proposes a token too, so that row i speaks of
    position i + 1 instead of i.
    """

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
    num_target_layers: int | None
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
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    convolution: Convolution | None = None
    selector: Selector | None = None
    domino: Domino | None = None

    @property
    def family(self) -> str:
        if self.domino is not None:
            return "Domino"
        return "DFlash 1" if self.selector is None else "DFlash 2"

    def window(self, layer: int) -> int | None:
        """Positions a layer's rows look back over, themselves included; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether the rows of the block are causal among themselves in this layer."""
        return self.window(layer) is not None if self.is_causal is None else self.is_causal


def parse_config(raw: dict[str, Any], where: str) -> DraftConfig:
    """The config of a published draft; `where` names the file in errors. CheckpointError when it is unusable."""
    reader = _Reader(speculators.published(raw, where), where)
    reader.check_architecture()
    num_hidden_layers = reader.integer("num_hidden_layers", 1)
    num_target_layers = None if speculators.is_speculators(raw) else reader.integer("num_target_layers", 1)
    hidden_size = reader.integer("hidden_size", 1)
    num_attention_heads = reader.integer("num_attention_heads", 1)
    num_key_value_heads = reader.integer("num_key_value_heads", 1, num_attention_heads)
    if num_attention_heads % num_key_value_heads:
        raise reader.refuse(
            "num_key_value_heads", f"is {num_key_value_heads}, which does not divide {num_attention_heads} heads"
        )
    vocab_size = reader.integer("vocab_size", 1)
    mask_token_id = reader.integer("mask_token_id", 0)
    if mask_token_id >= vocab_size:
        raise reader.refuse("mask_token_id", f"is {mask_token_id} but vocab_size is {vocab_size}")
    layer_types, sliding_window = _layers(reader, num_hidden_layers)
    rope = _rope(reader)
    soft_cap = reader.number("final_logit_softcapping", 0.0)
    config = DraftConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=reader.integer("head_dim", 1, hidden_size // num_attention_heads),
        intermediate_size=reader.integer("intermediate_size", 1),
        vocab_size=vocab_size,
        rms_norm_eps=reader.number("rms_norm_eps", above=0.0),
        rope_theta=reader.number("rope_theta", (rope or {}).get("rope_theta", 10000.0), above=0.0),
        max_position_embeddings=reader.integer("max_position_embeddings", 1),
        block_size=reader.integer("block_size", 2, 16),
        num_target_layers=num_target_layers,
        capture_layer_ids=_capture_layer_ids(reader, num_target_layers),
        mask_token_id=mask_token_id,
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=_is_causal(reader, layer_types),
        attention_bias=bool(reader.boolean("attention_bias", False)),
        tie_word_embeddings=bool(reader.boolean("tie_word_embeddings", False)),
        rope_scaling=rope,
        input_embedding_scale=reader.number("input_embedding_scale", 1.0),
        output_multiplier=reader.number("output_multiplier", 1.0),
        final_logit_softcapping=soft_cap if soft_cap > 0 else None,
        draft_vocab_size=_draft_vocab_size(reader, vocab_size),
        sample_from_anchor=_sample_from_anchor(reader),
        convolution=_convolution(reader, hidden_size),
        selector=_selector(reader, vocab_size),
        domino=_domino(reader),
    )
    _refuse_unknown(reader, config)
    return config


class _Reader:
    """Typed access to a raw config; every refusal names the file, the key, the value and the remedy."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where
        self.dflash = raw.get("dflash_config") or {}
        if not isinstance(self.dflash, dict):
            raise self.refuse("dflash_config", f"is {self.dflash!r}, an object is needed")

    def refuse(self, key: str, problem: str, remedy: str = DOWNLOAD_AGAIN) -> CheckpointError:
        inside = key in self.dflash and key not in self.raw
        return CheckpointError(f"{self.where}: {'dflash_config.' if inside else ''}{key} {problem}; {remedy}.")

    def get(self, key: str) -> Any:
        """The value where it stands, null counting as absent; `dflash_config` goes before the top level."""
        value = self.dflash.get(key) if key in FAMILY_KEYS else None
        return self.raw.get(key) if value is None else value

    def integer(self, key: str, minimum: int, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(key, "is missing")
        if not _is_integer(value) or value < minimum:
            raise self.refuse(key, f"is {value!r}, an integer of at least {minimum} is needed")
        return value

    def number(self, key: str, default: Any = None, above: float = -math.inf) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(key, "is missing")
        if not _is_number(value) or not above < value < math.inf:
            raise self.refuse(key, f"is {value!r}, a number{f' above {above:g}' if above >= 0 else ''} is needed")
        return float(value)

    def boolean(self, key: str, default: bool | None) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}, true or false is needed")
        return default if value is None else value

    def check_architecture(self) -> None:
        names = self.raw.get("architectures") or []
        if not isinstance(names, list):
            raise self.refuse("architectures", f"is {names!r}, a list of names is needed")
        if names and not any(name in ARCHITECTURES for name in names):
            known = ", ".join(ARCHITECTURES)
            raise self.refuse("architectures", f"names {', '.join(map(str, names))}, known are {known}", OTHER_DRAFT)

    def is_a(self, architecture: str) -> bool:
        return architecture in (self.raw.get("architectures") or [])


def _layers(reader: _Reader, num_hidden_layers: int) -> tuple[tuple[str, ...], int | None]:
    layer_types = reader.get("layer_types") or ["full_attention"] * num_hidden_layers
    if not isinstance(layer_types, list | tuple) or len(layer_types) != num_hidden_layers:
        found = f"has {len(layer_types)} entries" if isinstance(layer_types, list | tuple) else f"is {layer_types!r}"
        raise reader.refuse("layer_types", f"{found} but num_hidden_layers is {num_hidden_layers}")
    for layer_type in layer_types:
        if layer_type not in LAYER_TYPES:
            raise reader.refuse("layer_types", f"holds {layer_type!r}, known are {', '.join(LAYER_TYPES)}", OTHER_DRAFT)
    needed = "sliding_attention" in layer_types
    return tuple(layer_types), reader.integer("sliding_window", 2) if needed else None


def _is_causal(reader: _Reader, layer_types: Sequence[str]) -> bool | None:
    """`is_causal` of the whole draft, else `dflash_config.causal`, which speaks of its sliding layers."""
    is_causal = reader.boolean("is_causal", None)
    causal = reader.dflash.get("causal")
    if causal is not None and not isinstance(causal, bool):
        raise reader.refuse("causal", f"is {causal!r}, true or false is needed")
    if causal is None or is_causal == causal:
        return is_causal
    if is_causal is not None or (causal and "full_attention" in layer_types):
        problem = f"is {causal} beside is_causal {is_causal} and layers {', '.join(sorted(set(layer_types)))}"
        raise reader.refuse("causal", f"{problem}: which layers it means is not clear")
    return causal


def _draft_vocab_size(reader: _Reader, vocab_size: int) -> int | None:
    size = reader.integer("draft_vocab_size", 1, vocab_size)
    if size > vocab_size:
        raise reader.refuse("draft_vocab_size", f"is {size} but vocab_size is {vocab_size}")
    return size if size < vocab_size else None


def _capture_layer_ids(reader: _Reader, num_target_layers: int | None) -> tuple[int, ...]:
    ids = reader.get("target_layer_ids")
    if not isinstance(ids, list | tuple) or not ids:
        problem = "is missing" if ids is None else f"is {ids!r}, a list of layer numbers is needed"
        raise reader.refuse("target_layer_ids", problem)
    for layer_id in ids:
        if not _is_integer(layer_id) or layer_id < 0:
            raise reader.refuse("target_layer_ids", f"holds {layer_id!r}, a layer's number from 0 is needed")
        if num_target_layers is not None and layer_id >= num_target_layers:
            raise reader.refuse(
                "target_layer_ids",
                f"holds {layer_id!r}, outside 0..{num_target_layers - 1} (num_target_layers is {num_target_layers})",
            )
    if len(set(ids)) < len(ids):
        raise reader.refuse("target_layer_ids", f"is {list(ids)}, which names a layer twice")
    return tuple(ids)


def _rope(reader: _Reader) -> dict[str, Any] | None:
    key = "rope_parameters" if reader.raw.get("rope_parameters") else "rope_scaling"
    rope = reader.raw.get(key)
    if not rope:
        return None
    if not isinstance(rope, dict):
        raise reader.refuse(key, f"is {rope!r}, an object is needed")
    for name in LAYER_TYPES:
        if name in rope:
            raise reader.refuse(f"{key}.{name}", "gives a layer type a rotation of its own", OTHER_DRAFT)
    kind = rope.get("type") or rope.get("rope_type", "default")
    if kind not in ROPE_NEEDS:
        raise reader.refuse(key, f"is of type {kind!r}, known are {', '.join(ROPE_NEEDS)}", OTHER_DRAFT)
    for name in ROPE_NEEDS[kind]:
        if rope.get(name) is None:
            raise reader.refuse(f"{key}.{name}", f"is missing for type {kind!r}")
    for name, value in rope.items():
        numeric = "factor" in name or name in ROPE_NUMBERS
        if numeric and value is not None and not all(_is_number(x) and x >= 0 for x in _as_list(value)):
            raise reader.refuse(f"{key}.{name}", f"is {value!r}, numbers of at least 0 are needed")
    if rope.get("factor") == 0:
        raise reader.refuse(f"{key}.factor", "is 0, a number above 0 is needed")
    return rope


def _convolution(reader: _Reader, hidden_size: int) -> Convolution | None:
    if not reader.is_a(DFLASH2):
        return None
    group_size = reader.integer("conv_group_size", 1)
    if hidden_size % group_size:
        raise reader.refuse("conv_group_size", f"is {group_size}, which does not divide hidden_size {hidden_size}")
    return Convolution(reader.integer("conv_kernel_size", 1), group_size)


def _selector(reader: _Reader, vocab_size: int) -> Selector | None:
    if not reader.is_a(DFLASH2):
        return None
    top_k = reader.integer("selector_top_k", 1)
    if top_k > vocab_size:
        raise reader.refuse("selector_top_k", f"is {top_k} but vocab_size is {vocab_size}")
    return Selector(reader.integer("selector_rank", 1), top_k)


def _domino(reader: _Reader) -> Domino | None:
    kind = reader.get("projector_type")
    if kind is None and not reader.is_a(DOMINO):
        return None
    if kind not in (None, "domino") or reader.is_a(DFLASH2):
        names = reader.raw.get("architectures")
        raise reader.refuse("projector_type", f"is {kind!r} for {names}, known is 'domino' alone", OTHER_DRAFT)
    return Domino(
        state_size=reader.integer("gru_hidden_dim", 1),
        rank=reader.integer("emb_dim", 1),
        plain=reader.integer("pure_draft_prefix_len", 0, 0),
    )


def _sample_from_anchor(reader: _Reader) -> bool:
    ours, theirs = reader.boolean("sample_from_anchor", None), reader.boolean("shift_label", None)
    if ours is not None and theirs is not None and ours != theirs:
        raise reader.refuse("shift_label", f"is {theirs} beside sample_from_anchor {ours}, its other name")
    return bool(ours or theirs)


def _refuse_unknown(reader: _Reader, config: DraftConfig) -> None:
    """What would change the mathematics but is not implemented; what is switched off does not."""
    known = DFLASH_KEYS | METADATA_KEYS | {"causal"}
    known |= (DFLASH2_KEYS if config.selector else set()) | (DOMINO_KEYS if config.domino else set())
    for key, value in reader.dflash.items():
        if key not in known and not _is_neutral(key, value):
            raise reader.refuse(f"dflash_config.{key}", f"is {value!r}, which this version does not know", OTHER_DRAFT)
    for key, value in reader.raw.items():
        read = key in known | TOP_KEYS or key.startswith("_")  # an underscore marks transformers' own notes
        if not read and MATHEMATICAL.search(key) and not _is_neutral(key, value):
            raise reader.refuse(key, f"is {value!r}, which this version does not know", OTHER_DRAFT)
    if reader.raw.get("target_hidden_size") not in (None, config.hidden_size):
        problem = f"is {reader.raw['target_hidden_size']} but hidden_size is {config.hidden_size}"
        raise reader.refuse("target_hidden_size", f"{problem}: a draft of another width is not supported", OTHER_DRAFT)


def _is_neutral(key: str, value: Any) -> bool:
    if key in NEUTRAL:
        return value is None or value in NEUTRAL[key]
    factor = _is_number(value) and re.search("multiplier|scale", key)
    return value == 1 if factor else not value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
