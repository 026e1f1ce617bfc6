"""What commit costs in a round on a hybrid of gated-delta and attention layers with realistic head sizes.

    python tools/commit_share.py --width 16 --rounds 20

The target alone, without a draft, so that the share is of the cheapest round there is. Commit is evaluated by itself
here; in real decoding it is part of the next forward's graph. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import machine
from dflash_mlx.speculative.proposal import Proposal
from dflash_mlx.targets.target import Target

# The layers of Qwen3.5-4B (128 × 128 states, 16 key and 32 value heads), four of them, and a small vocabulary.
CONFIG = {
    "model_type": "qwen3_5",
    "hidden_size": 2560,
    "num_hidden_layers": 4,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_parameters": {"type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def measure(width: int, rounds: int, prompt_tokens: int, dtype: mx.Dtype) -> dict[str, float]:
    """Medians over rounds that accept every number of tokens in turn."""
    mx.random.seed(0)
    config = CONFIG | {"text_config": CONFIG}
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))
    mx.eval(model.parameters())
    target = Target(model, make_prompt_cache(model))
    for _ in target.prefill(mx.random.randint(0, 8192, (prompt_tokens,)), 256):
        pass
    verify_s, commit_s, build_s = [], [], []
    for number in range(rounds + 2):
        proposal = Proposal.chain(mx.random.randint(0, 8192, (1, width)))
        mx.eval(proposal.tokens)
        started = time.perf_counter()
        mx.eval(target.verify(proposal).logits)
        verified = time.perf_counter()
        target.commit(tuple(range(1 + number % width)))
        built = time.perf_counter()
        mx.eval(target.arrays())
        ended = time.perf_counter()
        target.seal()
        if number >= 2:  # the first rounds compile
            verify_s.append(verified - started)
            commit_s.append(ended - verified)
            build_s.append(built - verified)
    medians = {
        "verify_s": statistics.median(verify_s),
        "commit_s": statistics.median(commit_s),
        "commit_build_s": statistics.median(build_s),
    }
    return medians | {"commit_share": medians["commit_s"] / (medians["verify_s"] + medians["commit_s"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    result = measure(options.width, options.rounds, options.prompt_tokens, getattr(mx, options.dtype))
    facts = {"command": " ".join(sys.argv), "load_average": load, "config": CONFIG, "versions": machine.versions()}
    print(json.dumps(vars(options) | result | facts))


if __name__ == "__main__":
    main()
