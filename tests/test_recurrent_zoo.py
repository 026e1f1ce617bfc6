"""Whole models with recurrent layers: rounds of any width and any accepted path equal plain decoding."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, load_prompt_cache, make_prompt_cache, save_prompt_cache
from tiny import LLAMA, MOE, VOCAB, build

from dflash_mlx.cache import Block, carry
from dflash_mlx.targets.instrument import rope_swaps, swapped
from dflash_mlx.targets.recurrent import recurrent_swaps

BASE = LLAMA | {"num_hidden_layers": 4, "head_dim": 8, "norm_eps": 1e-6, "layer_norm_epsilon": 1e-6}
GATED_DELTA = BASE | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "attention_bias": False,
}
QWEN3_5 = GATED_DELTA | {
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
KIMI = BASE | {
    "num_key_value_heads": 4,
    "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3]},
    "model_max_length": 4096,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
KIMI_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
BAILING = BASE | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": True,
}
MAMBA2 = BASE | {
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": (0.0, float("inf")),
    "time_step_rank": "auto",
}
CONV = BASE | {
    "conv_bias": True,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_dim": 32,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
WINDOW = 24  # passed by the rounds below

CONFIGS: dict[str, dict] = {
    "qwen3_next": GATED_DELTA | MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5 | MOE | {"shared_expert_intermediate_size": 24},
    "olmo_hybrid": GATED_DELTA
    | {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": KIMI | KIMI_LATENT,
    "kimi_k3": KIMI
    | LATENT
    | {
        "activation_situ_beta": 1.0,
        "attn_res_block_size": 2,
        "linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0},
    },
    "bailing_moe_v3": BAILING | LATENT,
    "mamba2": MAMBA2,
    "granitemoehybrid": BASE
    | {
        "attention_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "nemotron_h": BASE
    | {
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "*", "M", "-"],
    },
    "falcon_h1": BASE
    | {
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
        "mamba_rms_norm": True,
        "num_hidden_layers": 2,
    },
    "plamo2": BASE
    | {"hidden_size_per_head": 8, "mamba_d_state": 16, "mamba_num_heads": 8, "tie_word_embeddings": True},
    "mamba": BASE
    | {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "use_bcdt_rms": True,
    },
    "jamba": BASE
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bailing_moe_linear": BAILING | {"n_group": 1, "head_dim": None},
    "bailing_hybrid": BAILING | LATENT,
    "recurrent_gemma": BASE
    | {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": BASE
    | {
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "num_hidden_layers": 2,
    },
    "lfm2": CONV,
    "lfm2_moe": CONV | MOE | {"use_expert_bias": True, "num_dense_layers": 1},
    "gear": BASE
    | {
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        "sliding_window": WINDOW,
        "conv_L_cache": 3,
    },
    "baichuan_m1": BASE | {"sliding_window": WINDOW, "sliding_window_layers": [1, 3], "conv_window": 2},
    "longcat_flash_ngram": BASE
    | LATENT
    | {
        "ffn_hidden_size": 48,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 1,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 4,
        "emb_split_num": 2,
    },
}

# Mixtures of experts run on the CPU in float32 only: what makes a model dense, for bfloat16.
DENSE: dict[str, dict] = {
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5": {},
    "olmo_hybrid": {},
    "kimi_linear": {"num_experts": 0},
    "kimi_k3": {"num_experts": None},
    "bailing_moe_v3": {"first_k_dense_replace": 4},
    "mamba2": {},
    "granitemoehybrid": {},
    "nemotron_h": {},
    "falcon_h1": {},
    "plamo2": {},
    "mamba": {},
    "jamba": {"num_experts": 1},
    "bailing_moe_linear": {"first_k_dense_replace": 4},
    "bailing_hybrid": {"first_k_dense_replace": 4},
    "recurrent_gemma": {},
    "rwkv7": {},
    "lfm2": {},
    "lfm2_moe": {"num_dense_layers": 4},
    "gear": {},
    "baichuan_m1": {},
}


def model_of(architecture: str, dtype: mx.Dtype = mx.float32):
    """A tiny random model whose recurrent layers remember: gates near 1 as well as near 0."""
    config = CONFIGS[architecture] | (DENSE[architecture] if dtype == mx.bfloat16 else {})
    model = build(architecture, config, dtype=dtype)
    changed = []
    for name, weight in tree_flatten(model.parameters()):
        if name.endswith("A_log"):
            changed.append((name, mx.random.uniform(-4, 0.5, weight.shape).astype(weight.dtype)))
        elif name.endswith("dt_bias"):
            changed.append((name, mx.random.normal(weight.shape).astype(weight.dtype)))
        elif name.endswith("recurrent_param"):
            changed.append((name, mx.random.uniform(-6, 0, weight.shape).astype(weight.dtype)))
    model.load_weights(changed, strict=False)
    mx.eval(model.parameters())
    return model


def over_blocks(model):
    """Every recurrent layer and rope wears its subclass."""
    return swapped([*recurrent_swaps(model), *rope_swaps(model)])


class Rounds:
    """A generation of a target in rounds, over the caches of a prefilled prompt."""

    def __init__(self, model, prompt):
        self.model = model
        self.plain = make_prompt_cache(model)
        self.tokens = list(prompt)
        if len(prompt) > 1:
            model(mx.array([prompt[:-1]]), cache=self.plain)
            mx.eval([c.state for c in self.plain])
        self.caches = [carry(c) for c in self.plain]

    def verify(self, drafted):
        """Logits [1 + len(drafted), V] of the anchor and a chain of drafted tokens."""
        rows = [self.tokens[-1], *drafted]
        for cache in self.caches:
            cache.open(Block.chain(len(rows)))
        with over_blocks(self.model):
            return self.model(mx.array([rows]), cache=self.caches)[0]

    def commit(self, drafted, accepted, bonus):
        for cache in self.caches:
            cache.commit(tuple(range(accepted + 1)))
        self.tokens += [*drafted[:accepted], bonus]

    def release(self):
        return [c.release() for c in self.caches]


def stepwise(model, tokens, first):
    """Plain decoding, one token a forward: logits behind tokens[first:], [n, V], and the caches."""
    cache = make_prompt_cache(model)
    if first:
        model(mx.array([tokens[:first]]), cache=cache)
    logits = []
    for token in tokens[first:]:
        logits.append(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(logits[-1], [c.state for c in cache])
    return mx.stack(logits), cache


def relative(a, b):
    """Largest difference, relative to the largest entry."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float((mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30)).item())


