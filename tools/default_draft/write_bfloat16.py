"""What `dflash-mlx train data` does, in torch, for CPUs with bfloat16 matrix units: about three times the speed there.

Shards are the same; beside each lie the target's features, so that `fit_bfloat16.py` need not make them again.
Run it again to go on where it was.

    python tools/default_draft/write_bfloat16.py --target DIRECTORY --out DIRECTORY --num-shards 8 --seed 2
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fit_bfloat16 import Target, features_file, mapped
from mlx_lm.utils import load_tokenizer
from torch import Tensor
from tqdm import tqdm

from dflash_mlx.train.data import replace, save, shard_name
from dflash_mlx.train.writer import Row, template

CAPTURED = [1, 8, 14, 21, 27]  # layers of the target that the default draft reads
TEMPERATURES = (0.0, 0.0, 0.0, 0.6)
LIMITS = (64, 224)  # tokens of a user turn and of an answer


class Cache:
    """Keys and values of rows that all have read as many tokens."""

    def __init__(self, target: Target, rows: int, length: int):
        shape = (rows, target.kv_heads, length, target.head_dim)
        self.keys, self.values = ([torch.zeros(shape, dtype=torch.bfloat16) for _ in range(target.depth)] for _ in "kv")
        self.length = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One token a row."""
        at, seen = slice(self.length, self.length + 1), slice(self.length + 1)
        self.keys[layer][:, :, at], self.values[layer][:, :, at] = k, v
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # the query heads of a key head are rows
        out = F.scaled_dot_product_attention(grouped, self.keys[layer][:, :, seen], self.values[layer][:, :, seen])
        return out.reshape(q.shape)


def choose(logits: Tensor, temperatures: Sequence[float | None]) -> np.ndarray:
    """The rows' next tokens: greedy at 0, sampled above, anything where the token is known."""
    chosen = logits.argmax(-1)
    warm = [i for i, heat in enumerate(temperatures) if heat]
    if warm:
        heat = torch.tensor([temperatures[i] for i in warm])[:, None]
        mass = logits[warm].float()
        mass = mass.sub_(mass.amax(-1, keepdim=True)).div_(heat).exp_().view(len(warm), -1, 256)
        # First the group of 256 tokens, then the token: torch's cumulative sum of a whole row is slow.
        rows, cumulative = torch.arange(len(warm)), mass.sum(-1).cumsum(-1)
        drawn = torch.rand(len(warm), 1) * cumulative[:, -1:]
        group = torch.searchsorted(cumulative, drawn).squeeze(1).clamp(max=mass.shape[1] - 1)
        inside = mass[rows, group].cumsum(-1)
        drawn += inside[:, -1:] - cumulative[rows, group][:, None]
        chosen[warm] = group * 256 + torch.searchsorted(inside, drawn).squeeze(1).clamp(max=255)
    return chosen.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--target", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--num-shards", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512, help="conversations of a shard, written together")
    parser.add_argument("--length", type=int, default=256, help="tokens of a conversation")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    target, tokenizer = Target(args.target, CAPTURED), load_tokenizer(args.target)
    parts, head = template(tokenizer), target.embedding.bfloat16()
    args.out.mkdir(parents=True, exist_ok=True)
    for index in range(args.num_shards):
        file = args.out / shard_name(index)
        if file.exists():
            continue
        rng = random.Random(f"{args.seed}-{index}")
        torch.manual_seed(rng.getrandbits(63))
        rows = [Row(tokenizer, parts, TEMPERATURES[i % 4], LIMITS, rng) for i in range(args.rows)]
        ids, role = np.zeros((args.rows, args.length), np.int32), np.zeros((args.rows, args.length), np.int8)
        features = mapped(features_file(args.out, file), *ids.shape, target)
        cache, chosen = Cache(target, args.rows, args.length), np.zeros(args.rows, np.int64)
        for position in tqdm(range(args.length), desc=f"shard {index}", unit=f" × {args.rows} tokens"):
            for i, row in enumerate(rows):
                ids[i, position], role[i, position] = row.take(int(chosen[i]))
            now = target(torch.from_numpy(ids[:, position : position + 1]).long(), cache.attend, position)
            features[:, position], cache.length = now[:, 0], position + 1
            last = now[:, 0, -target.config["hidden_size"] :]
            with torch.no_grad():
                chosen = choose(F.linear(last, head), [row.temperature for row in rows])
        replace(file, lambda scratch, ids=ids, role=role: save(scratch, ids, role))


if __name__ == "__main__":
    main()
