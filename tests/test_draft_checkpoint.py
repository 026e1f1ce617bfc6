"""A draft loads whole, or one sentence says which file, key or tensor is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from dflash_mlx.draft import DFlashDraft, convert_draft, finite, load_draft, parse_config, quantize
from dflash_mlx.draft.checkpoint import kv_names, stack, unstack
from dflash_mlx.errors import CheckpointError, UnsupportedOptionError

RAW: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "block_size": 8,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]},
}
DEFAULT_DRAFT = Path(__file__).parent.parent / "dflash_mlx" / "data" / "default_draft"


def edited(key: str, value: Any) -> dict[str, Any]:
    """RAW with one key changed ("dflash_config.x" inside it), or removed when the value is ...."""
    raw = json.loads(json.dumps(RAW))
    where = raw["dflash_config"] if key.startswith("dflash_config.") else raw
    key = key.removeprefix("dflash_config.")
    where.pop(key, None)
    if value is not ...:
        where[key] = value
    return raw


def published_weights(raw: dict[str, Any] = RAW) -> dict[str, mx.array]:
    mx.random.seed(0)
    draft = DFlashDraft(parse_config(raw, "config.json"))
    return unstack(dict(tree_flatten(draft.parameters())), draft.config)


def write(path: Path, weights: dict[str, mx.array] | None = None, raw: dict[str, Any] = RAW) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    mx.save_safetensors(str(path / "model.safetensors"), published_weights(raw) if weights is None else weights)
    return path


def write_shards(path: Path) -> Path:
    write(path)
    (path / "model.safetensors").unlink()
    weights, index = published_weights(), {}
    for i, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        mx.save_safetensors(str(path / file), {name: weights[name] for name in names})
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def forward(draft: DFlashDraft) -> mx.array:
    context = draft.make_context()
    mx.random.seed(5)
    hidden = mx.random.normal((1, 11, len(draft.capture_layer_ids) * draft.config.hidden_size))
    inputs = mx.random.normal((1, 4, draft.config.hidden_size))
    draft.extend(context, hidden)
    return draft(inputs, context)


# --- configs ---------------------------------------------------------------------------------------------------------

REQUIRED = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
REQUIRED += ["rms_norm_eps", "max_position_embeddings", "num_target_layers"]
REQUIRED += ["dflash_config.mask_token_id", "dflash_config.target_layer_ids"]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [..., None])
def test_a_missing_key_is_named(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^here: (dflash_config\.)?{key.split('.')[-1]} is missing; .*download"):
        parse_config(edited(key, value), "here")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", ["DFlash9DraftModel"], "architectures names DFlash9DraftModel, known are DFlashDraftModel"),
        ("architectures", "DFlashDraftModel", "a list of names is needed"),
        ("dflash_config", [1], r"dflash_config is \[1\], an object is needed"),
        ("dflash_config.target_layer_ids", [0, 2, 2], r"target_layer_ids is \[0, 2, 2\], which names a layer twice"),
        ("hidden_size", "64", "hidden_size is '64', an integer of at least 1"),
        ("hidden_size", 64.0, "hidden_size is 64.0"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", True, "num_hidden_layers is True"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3, which does not divide 4 heads"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0, a number above 0"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6'"),
        ("rope_theta", -1.0, "rope_theta is -1.0"),
        ("block_size", 1, "block_size is 1, an integer of at least 2"),
        ("block_size", 0, "block_size is 0"),
        ("dflash_config.block_size", 1, "dflash_config.block_size|block_size is 1"),
        ("dflash_config.mask_token_id", -1, "dflash_config.mask_token_id is -1"),
        ("dflash_config.mask_token_id", 61, "mask_token_id is 61 but vocab_size is 61"),
        ("dflash_config.target_layer_ids", [], r"target_layer_ids is \[\]"),
        ("dflash_config.target_layer_ids", 4, "target_layer_ids is 4, a list"),
        ("dflash_config.target_layer_ids", [1, 6], r"target_layer_ids holds 6, outside 0\.\.5"),
        ("dflash_config.target_layer_ids", [-1], "target_layer_ids holds -1"),
        ("dflash_config.target_layer_ids", [1.0], "target_layer_ids holds 1.0"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries but num_hidden_layers is 2"),
        ("layer_types", "full", "layer_types is 'full'"),
        ("layer_types", ["full_attention", "linear_attention"], "layer_types holds 'linear_attention', known are"),
        ("layer_types", ["full_attention", "sliding_attention"], "sliding_window is missing"),
        ("is_causal", "yes", "is_causal is 'yes', true or false"),
        ("attention_bias", 1, "attention_bias is 1"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', which this version does not know"),
        ("draft_vocab_size", 62, "draft_vocab_size is 62 but vocab_size is 61"),
        ("rope_scaling", "linear", "rope_scaling is 'linear', an object"),
        ("rope_scaling", {"rope_type": "spiral"}, "rope_scaling is of type 'spiral', known are default"),
        ("rope_scaling", {"type": "linear"}, "rope_scaling.factor is missing for type 'linear'"),
        ("rope_scaling", {"type": "linear", "factor": "2"}, "rope_scaling.factor is '2'"),
        ("rope_scaling", {"type": "linear", "factor": 0}, "rope_scaling.factor is 0"),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1]}, "rope_scaling.original_max_position"),
        (
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e4}},
            "rope_parameters.full_attention gives a layer type",
        ),
        ("dflash_config.output_multiplier", "2", "output_multiplier is '2', a number"),
        ("dflash_config.input_embedding_scale", float("nan"), "input_embedding_scale is nan"),
        ("dflash_config.final_logit_softcapping", float("inf"), "final_logit_softcapping is inf"),
        ("dflash_config.conv_kernel_size", 2, "dflash_config.conv_kernel_size is 2, which this version does not know"),
        ("dflash_config.projector_type", "mlp", "dflash_config.projector_type is 'mlp'"),
        ("dflash_config.sample_from_anchor", 1, "dflash_config.sample_from_anchor is 1, true or false"),
        ("dflash_config.use_qk_norm", False, "dflash_config.use_qk_norm is False"),
        ("dflash_config.causal", True, "causal is True beside is_causal None and layers full_attention"),
        ("dflash_config.causal", "no", "causal is 'no', true or false"),
        ("mlp_bias", True, "mlp_bias is True, which this version does not know"),
        ("residual_multiplier", 0.22, "residual_multiplier is 0.22"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"),
        ("num_experts", 8, "num_experts is 8"),
        ("target_hidden_size", 128, "target_hidden_size is 128 but hidden_size is 64"),
    ],
)
def test_a_bad_value_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        parse_config(edited(key, value), "here")
    assert str(error.value).startswith("here: ") and str(error.value).endswith(".") and "; " in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ...),
        ("dflash_config.mask_token", "<mask>"),
        ("dflash_config.num_anchors", 512),
        ("dflash_config.conv_kernel_size", 0),
        ("dflash_config.projector_type", None),
        ("dflash_config.use_qk_norm", True),
        ("dflash_config.causal", False),
        ("hidden_act", "silu"),
        ("draft_vocab_size", 61),
        ("rope_scaling", None),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}),
        ("sliding_window", None),
        ("attention_dropout", 0.0),
        ("embedding_multiplier", 1.0),
        ("partial_rotary_factor", 1.0),
        ("_attn_implementation_autoset", True),
        ("target_hidden_size", 64),
        ("transformers_version", "5.0.0"),
        ("loss_decay_gamma", 7.0),
    ],
)
def test_what_changes_nothing_passes(key: str, value: Any) -> None:
    parse_config(edited(key, value), "here")


def test_both_places_of_a_key_and_their_order() -> None:
    assert parse_config(RAW, "").block_size == 8
    assert parse_config(edited("block_size", ...), "").block_size == 16
    assert parse_config(edited("dflash_config.block_size", 5), "").block_size == 5
    assert parse_config(edited("output_multiplier", 0.5), "").output_multiplier == 0.5
    beside = {key: value for key, value in RAW.items() if key != "dflash_config"} | RAW["dflash_config"]
    assert parse_config(beside, "") == parse_config(RAW, "")


def test_defaults_and_rotary_parameters() -> None:
    assert parse_config(edited("head_dim", ...), "").head_dim == 16
    assert parse_config(edited("num_key_value_heads", ...), "").num_key_value_heads == 4
    assert parse_config(edited("rope_theta", ...), "").rope_theta == 10000.0
    raw = edited("rope_theta", ...) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config(raw, "").rope_theta == 5e5


# --- files -----------------------------------------------------------------------------------------------------------


def test_one_file_and_shards_load_alike(tmp_path: Path) -> None:
    whole, shards = load_draft(write(tmp_path / "whole")), load_draft(str(write_shards(tmp_path / "shards")))
    assert mx.array_equal(forward(whole), forward(shards)).item()


def _cut(keep: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])

    return damage


def _add_copy(path: Path) -> None:
    mx.save_safetensors(str(path / "model2.safetensors"), {"norm.weight": mx.ones((64,))})


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (_cut(0.7), "model.safetensors is damaged .*; download"),
    (_cut(0.001), "model.safetensors is damaged"),
    (_cut(0), "model.safetensors is damaged"),
    (lambda path: (path / "model.safetensors").write_bytes(b"<html>not found</html>" * 9), "is damaged"),
    (lambda path: (path / "model.safetensors").unlink(), "holds no safetensors file"),
    (lambda path: (path / "config.json").unlink(), r"config.json cannot be read \(No such file"),
    (lambda path: (path / "config.json").write_text('{"hidden_size": 6'), "config.json is not valid JSON"),
    (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not valid JSON"),
    (lambda path: (path / "config.json").write_text("[]"), "config.json holds a list instead of an object"),
    (lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "no usable weight_map"),
    (lambda path: (path / "model.safetensors.index.json").write_text("{"), "index.json is not valid JSON"),
    (_add_copy, r"model2.safetensors holds tensors that another file holds too \(norm.weight\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = write(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=message) as error:
        load_draft(path)
    assert str(tmp_path) in str(error.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_shards(tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        load_draft(path)


def test_paths_that_are_no_draft(tmp_path: Path) -> None:
    for path in ("", "a/b/c/d", str(tmp_path / "none"), "~/none such"):
        with pytest.raises(CheckpointError, match="neither a local directory nor a reachable model repository"):
            load_draft(path)
    write(tmp_path)
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        load_draft(tmp_path / "config.json")


@pytest.mark.parametrize("config", [{"architectures": ["Qwen3ForCausalLM"]}, {"model_type": "llama"}, {}])
def test_a_whole_language_model_is_no_draft(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = (config.get("architectures") or [config.get("model_type", "model of unknown kind")])[0]
    with pytest.raises(CheckpointError, match=f"holds a {kind}, not a DFlash draft; give it as the target"):
        load_draft(tmp_path)


def test_another_draft_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architectures names MyDraftModel, known are DFlashDraftModel"):
        load_draft(write(tmp_path, published_weights(), edited("architectures", ["MyDraftModel"])))


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named_as_published(tmp_path: Path, name: str) -> None:
    weights = published_weights()
    del weights[name]
    with pytest.raises(CheckpointError, match=rf"do not fit its config \(missing {name}\); download"):
        load_draft(write(tmp_path, weights))


@pytest.mark.parametrize(
    "name", ["layers.2.self_attn.k_proj.weight", "markov.weight", "layers.0.self_attn.q_proj.bias"]
)
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"\(unexpected {name}\)"):
        load_draft(write(tmp_path, published_weights() | {name: mx.zeros((64,))}))


@pytest.mark.parametrize("name", ["layers.1.self_attn.v_proj.weight", "norm.weight", "fc.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    weights = published_weights()
    good = weights[name].shape
    weights[name] = mx.zeros((3, *good[1:]))
    with pytest.raises(CheckpointError) as error:
        load_draft(write(tmp_path, weights))
    assert f"({name} is {(3, *good[1:])} instead of {good})" in str(error.value)


def test_integers_for_weights_are_refused(tmp_path: Path) -> None:
    weights = published_weights() | {"norm.weight": mx.zeros((64,), mx.int8)}
    with pytest.raises(CheckpointError, match=r"norm\.weight is of mlx\.core\.int8"):
        load_draft(write(tmp_path, weights))


def test_many_missing_tensors_make_one_short_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing .* and 12 more\)") as error:
        load_draft(write(tmp_path, {"norm.weight": mx.ones((64,))}))
    assert len(str(error.value)) < 900


def test_stacking_is_undone_by_unstacking() -> None:
    config, weights = parse_config(RAW, ""), published_weights()
    stacked = stack(weights, config)
    assert stacked["kv_proj.weight"].shape == (2 * 2 * 2 * 32, 64)
    again = unstack(stacked, config)
    assert again.keys() == weights.keys()
    assert all(mx.array_equal(again[name], weights[name]).item() for name in weights)


# --- own embedding and head ------------------------------------------------------------------------------------------


def refused(_: mx.array) -> mx.array:
    raise AssertionError("the target's is not to be used")


def test_the_targets_embedding_and_head_serve_where_the_draft_has_none(tmp_path: Path) -> None:
    draft = load_draft(write(tmp_path, raw=edited("tie_word_embeddings", True)))
    embedding, tokens, hidden = mx.random.normal((61, 64)), mx.array([[1, 5]]), mx.random.normal((1, 2, 64))
    assert mx.array_equal(draft.embed(tokens, lambda x: embedding[x]), embedding[tokens]).item()
    assert mx.array_equal(draft.logits(hidden, lambda x: x @ embedding.T), hidden @ embedding.T).item()


@pytest.mark.parametrize("tied", [True, False])
def test_own_embedding_and_head_go_before_the_targets(tmp_path: Path, tied: bool) -> None:
    own = {"embed_tokens.weight": mx.random.normal((61, 64))}
    if not tied:
        own["lm_head.weight"] = mx.random.normal((61, 64))
    draft = load_draft(write(tmp_path, published_weights() | own, edited("tie_word_embeddings", tied)))
    tokens, hidden = mx.array([[1, 5]]), mx.random.normal((1, 2, 64))
    head = own.get("lm_head.weight", own["embed_tokens.weight"])
    assert mx.array_equal(draft.embed(tokens, refused), own["embed_tokens.weight"][tokens]).item()
    assert mx.allclose(draft.logits(hidden, refused), hidden @ head.T, atol=1e-5).item()


# --- types and quantization ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16, mx.float32])
def test_the_type_on_the_cpu_and_on_request(tmp_path: Path, stored: mx.Dtype) -> None:
    path = write(tmp_path, {name: x.astype(stored) for name, x in published_weights().items()})
    kept = mx.float32 if mx.default_device() == mx.cpu else stored
    assert load_draft(path).dtype == kept
    assert load_draft(path, dtype=mx.bfloat16).dtype == mx.bfloat16
    assert all(x.dtype == mx.float16 for _, x in tree_flatten(load_draft(path, dtype=mx.float16).parameters()))


def test_activations_that_overflow_in_float16_are_seen(tmp_path: Path) -> None:
    weights = published_weights()
    weights |= {name: 400 * x for name, x in weights.items() if "mlp" in name}
    path = write(tmp_path, weights)
    assert not finite(forward(load_draft(path, dtype=mx.float16))).item()
    assert finite(forward(load_draft(path, dtype=mx.float32))).item()


def quantized_checkpoint(path: Path, overrides: dict[str, Any], *, group_size: int = 32, bits: int = 8) -> Path:
    """What mlx-lm's conversion writes for these weights; an override is a module's own options or False."""
    weights, out = published_weights(), {}
    for name, x in weights.items():
        module = name.removesuffix(".weight")
        options = overrides.get(module, {"group_size": group_size, "bits": bits})
        if x.ndim < 2 or options is False:
            out[name] = x
            continue
        out[name], out[f"{module}.scales"], out[f"{module}.biases"] = mx.quantize(x, **options)
    raw = RAW | {"quantization": {"group_size": group_size, "bits": bits, **overrides}}
    return write(path, out, raw)


def dequantized(draft: DFlashDraft) -> DFlashDraft:
    """A new draft of the same numbers with plain matrices."""
    plain = DFlashDraft(draft.config)
    for name, module in draft.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            weight = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            plain.load_weights([(f"{name}.weight", weight)], strict=False)
        elif "weight" in module:
            plain.load_weights([(f"{name}.weight", module.weight)], strict=False)
    return plain


V0, K1 = "layers.0.self_attn.v_proj", "layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("overrides", "kv_quantized"),
    [
        ({}, True),
        ({"layers.1.mlp.down_proj": {"group_size": 64, "bits": 6}, "fc": False}, True),
        ({name: {"group_size": 64, "bits": 4} for name in kv_names(parse_config(RAW, ""))}, True),
        ({V0: {"group_size": 32, "bits": 6}}, False),
        ({K1: False}, False),
    ],
)
def test_a_quantized_checkpoint_loads_quantized(tmp_path: Path, overrides: dict, kv_quantized: bool) -> None:
    draft = load_draft(quantized_checkpoint(tmp_path, overrides), dtype=mx.float32)
    assert isinstance(draft.kv_proj, nn.QuantizedLinear) == kv_quantized
    assert isinstance(draft.fc, nn.QuantizedLinear) == ("fc" not in overrides)
    assert isinstance(draft.layers[0].mlp.up_proj, nn.QuantizedLinear)
    # A quantized matmul multiplies out the same numbers; only the order of float32 sums differs.
    assert mx.allclose(forward(draft), forward(dequantized(draft)), atol=2e-5).item()
    # 8 bits or 4 instead of 32 change little: the rows are where they belong.
    whole = DFlashDraft(draft.config)
    whole.load_weights(list(stack(published_weights(), draft.config).items()))
    assert mx.abs(forward(draft) - forward(whole)).max().item() < 0.4


@pytest.mark.parametrize("overrides", [{}, {"fc": False}, {V0: {"group_size": 32, "bits": 6}}])
def test_a_cpu_dequantizes(tmp_path: Path, overrides: dict) -> None:
    path = quantized_checkpoint(tmp_path, overrides)
    kept, draft = load_draft(path, dtype=mx.float32), load_draft(path)
    quantized = [name for name, module in draft.named_modules() if "scales" in module]
    assert not quantized if mx.default_device() == mx.cpu else quantized
    assert mx.allclose(forward(draft), forward(kept), atol=2e-5).item()
    dequantize_model(draft)
    assert not any("scales" in module for _, module in draft.named_modules())
    assert mx.allclose(forward(draft), forward(kept), atol=2e-5).item()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (4, "quantization is 4, an object is needed"),
        ({"bits": 8}, "quantization.group_size is None, a number is needed"),
        ({"group_size": 32, "bits": "8"}, "quantization.bits is '8'"),
        ({"group_size": 32, "bits": 4}, "do not fit its config .* instead of"),
        ({"group_size": 32, "bits": 7}, "cannot be quantized as its config says"),
        (None, r"do not fit its config \(unexpected fc.biases, fc.scales"),
    ],
)
def test_a_wrong_quantization_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    path = quantized_checkpoint(tmp_path, {})
    (path / "config.json").write_text(json.dumps(RAW | {"quantization": quantization}))
    with pytest.raises(CheckpointError, match=message):
        load_draft(path)


def test_another_packagings_quantization_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, raw=RAW | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(CheckpointError, match="quantization is 'fp8', known is mlx's; use an mlx conversion"):
        load_draft(path)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_a_loaded_draft(tmp_path: Path, bits: int) -> None:
    draft = load_draft(write(tmp_path))
    whole = forward(draft)
    quantize(draft, bits, 32)
    assert draft.kv_proj.bits == bits and draft.dtype == mx.float32
    assert mx.allclose(forward(draft), forward(dequantized(draft)), atol=2e-5).item()
    if bits == 8:
        assert mx.abs(forward(draft) - whole).max().item() < 0.1
    with pytest.raises(UnsupportedOptionError, match=f"quantized already, at {bits} bits"):
        quantize(draft, bits, 32)


def test_quantizing_to_the_impossible_is_refused(tmp_path: Path) -> None:
    draft = load_draft(write(tmp_path))
    for bits, group_size, match in (
        (7, 64, "bits is 7; use one of 2, 3, 4, 5, 6, 8"),
        (4, 48, "group_size is 48; use one of 32, 64, 128"),
        (4, 128, "to 4 bits in groups of 128 .*; leave out bits .--draft-bits., or give load_draft a group_size"),
    ):
        with pytest.raises(UnsupportedOptionError, match=match):
            quantize(draft, bits, group_size)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": "4"},
        {"bits": 4.0},
        {"bits": True},
        {"bits": 0},
        {"bits": [4]},
        {"group_size": 0},
        {"bits": 4, "group_size": "64"},
        {"group_size": None},
        {"dtype": "float16"},
        {"dtype": mx.int8},
        {"dtype": float},
        {"dtype": mx.complex64},
    ],
    ids=str,
)
def test_options_that_no_draft_can_have_are_refused_with_the_value(tmp_path: Path, options: dict) -> None:
    """Before anything is read or fetched."""
    name = "bits" if "bits" in options and "group_size" not in options else list(options)[-1]
    with pytest.raises(UnsupportedOptionError, match=f"{name} is {re.escape(repr(options[name]))}; use "):
        load_draft(tmp_path / "nowhere", **options)
    with pytest.raises(UnsupportedOptionError, match=f"{name} is "):
        convert_draft(tmp_path / "nowhere", tmp_path / "out", **options)


def test_the_default_draft_loads_and_drafts_finite_numbers() -> None:
    draft = load_draft(DEFAULT_DRAFT)
    assert (draft.block_size, draft.mask_token_id, draft.capture_layer_ids) == (8, 4, (1, 8, 14, 21, 27))
    hidden = forward(draft)
    head = mx.random.normal((draft.config.hidden_size, draft.config.vocab_size))
    assert finite(hidden).item() and finite(draft.logits(hidden, lambda x: x @ head)).item()
