"""The step of `dflash-mlx train fit` in torch, for CPUs with bfloat16 matrix units, which MLX does not use yet.

Same data, loss, optimizers and output; about eight times the speed on such a CPU. Run it again to go on where it was.

    python tools/default_draft/fit_bfloat16.py --draft dflash_mlx/data/default_draft --target DIRECTORY \
        --data tools/default_draft/data --held-out FILE.npz --out DIRECTORY --num-steps 3000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

ANSWER = 2
GAMMA = 3.0


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Rotary:
    def __init__(self, config: dict[str, Any], head_dim: int, length: int = 8192):
        frequency = config["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angle = torch.arange(length).float()[:, None] * frequency
        self.cos, self.sin = (f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


class Target:
    """A llama, frozen: captured hidden states, distributions over the training vocabulary, embeddings and head."""

    def __init__(self, directory: Path, captured: list[int], vocabulary: np.ndarray):
        self.config = json.loads((directory / "config.json").read_text())
        arrays = load_file(directory / "model.safetensors")
        self.embedding = arrays["model.embed_tokens.weight"].float()
        self.head = self.embedding[torch.from_numpy(vocabulary)].bfloat16()
        self.norm = arrays["model.norm.weight"].float()
        self.weights = {
            name.removeprefix("model."): array.float() if "norm" in name else array.bfloat16()
            for name, array in arrays.items()
            if "layers" in name
        }
        self.captured, self.depth = captured, self.config["num_hidden_layers"]
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.head_dim = self.config["hidden_size"] // self.heads
        self.rotary = Rotary(self.config, self.head_dim)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of ids [B, L]: captured [B, L, n × E] and logits [B, L, training vocabulary]."""
        x, kept, eps = self.embedding[ids], [], self.config["rms_norm_eps"]
        batch, length = ids.shape
        cos, sin = (part.bfloat16() for part in self.rotary.at(torch.arange(length)))
        for i in range(self.depth):
            w = {part: self.weights[f"layers.{i}.{part}.weight"] for part in PARTS}
            y = rms(x, w["input_layernorm"], eps).bfloat16()
            q, k, v = (
                F.linear(y, w[f"self_attn.{p}_proj"]).view(batch, length, -1, self.head_dim).transpose(1, 2)
                for p in "qkv"
            )
            groups = self.heads // self.kv_heads
            k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
            x = x + F.linear(out.transpose(1, 2).reshape(batch, length, -1), w["self_attn.o_proj"])
            y = rms(x, w["post_attention_layernorm"], eps).bfloat16()
            y = F.silu(F.linear(y, w["mlp.gate_proj"])) * F.linear(y, w["mlp.up_proj"])
            x = x + F.linear(y, w["mlp.down_proj"])
            if i in self.captured:
                kept.append(x)
        return torch.cat(kept, -1), F.linear(rms(x, self.norm, eps).bfloat16(), self.head)


