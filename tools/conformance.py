"""Checks every architecture that mlx-lm ships on a tiny random model of it; writes the table of docs/CONFORMANCE.md.

    python tools/conformance.py --json docs/conformance.json --markdown docs/CONFORMANCE.md
    python tools/conformance.py --only gemma3_text --only llama

Each model is made of mlx-lm's own classes and argument dataclasses: COMMON names small sizes once for all of them,
CONFIGS what one architecture needs beside. An architecture may stand there in several variants, "name:variant".
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from dflash_mlx.conformance import as_dict, check_model

WINDOW = 8
VOCAB = 97
SLIDING = ["sliding_attention", "full_attention"] * 2
DEFAULT_ROPE = {"type": "default", "rope_type": "default", "rope_theta": 10000.0}

# Argument name → value for every dataclass that has an argument of this name.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_dense_layers": 1,
    # Latent attention.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    # Gated delta.
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    # Multipliers.
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    # Older names.
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 512,
    "n_ctx": 512,
    "n_inner": 64,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {"num_key_value_heads": 4}
MAMBA2 = {
    "num_heads": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_conv_bias": True,
    "time_step_limit": (0.0, float("inf")),
    "time_step_rank": "auto",
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
KIMI = LATENT | {
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "gate_lower_bound": -5.0,
    },
    "model_max_length": 4096,
    "num_experts_per_token": 2,
    "activation_situ_beta": 1.0,
    "attn_res_block_size": 2,
}
BAILING = LATENT | {"layer_group_size": 2, "group_norm_size": 2, "use_qk_norm": True, "topk_group": 1}
CONV = {
    "conv_bias": True,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention"] * 2,
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "use_expert_bias": True,
}
GEMMA3 = {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2}
GEMMA4 = {
    "layer_types": SLIDING,
    "global_head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
GEMMA4_SHARED = GEMMA4 | {"num_hidden_layers": 6, "layer_types": SLIDING + SLIDING[:2], "num_kv_shared_layers": 2}
GEMMA3N = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": SLIDING + SLIDING[:2],
    "vocab_size_per_layer_input": VOCAB,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}
NGRAM = LATENT | {
    "attention_method": "MLA",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "ngram_vocab_size_ratio": 3,
    "emb_neighbor_num": 4,
    "emb_split_num": 2,
}
ROPE_BY_TYPE = {"sliding_attention": dict(DEFAULT_ROPE), "full_attention": dict(DEFAULT_ROPE)}
QWEN3_5 = {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5}}

CONFIGS: dict[str, dict[str, Any]] = {
    "afm7": {
        "hidden_dim": 32,
        "num_kv_reuse_layers": 2,
        "num_layers": 5,
        "hidden_dim_scale_factor": 2.0,
    },
    "afmoe": {"layer_types": SLIDING},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "bailing_hybrid": BAILING,
    "bailing_moe": {"num_shared_experts": 1},
    "bailing_moe_linear": BAILING | {"head_dim": None},
    "bailing_moe_v3": BAILING | {"n_group": 2},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 32,
        "n_layers": 4,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek": LATENT,
    "deepseek_v2": LATENT | {"topk_method": "gready", "rope_scaling": YARN},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v41": LATENT
    | {
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_ratios": (1, 1, 4, 4),
        "kv_source_layer_ids": (0, 1, 2, 3),
        "index_source_layer_ids": (0, 1, 2, 3),
        "head_dim": 16,
        "hc_mult": 2,
    },
    "dots1": {"first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": {"sliding_window_pattern": "LLLG", "rope_scaling": None},
    "exaone_moe": {
        "layer_types": SLIDING,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 64, "mamba_rms_norm": True},
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"], "conv_L_cache": 3},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "gemma4:shared": GEMMA4_SHARED,
    "gemma4_text": GEMMA4,
    "gemma4_text:shared": GEMMA4_SHARED,
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5, "rope_scaling": None, "use_qk_norm": True},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT | {"rope_parameters": DEFAULT_ROPE, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": SLIDING},
    "gptj": {"rotary_dim": 4, "n_inner": 64},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "cla_share_factor": 2,
    },
    "hunyuan_v1_dense": {
        "use_qk_norm": True,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "jamba": MAMBA2
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": LATENT,
    "kimi_k3": KIMI,
    "kimi_linear": KIMI,
    "kimi_vl": LATENT,
    "laguna": {"layer_types": SLIDING},
    "lfm2": CONV,
    "lfm2-vl": CONV,
    "lfm2_moe": CONV,
    "lille-130m": {"n_embd": 128, "block_size": 512, "n_kv_heads": 2},
    "llama": {},
    "llama:sliding": {"layer_types": SLIDING},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 64,
        "use_qk_norm": True,
        "rope_scaling": None,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "longcat_flash": NGRAM,
    "longcat_flash_ngram": NGRAM,
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "use_bcdt_rms": True,
    },
    "mamba2": MAMBA2,
    "mellum": {"layer_types": SLIDING, "rope_parameters": ROPE_BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "partial_rotary_factor": 0.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2},
    "minicpm3": LATENT
    | {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [2.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 64,
        },
        "dim_model_base": 16,
        "scale_depth": 1.4,
        "scale_emb": 2,
    },
    "minimax": {"rotary_dim": 4, "shared_intermediate_size": 32, "scoring_func": "sigmoid", "use_qk_norm": True},
    "minimax_m3_vl": {
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "rotary_dim": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "ministral3": {
        "layer_types": SLIDING,
        "rope_parameters": DEFAULT_ROPE
        | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16, "rope_type": "default"},
    },
    "mistral3": {
        "layer_types": SLIDING,
        "rope_parameters": DEFAULT_ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    "mistral3:plain": {},
    "mistral4": LATENT
    | {
        "qk_head_dim": 16,
        "rope_parameters": DEFAULT_ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    "muse_glimmer": {"layer_types": SLIDING},
    "muse_spark": {
        "post_norm_eps": 1e-6,
        "rope_parameters": DEFAULT_ROPE,
        "layer_rope_theta": [10000.0, 0, 10000.0, 0],
        "layer_types": SLIDING,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
        "moe_hidden_size": 32,
        "num_shared_experts": 0,
    },
    "nanbeige": {"num_loops": 2},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron_h": MAMBA2 | {"num_hidden_layers": 5, "hybrid_override_pattern": ["M", "-", "*", "M", "E"]},
    "olmo3": {"layer_types": SLIDING},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "openelm": {
        "num_transformer_layers": 4,
        "model_dim": 32,
        "ffn_dim_divisor": 8,
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0, 2.0, 2.0, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3small": {
        "vocab_size": 100352,  # the model names tokens up to here
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        "rope_scaling": {
            "long_factor": [1.0] * 4,
            "short_factor": [1.0] * 4,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "longrope",
        }
    },
    "phixtral": {"num_vocab": VOCAB, "model_dim": 128, "num_heads": 4, "rotary_dim": 8, "num_layers": 3},
    "pixtral": {},
    "plamo": {"n_shared_head": 2},
    "plamo2": MAMBA2 | {"hidden_size_per_head": 8, "tie_word_embeddings": True},
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": QWEN3_5
    | {
        "num_experts": 0,
        "intermediate_size": 512,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.down_proj", "embedding": False, "dtype": "float16", "block": 512}
            for i in range(4)
        ],
    },
    "qwen": {"kv_channels": 8},
    "qwen3_5": QWEN3_5 | {"num_experts": 0},
    "qwen3_5_moe": QWEN3_5,
    "qwen3_next": {"partial_rotary_factor": 0.5},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "solar_open": {"partial_rotary_factor": 0.5, "tie_word_embeddings": False},
    "spark2_5": {"rope_parameters": ROPE_BY_TYPE, "layer_types": SLIDING},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "step3p5": {
        "num_attention_groups": 2,
        "layer_types": SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    },
    "youtu_llm": LATENT,
}


def modules() -> list[str]:
    """Every file of mlx_lm.models that has a Model class."""
    files = sorted(pathlib.Path(mlx_lm.models.__path__[0]).glob("*.py"))
    return [f.stem for f in files if "class Model(" in f.read_text() or "import Model " in f.read_text()]


def cases() -> list[str]:
    """Every architecture, and beside it its variants."""
    return sorted([*modules(), *(name for name in CONFIGS if ":" in name)])


def build(case: str, seed: int = 0) -> nn.Module:
    """A tiny random float32 model."""
    name = case.partition(":")[0]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = COMMON | CONFIGS.get(case, {})
    if "text_config" in getattr(module.ModelArgs, "__dataclass_fields__", {}):
        # The keys of both levels: some read the sizes of the text model from the outside.
        text_type = {"text_config": {**config, "model_type": TEXT_TYPES.get(case, name)}}
        config = config | text_type if name not in FLAT else config
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps({**config, "model_type": name}))))
    if not mx.metal.is_available():
        model.apply_to_modules(_stand_in)
    model.update(tree_map_with_path(_random_like, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


# Case → what stands in for a Metal kernel of mlx-lm's where there is no Metal; caches and attention are its own.
STAND_INS = {"bitnet": "nn.Linear in the place of BitLinear, a Metal kernel"}


def _stand_in(path: str, module: nn.Module) -> None:
    for name, child in module.items():
        if isinstance(child, BitLinear):
            module[name] = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)


TEXT_TYPES = {
    "mistral3": "ministral3",
    "mistral3:plain": "llama",
    "pixtral": "llama",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4:shared": "gemma4_text",
}
FLAT = {"muse_glimmer", "deepseek_v41"}


def _random_like(name: str, parameter: mx.array) -> mx.array:
    """Weights so wide that greedy decoding does not fall into a rut, and recurrent gates near 1 as well as near 0."""
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    if name.endswith("A_log"):
        return mx.random.uniform(-4, 0.5, parameter.shape)
    if name.endswith("dt_bias"):
        return mx.random.normal(parameter.shape)
    if name.endswith("recurrent_param"):
        return mx.random.uniform(-6, 0, parameter.shape)
    if name.endswith("bias"):
        return 0.1 * mx.random.normal(parameter.shape)
    if parameter.ndim < 2:
        return 1 + 0.1 * mx.random.normal(parameter.shape)
    return mx.random.normal(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)


def quantize(model: nn.Module) -> bool:
    """Four bits, groups of 32, wherever the sizes allow it; says whether that was anywhere."""

    def fits(path: str, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        # A class of a model's own may not know all that mlx passes to `to_quantized` by now.
        known = hasattr(module, "to_quantized") and "mode" in signature(module.to_quantized).parameters
        return known and weight is not None and weight.shape[-1] % 32 == 0

    nn.quantize(model, group_size=32, bits=4, class_predicate=fits)
    return any(name.endswith("scales") for name, _ in tree_flatten(model.parameters()))


def plain_error(case: str) -> str | None:
    """Why mlx-lm itself cannot build or run an architecture here; None when it can."""
    try:
        model = build(case)
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache), [c.state for c in cache])
        mx.eval(model(mx.array([[6]]), cache=cache))
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return None


def run(case: str, seed: int = 0) -> dict[str, Any]:
    """One row of the table."""
    started = time.perf_counter()
    error = plain_error(case)
    row: dict[str, Any] = {"architecture": case, "mlx_lm_error": error}
    if not mx.metal.is_available():
        row["stand_in"] = STAND_INS.get(case)
    if error is None:
        row |= as_dict(check_model(build(case, seed), quantize=quantize, seed=seed))
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def markdown(rows: list[dict[str, Any]]) -> str:
    ran = [r for r in rows if r["mlx_lm_error"] is None]
    passed = {kind: sum(r[kind] == "pass" for r in ran) for kind in ("chain", "tree")}
    lines = [
        "# Conformance",
        "",
        "Every architecture module of mlx-lm, as a tiny random model, against plain decoding with mlx-lm itself.",
        "Made by `python tools/conformance.py --json docs/conformance.json --markdown docs/CONFORMANCE.md` with",
        f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, {platform.system()} {platform.machine()}, "
        f"{mx.default_device()}, float32.",
        "",
        "- chain: greedy tokens of the whole loop over scripted acceptance; logits of every row of every round, the",
        "  caches handed back, the next token after a fresh prefill; rewind; prefill in chunks; taps; 4-bit weights.",
        "- tree: logits of every node of random trees against its own path, and the caches after commit.",
        "",
        f"Of {len(ran)} cases that mlx-lm builds and runs here {passed['chain']} pass as chains and {passed['tree']} "
        "as trees.",
        "",
        "| architecture | caches | chain | tree | largest error | remark |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(r) for r in ran]
    lines += ["", "## Not run: mlx-lm itself fails here", "", "| architecture | mlx-lm's error |", "|---|---|"]
    lines += [f"| {r['architecture']} | {r['mlx_lm_error']} |" for r in rows if r["mlx_lm_error"] is not None]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    remarks = [row["refusal"] or row["tree_refusal"] or "", row.get("stand_in") or ""]
    remarks += [f"{c['name']}: {c['detail']}" for c in row["checks"] if c["detail"]]
    worst = max((c["error"] for c in row["checks"]), default=0.0)
    cells = [row["architecture"], ", ".join(row["caches"]), row["chain"], row["tree"], f"{worst:.0e}"]
    return f"| {' | '.join(cells)} | {'; '.join(r for r in remarks if r)} |"


def _progress(names: list[str]) -> Iterator[dict[str, Any]]:
    bar = tqdm(names)
    for name in bar:
        bar.set_description(name)
        row = run(name)
        if row["mlx_lm_error"] or "FAIL" in (row["chain"], row["tree"]) or row["refusal"]:
            reasons = [f"{c['name']}: {c['detail']}" for c in row.get("checks", []) if not c["passed"]]
            bar.write(f"{name}: {row['mlx_lm_error'] or row['refusal'] or '; '.join(reasons)}")
        yield row
        mx.clear_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this architecture, with its variants")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    options = parser.parse_args()
    names = [c for c in cases() if not options.only or {c, c.partition(":")[0]} & set(options.only)]
    rows = list(_progress(names))
    if options.json:
        head = json.dumps({"mlx_lm": version("mlx-lm"), "mlx": version("mlx")}).removesuffix("}")
        lines = ",\n".join(json.dumps(row) for row in rows)  # a line each, for readable differences
        options.json.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    ran = [r for r in rows if r["mlx_lm_error"] is None]
    for kind in ("chain", "tree"):
        counts = {v: sum(r[kind] == v for r in ran) for v in ("pass", "FAIL", "refused")}
        print(kind, counts, f"of {len(ran)}")


if __name__ == "__main__":
    main()
