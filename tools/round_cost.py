"""What a round costs the target: a chain against a tree of as many nodes, and what of it is the commit.

    python tools/round_cost.py --model hybrid --width 16 --rounds 20

The target alone, without a draft, so that the commit's share is of the cheapest round there is; chain and tree in turn.
Commit is evaluated by itself here; in real decoding it is part of the next forward's graph. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import load, machine
from dflash_mlx.cache import Block
from dflash_mlx.default_pair import default_target_path
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


def hybrid(dtype: mx.Dtype) -> nn.Module:
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(CONFIG | {"text_config": CONFIG}))
    model.update(tree_map(lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))
    mx.eval(model.parameters())
    return model


def bushy(size: int) -> Block:
    """A tree as a draft's confidences make it: a trunk and shorter branches."""
    rng = random.Random(0)
    parents = [-1]
    for node in range(1, size):
        parents.append(node - 1 if rng.random() < 0.5 else rng.randrange(max(0, node - 8), node))
    return Block(tuple(parents))


def measure(model: nn.Module, width: int, rounds: int, prompt_tokens: int) -> dict[str, dict[str, float]]:
    """Medians over rounds that accept every number of tokens in turn."""
    blocks = {"chain": Block.chain(width), "tree": bushy(width)}
    target = Target(model, make_prompt_cache(model))
    for _ in target.prefill(mx.random.randint(0, 8192, (prompt_tokens,)), 256):
        pass
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
    for number in range(rounds + 2):
        for name, block in blocks.items():
            proposal = Proposal(mx.random.randint(0, 8192, (1, width)), block)
            mx.eval(proposal.tokens)
            started = time.perf_counter()
            mx.eval(target.verify(proposal).logits)
            verified = time.perf_counter()
            target.commit(block.path_to(number % width))
            mx.eval(target.arrays())
            ended = time.perf_counter()
            target.seal()
            if number >= 2:  # the first rounds compile
                times[name].append((verified - started, ended - verified))
    return {name: _medians(rows) for name, rows in times.items()}


def _medians(rows: list[tuple[float, float]]) -> dict[str, float]:
    verify_s, commit_s = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"verify_s": verify_s, "commit_s": commit_s, "commit_share": commit_s / (verify_s + commit_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="hybrid", help="hybrid, default (the default pair's target), or a directory")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the hybrid")
    options = parser.parse_args()
    if options.model == "hybrid":
        model = hybrid(getattr(mx, options.dtype))
    else:
        model = load(str(default_target_path()) if options.model == "default" else options.model)[0]
    result = measure(model, options.width, options.rounds, options.prompt_tokens)
    chain, tree = (result[name]["verify_s"] + result[name]["commit_s"] for name in ("chain", "tree"))
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    facts = {"command": " ".join(sys.argv), "load_average": load_average, "versions": machine.versions()}
    print(json.dumps(vars(options) | result | {"tree_of_chain": tree / chain} | facts))


if __name__ == "__main__":
    main()
