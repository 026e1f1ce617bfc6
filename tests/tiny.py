"""Tiny random models of mlx-lm's own classes."""

from __future__ import annotations

import importlib

import mlx.core as mx
from mlx.utils import tree_map_with_path

VOCAB = 97
HIDDEN = 32

LLAMA = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# mlx-lm architectures with full attention throughout, their own argument names.
FULL_ATTENTION: dict[str, dict] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 16},
    "qwen3_moe": LLAMA | MOE | {"head_dim": 16},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": LLAMA | {"rope_scaling": None},
    "olmo2": LLAMA | {"head_dim": 8},
    "gemma": LLAMA | {"head_dim": 16},
    "cohere": LLAMA | {"logit_scale": 0.5, "layer_norm_eps": 1e-5},
    "granite": LLAMA
    | {
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "starcoder2": LLAMA | {"norm_epsilon": 1e-5},
    "stablelm": LLAMA
    | {
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
    },
    "deepseek_v3": LLAMA
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def build(architecture: str, config: dict | None = None, *, dtype: mx.Dtype = mx.float32, seed: int = 0):
    """A random model of `architecture`; weights are wide enough that greedy decoding does not fall into a rut."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = FULL_ATTENTION[architecture] if config is None else config
    args = module.ModelArgs.from_dict({"model_type": architecture, **config})
    mx.random.seed(seed)
    model = module.Model(args)
    model.update(tree_map_with_path(lambda name, p: _random_like(name, p, dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random_like(name: str, parameter: mx.array, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    if name.endswith("bias"):
        return (0.1 * mx.random.normal(parameter.shape)).astype(dtype)
    if parameter.ndim < 2:
        return (1 + 0.1 * mx.random.normal(parameter.shape)).astype(dtype)
    return (mx.random.normal(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)).astype(dtype)