def recurrent_states(caches):
    flat = [c for cache in caches for c in (cache.caches if isinstance(cache, CacheList) else [cache])]
    return [state for c in flat if isinstance(c, ArraysCache) for state in c.cache]


PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]
# float32: sums over up to 16 rows in another order, through four layers whose norms amplify.
FLOAT32 = 2e-5
# The state of one layer is within 1e-6 (test_recurrent_trees); here its inputs come from layers that differ already.
STATE = 5e-6


@pytest.mark.parametrize("architecture", CONFIGS)
def test_rounds_equal_plain_decoding(architecture):
    rng = random.Random(architecture)
    model = model_of(architecture)
    # First draft token rejected; 8 rows, one row, 8 rows; all accepted; then at random.
    script = [(8, 0), (1, 0), (8, 3), (1, 0), (2, 1), (16, 15)] + [
        (w := rng.choice([1, 2, 3, 5, 8]), rng.randrange(w)) for _ in range(4)
    ]
    rounds = Rounds(model, PROMPT)
    expected_classes = [type(m) for m in model.modules()]
    checked = []
    for width, accepted in script:
        drafted = [rng.randrange(VOCAB) for _ in range(width - 1)]
        start = len(rounds.tokens) - 1
        logits = rounds.verify(drafted)
        checked.append((start, accepted + 1, logits))
        rounds.commit(drafted, accepted, rng.randrange(VOCAB))
    plain_logits, plain_cache = stepwise(model, rounds.tokens[:-1], len(PROMPT) - 1)
    for start, rows, logits in checked:
        assert relative(logits[:rows], plain_logits[start - len(PROMPT) + 1 :][:rows]) < FLOAT32
    ours = recurrent_states(rounds.release())
    for mine, theirs in zip(ours, recurrent_states(plain_cache), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert relative(mine, theirs) < STATE
    assert [type(m) for m in model.modules()] == expected_classes


@pytest.mark.parametrize("architecture", DENSE)
def test_bfloat16_stays_as_close_as_blocks_of_the_model_itself(architecture):
    rng = random.Random(architecture)
    model = model_of(architecture, mx.bfloat16)
    rounds = Rounds(model, PROMPT)
    logits = []
    for width, accepted in [(8, 3), (1, 0), (8, 7), (4, 0)]:
        drafted = [rng.randrange(VOCAB) for _ in range(width - 1)]
        logits.append(rounds.verify(drafted)[: accepted + 1])
        rounds.commit(drafted, accepted, rng.randrange(VOCAB))
    plain_logits, plain_cache = stepwise(model, rounds.tokens[:-1], len(PROMPT) - 1)
    whole = make_prompt_cache(model)
    model(mx.array([PROMPT[:-1]]), cache=whole)
    block_logits = model(mx.array([rounds.tokens[len(PROMPT) - 1 : -1]]), cache=whole)[0]
    # Where plain blocks and plain steps agree to the bit, so do we; else both are off by roundings of bfloat16.
    plain_error = relative(block_logits, plain_logits)
    assert relative(mx.concatenate(logits), plain_logits) <= 4 * plain_error
    for mine, theirs in zip(recurrent_states(rounds.release()), recurrent_states(plain_cache), strict=True):
        assert mine.dtype == theirs.dtype
        assert relative(mine, theirs) <= max(1e-6, 4 * plain_error)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_plain_decoding_goes_on_after_release_and_from_a_file(architecture, tmp_path):
    model = model_of(architecture)
    rounds = Rounds(model, PROMPT)
    objects = list(rounds.plain)
    drafted = [4, 80, 33, 6]
    mx.eval(rounds.verify(drafted))
    rounds.commit(drafted, 2, 17)
    handed_back = rounds.release()
    assert all(a is b for a, b in zip(handed_back, objects, strict=True) if isinstance(b, ArraysCache))
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, handed_back)
    plain_logits, _ = stepwise(model, [*PROMPT, 4, 80, 17], len(PROMPT) + 2)
    for cache in (handed_back, load_prompt_cache(file)):
        assert relative(model(mx.array([[17]]), cache=cache)[0], plain_logits) < FLOAT32