PARTS = [
    "input_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


class Draft(torch.nn.Module):
    """A published DFlash 1 draft; its parameters are the file's, with dots as double underscores."""

    def __init__(self, directory: Path):
        super().__init__()
        self.config = json.loads((directory / "config.json").read_text())
        for name, array in load_file(directory / "model.safetensors").items():
            if name != "d2t":
                self.register_parameter(name.replace(".", "__"), torch.nn.Parameter(array.float()))
        self.rotary = Rotary(self.config, self.config["head_dim"])
        self.size = self.config["block_size"]

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "__") + "__weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x.bfloat16(), self.weight(name).bfloat16())

    def forward(self, inputs: Tensor, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Embedded blocks [B, A, S, E] after the context hidden [B, L, n × E] before anchors [B, A]: [B, A, S, E]."""
        config, eps = self.config, self.config["rms_norm_eps"]
        heads, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        batch, length = hidden.shape[:2]
        num = anchors.shape[1]
        context = rms(self.linear(hidden, "fc"), self.weight("hidden_norm"), eps)
        before = self.rotary.at(torch.arange(length))
        within = self.rotary.at((anchors[..., None] + torch.arange(self.size)).reshape(batch, 1, -1))
        unseen = torch.arange(length) >= anchors[..., None]  # [B, A, L]
        unseen = unseen[:, None, None, :, None]
        x = inputs
        for i in range(config["num_hidden_layers"]):
            attention = f"layers.{i}.self_attn."

            def split(y: Tensor, part: str, at: tuple[Tensor, Tensor] | None, attention: str = attention) -> Tensor:
                """[B, rows, E] to heads [B, H, rows, D], normed and rotated for q and k."""
                y = self.linear(y, attention + part + "_proj").view(batch, y.shape[1], -1, size)
                if at is None:
                    return y.transpose(1, 2)
                return rotate(rms(y, self.weight(attention + part + "_norm"), eps).transpose(1, 2), *at).bfloat16()

            y = rms(x, self.weight(f"layers.{i}.input_layernorm"), eps).reshape(batch, num * self.size, -1)
            q = split(y, "q", within).view(batch, groups, heads // groups, num, self.size, size)
            keys, values = split(context, "k", before), split(context, "v", None)
            own_keys = split(y, "k", within).view(batch, groups, 1, num, self.size, size)
            own_values = split(y, "v", None).reshape(batch, groups, 1, num, self.size, size)
            seen = (q.reshape(batch, groups, -1, size) @ keys.transpose(-1, -2)).view(*q.shape[:-1], length)
            seen = seen.masked_fill(unseen, -math.inf)
            scores = torch.cat([seen, q @ own_keys.transpose(-1, -2)], -1) * size**-0.5
            probs = scores.softmax(-1)
            out = (probs[..., :length].reshape(batch, groups, -1, length) @ values).view(q.shape)
            out = out + probs[..., length:] @ own_values
            out = out.reshape(batch, heads, num * self.size, size).transpose(1, 2).reshape(batch, num, self.size, -1)
            x = x + self.linear(out, attention + "o_proj")
            y = rms(x, self.weight(f"layers.{i}.post_attention_layernorm"), eps)
            y = F.silu(self.linear(y, f"layers.{i}.mlp.gate_proj")) * self.linear(y, f"layers.{i}.mlp.up_proj")
            x = x + self.linear(y, f"layers.{i}.mlp.down_proj")
        return rms(x, self.weight("norm"), eps)


class Muon:
    """mlx's Muon: momentum 0.95 with Nesterov, five Newton-Schulz steps."""

    def __init__(self, parameters: list[Tensor]):
        self.parameters = parameters
        self.momenta = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 0.05)
            update = parameter.grad.lerp(momentum, 0.95)
            rows, columns = update.shape
            x = update.T if rows > columns else update
            x = (x / (x.norm() + 1e-7)).bfloat16()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
            x = x.T if rows > columns else x
            parameter.add_(x.float(), alpha=-rate * max(1, rows / columns) ** 0.5)


def batch_of(ids: np.ndarray, role: np.ndarray, vocabulary: np.ndarray, num: int, rng: Any) -> tuple[Tensor, ...]:
    """Anchors [B, A], labels and weights [B, A, 7] as dflash_mlx.train.fit draws them."""
    size = 8
    follows = np.zeros(role.shape, bool)
    follows[:, 1:-1] = role[:, 2:] == ANSWER
    draws = np.where(follows, rng.random(role.shape), -1.0)
    anchors = np.maximum(np.sort(np.argsort(-draws, axis=1)[:, :num], axis=1), 1)
    drawn = np.take_along_axis(follows, anchors, axis=1)[..., None]
    at = anchors[..., None] + np.arange(1, size)
    inside = np.minimum(at, ids.shape[1] - 1)
    every = np.arange(len(ids))[:, None, None]
    tokens, answered = ids[every, inside], (role[every, inside] == ANSWER) & (at < ids.shape[1])
    whole = np.logical_and.accumulate(answered, axis=-1) & drawn
    labels = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
    known = (vocabulary[labels] == tokens) & whole
    weights = known * np.exp(-np.arange(size - 1) / GAMMA)
    return tuple(map(torch.from_numpy, (anchors, labels, weights.astype(np.float32), tokens, whole)))


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        raw = json.loads((args.draft / "config.json").read_text())
        self.ids, self.role = read(args.data)
        self.held_ids, self.held_role = (a[: args.num_held_out] for a in read([args.held_out]))
        held = {row.tobytes() for row in self.held_ids}
        kept = [i for i, row in enumerate(self.ids) if row.tobytes() not in held]
        self.ids, self.role = self.ids[kept], self.role[kept]
        tokens, counts = np.unique(self.ids[self.role == ANSWER], return_counts=True)
        self.vocabulary = np.sort(tokens[np.argsort(-counts, kind="stable")[: args.vocabulary]]).astype(np.int64)
        self.target = Target(args.target, raw["dflash_config"]["target_layer_ids"], self.vocabulary)
        self.draft = Draft(args.draft)
        self.mask = raw["dflash_config"]["mask_token_id"]
        hidden, _ = self.target(torch.from_numpy(self.ids[:2]))
        self.scale = hidden.pow(2).mean((0, 1)).sqrt() + 1e-4
        with torch.no_grad():
            self.draft.weight("fc").mul_(self.scale)
        named = list(self.draft.named_parameters())
        self.muon = Muon([p for _, p in named if p.ndim == 2])
        self.adam = torch.optim.AdamW([p for _, p in named if p.ndim != 2], weight_decay=0.0)
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, Any]] = []

    def blocks(self, ids: Tensor, anchors: Tensor) -> Tensor:
        blocks = torch.full((*anchors.shape, self.draft.size), self.mask)
        blocks[..., 0] = ids.gather(1, anchors)
        return self.target.embedding[blocks]

    def hidden(self, ids: Tensor, anchors: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [.., V] of the used slots of 1.. (a mask [B, A, 7]), and the target's of the same tokens."""
        captured, logits = self.target(ids)
        out = self.draft(self.blocks(ids, anchors), captured / self.scale, anchors)[:, :, 1:]
        before = (anchors[..., None] + torch.arange(self.draft.size - 1)).clamp(max=ids.shape[1] - 1)
        rows = torch.arange(len(ids))[:, None, None].expand_as(before)
        return F.linear(out[used].bfloat16(), self.target.head), logits[rows[used], before[used]]

    def train(self) -> float:
        args, rng = self.args, np.random.default_rng((0, 2, self.step))
        per_epoch = len(self.ids) // args.batch_size
        order = np.random.default_rng((0, 1, self.step // per_epoch)).permutation(len(self.ids))
        rows = order[self.step % per_epoch * args.batch_size :][: args.batch_size]
        anchors, labels, weights, *_ = batch_of(self.ids[rows], self.role[rows], self.vocabulary, args.num_anchors, rng)
        # Late slots weigh little and cost as much: a share of them, weighted up, has the same mean.
        drawn = torch.from_numpy(rng.random(weights.shape) < args.late_share)
        weights[..., 4:] *= drawn[..., 4:] / args.late_share
        logits, taught = self.hidden(torch.from_numpy(self.ids[rows]), anchors, weights > 0)
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        loss = F.nll_loss(logprobs, labels[weights > 0], reduction="none")
        if args.distillation:
            soft = -(taught.softmax(-1, dtype=torch.float32) * logprobs).sum(-1)
            loss = (1 - args.distillation) * loss + args.distillation * soft
        loss = (loss * weights[weights > 0]).sum() / weights.sum()
        self.draft.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        share = self.rate()
        self.muon.step(args.muon_rate * share)
        self.adam.param_groups[0]["lr"] = args.adamw_rate * share
        self.adam.step()
        self.step += 1
        return loss.item()

    def rate(self) -> float:
        """Share of the peak rate: warm-up, flat, then a cosine to 0 in the last `cooldown` of the run."""
        args, warmup = self.args, 20
        flat = max(warmup, round(args.num_steps * (1 - args.cooldown)))
        if self.step < flat:
            return min(1.0, (self.step + 1) / warmup)
        return 0.5 * (1 + math.cos(math.pi * (self.step - flat) / max(1, args.num_steps - flat)))

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """On held-out rows, greedy answers (even rows) and sampled ones apart."""
        found: dict[str, Any] = {}
        for kind, first in (("greedy", 0), ("sampled", 1)):
            hits = []
            for row in range(first, len(self.held_ids), 2):
                ids, role = self.held_ids[row : row + 1], self.held_role[row : row + 1]
                anchors, _, _, tokens, whole = batch_of(ids, role, self.vocabulary, 48, np.random.default_rng((0, row)))
                logits, _ = self.hidden(torch.from_numpy(ids), anchors, torch.ones_like(whole))
                right = torch.from_numpy(self.vocabulary)[logits.argmax(-1)].view_as(tokens) == tokens
                hits.append((right & whole)[whole[..., 0]])
            prefix = torch.cat(hits).long().cumprod(-1).float()
            found[kind] = round(1 + prefix.sum(-1).mean().item(), 4)
            found[kind + "_first"] = round(prefix[:, 0].mean().item(), 4)
        return found

    def save(self, loss: float) -> None:
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        self.curve.append({"step": self.step, "seconds": round(self.seconds), "loss": loss, **self.evaluate()})
        print(json.dumps(self.curve[-1]), flush=True)
        state = {"draft": self.draft.state_dict(), "muon": self.muon.momenta, "adam": self.adam.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds, "curve": self.curve, "scale": self.scale}
        torch.save(state, out / "writing.pt")
        os.replace(out / "writing.pt", out / "trainer.pt")
        (out / "curve.json").write_text(json.dumps(self.curve, indent=1) + "\n")
        weights = {name.replace("__", "."): p.detach().clone() for name, p in self.draft.named_parameters()}
        weights["fc.weight"] /= self.scale
        weights = {name: w.bfloat16() for name, w in weights.items()}
        # Logits for the tokens trained on alone, as `dflash-mlx train fit --prune-head` exports.
        weights["d2t"] = torch.from_numpy(self.vocabulary - np.arange(len(self.vocabulary))).int()
        config = self.draft.config | {"draft_vocab_size": len(self.vocabulary)}
        (out / "draft").mkdir(exist_ok=True)
        save_file(weights, out / "draft" / ".writing", {"format": "mlx"})
        os.replace(out / "draft" / ".writing", out / "draft" / "model.safetensors")
        for name, content in (("config.json", config), ("provenance.json", self.provenance())):
            (out / "draft" / name).write_text(json.dumps(content, indent=1) + "\n")

    def provenance(self) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files_of(self.args.data))).hexdigest()
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
        return {
            # Names alone: the file is published, and directories are this machine's.
            "command": " ".join(word.rstrip("/").rpartition("/")[2] for word in sys.argv),
            "commit": git.stdout.strip() or None,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "data_sha256": digest,
            "conversations": len(self.ids),
            "held_out": self.curve[-1],
        }

    def resume(self) -> bool:
        file = self.args.out / "trainer.pt"
        if not file.exists():
            return False
        state = torch.load(file)
        self.draft.load_state_dict(state["draft"])
        for mine, saved in zip(self.muon.momenta, state["muon"], strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self.scale = state["scale"]
        return True


def files_of(paths: list[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]


def read(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [np.load(file) for file in files_of(paths)]
    return np.concatenate([a["ids"] for a in arrays]).astype(np.int64), np.concatenate([a["role"] for a in arrays])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--draft", "--target", "--held-out", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--num-held-out", type=int, default=64, help="rows of --held-out, never trained on")
    parser.add_argument("--num-steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--num-anchors", type=int, default=112)
    parser.add_argument("--muon-rate", type=float, default=2e-3)
    parser.add_argument("--adamw-rate", type=float, default=5e-4)
    parser.add_argument("--cooldown", type=float, default=0.5)
    parser.add_argument("--distillation", type=float, default=0.5)
    parser.add_argument("--late-share", type=float, default=0.25, help="of slots 5.. that a step looks at")
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--minutes-between", type=float, default=4.0, help="between checkpoints")
    parser.add_argument("--profile", type=int, default=0, help="steps to time, and nothing else")
    args = parser.parse_args()
    run = Run(args)
    print(f"{len(run.ids)} conversations", flush=True)
    if args.profile:
        for _ in range(args.profile):
            begin = time.perf_counter()
            print(round(run.train(), 3), round(time.perf_counter() - begin, 2), "s", flush=True)
        return
    if not run.resume():
        run.save(math.nan)
    losses: list[float] = []
    saved = time.perf_counter()
    while run.step < args.num_steps:
        begin = time.perf_counter()
        losses.append(run.train())
        run.seconds += time.perf_counter() - begin
        if run.step == args.num_steps or time.perf_counter() - saved > 60 * args.minutes_between:
            run.save(round(float(np.mean(losses)), 4))
            losses, saved = [], time.perf_counter()


if __name__ == "__main__":
    main()
