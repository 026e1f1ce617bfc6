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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

ANSWER = 2
EARLY = 3  # slots that every block has


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
    """A llama, frozen; its features are the captured hidden states and what its head reads."""

    def __init__(self, directory: Path, captured: list[int]):
        self.config = json.loads((directory / "config.json").read_text())
        arrays = load_file(directory / "model.safetensors")
        self.embedding = arrays["model.embed_tokens.weight"].float()
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
    def __call__(self, ids: Tensor, attend: Attend | None = None, position: int = 0) -> Tensor:
        """Features [B, L, (n + 1) × E] of ids [B, L] from `position` on, in bfloat16.

        attend: of a layer's number, queries, keys and values, [B, H, L, D] each; causal where left out.
        """
        x, kept, eps = self.embedding[ids], [], self.config["rms_norm_eps"]
        batch, length = ids.shape
        cos, sin = (part.bfloat16() for part in self.rotary.at(position + torch.arange(length)))
        for i in range(self.depth):
            w = {part: self.weights[f"layers.{i}.{part}.weight"] for part in PARTS}
            y = rms(x, w["input_layernorm"], eps).bfloat16()
            q, k, v = (
                F.linear(y, w[f"self_attn.{p}_proj"]).view(batch, length, -1, self.head_dim).transpose(1, 2)
                for p in "qkv"
            )
            out = (attend or causal)(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(out.transpose(1, 2).reshape(batch, length, -1), w["self_attn.o_proj"])
            y = rms(x, w["post_attention_layernorm"], eps).bfloat16()
            y = F.silu(F.linear(y, w["mlp.gate_proj"])) * F.linear(y, w["mlp.up_proj"])
            x = x + F.linear(y, w["mlp.down_proj"])
            if i in self.captured:
                kept.append(x.bfloat16())
        return torch.cat([*kept, rms(x, self.norm, eps).bfloat16()], -1)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), is_causal=True
    )


PARTS = [
    "input_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
]


def features_file(directory: Path, data: Path) -> Path:
    return directory / (data.stem + "-features.bin")


def mapped(file: Path, rows: int, length: int, target: Target) -> Tensor:
    """Features [rows, length, (n + 1) × E] in a file, made where it is not there."""
    width = (len(target.captured) + 1) * target.config["hidden_size"]
    return torch.from_file(str(file), True, rows * length * width, dtype=torch.bfloat16).view(rows, length, width)


class Conversations:
    """Those of one file; features lie beside it where its writer kept them, else they are made in `directory`."""

    def __init__(self, file: Path, directory: Path, target: Target):
        arrays = np.load(file)
        self.ids, self.role = arrays["ids"].astype(np.int64), arrays["role"]
        self.kept = np.arange(len(self.ids))
        known = features_file(file.parent, file)
        made = known if known.exists() else features_file(directory, file)
        if not made.exists():
            directory.mkdir(parents=True, exist_ok=True)
            scratch = made.with_name(".writing-" + made.name)
            features = mapped(scratch, *self.ids.shape, target)
            for first in range(0, len(self.ids), 8):
                print(f"features of {file.name}: {first} of {len(self.ids)}", end="\r", flush=True)
                features[first : first + 8] = target(torch.from_numpy(self.ids[first : first + 8]))
            os.replace(scratch, made)
        self.features = mapped(made, *self.ids.shape, target)


class Attention(torch.autograd.Function):
    """Blocks of rows over the context and over themselves, without the scores of one block over another.

    queries, own_keys, own_values [B, H, G, A, S, D]: H key heads of G query heads each. keys, values [B, H, L, D].
    mask [B, A, L], added to the context's scores. The context's part is torch's flash attention; as its backward needs
    no more than the output and its log-sum over all keys, the two parts are joined by theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, mask: Tensor
    ) -> Tensor:
        batch, heads, groups, _, size, dim = queries.shape
        flat = queries.reshape(batch, heads, -1, dim)
        mask = mask[:, None, :, None].expand(-1, groups, -1, size, -1).reshape(batch, 1, flat.shape[2], -1)
        seen, seen_sum = FLASH(flat, keys, values, 0.0, False, attn_mask=mask, scale=dim**-0.5)
        seen, seen_sum = seen.view(queries.shape), seen_sum.view(*queries.shape[:-1], 1)
        scores = (queries @ own_keys.transpose(-1, -2)).float() * dim**-0.5
        total = torch.logaddexp(seen_sum, scores.logsumexp(-1, keepdim=True))
        probs = (scores - total).exp().bfloat16()
        out = (seen * (seen_sum - total).exp()).bfloat16() + probs @ own_values
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, mask, probs, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        queries, keys, values, own_keys, own_values, mask, probs, out, total = ctx.saved_tensors
        flat = (queries.shape[0], queries.shape[1], -1, queries.shape[-1])
        scale = queries.shape[-1] ** -0.5
        grad = grad.contiguous()
        grad_queries, grad_keys, grad_values = FLASH_BACKWARD(
            grad.view(flat),
            queries.reshape(flat),
            keys,
            values,
            out.view(flat),
            total.view(*flat[:2], -1),
            0.0,
            False,
            attn_mask=mask,
            scale=scale,
        )
        spread = grad @ own_values.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True, dtype=torch.float32)
        grad_scores = (probs * spread * scale).bfloat16()
        own = grad_scores.transpose(-1, -2) @ queries, probs.transpose(-1, -2) @ grad
        grad_queries = grad_queries.view(queries.shape) + grad_scores @ own_keys
        return grad_queries, grad_keys, grad_values, own[0].sum(2, keepdim=True), own[1].sum(2, keepdim=True), None


torch._dynamo.config.recompile_limit = 64  # of shapes: the trainer's, the evaluation's, with gradients and without

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Distance(torch.autograd.Function):
    """Weighted sum of the rows' cross-entropies, one share with the labels, the other with the target's distribution;
    and which rows' first choice is the label [U].

    hidden [U, E] of the draft, code [U, R] of its Domino head and taught [U, E] of the target, before head [V, E] and
    widen [V, R]. Gradients are made on the way forward, piece by piece, so that no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        code: Tensor,
        widen: Tensor,
        taught: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        loss, grads, grad_widen, hits = torch.zeros(()), [], torch.zeros_like(widen), []
        reads, whole = torch.cat([hidden, code], -1), torch.cat([head, widen.bfloat16()], -1)
        for part in torch.arange(len(hidden)).split(512):
            logits = reads[part] @ whole.T
            grad, found = distance(logits, taught[part] @ head.T, labels[part], weights[part], share)
            loss += found
            hits.append(logits.argmax(-1) == labels[part])
            grads.append(grad @ whole)
            grad_widen += grad.T @ code[part]
        ctx.save_for_backward(*torch.cat(grads).split([hidden.shape[1], code.shape[1]], -1), grad_widen)
        found_hits = torch.cat(hits)
        ctx.mark_non_differentiable(found_hits)
        return loss, found_hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (*(saved * grad.to(saved.dtype) for saved in ctx.saved_tensors), None, None, None, None, None)


@torch.compile(dynamic=True)
def distance(logits: Tensor, goal: Tensor, labels: Tensor, weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Gradient [U, V] of the weighted sum, and the sum."""
    taught, logprobs = goal.float().softmax(-1), logits.float().log_softmax(-1)
    hit = torch.arange(logits.shape[-1]) == labels[:, None]
    wanted = torch.where(hit, 1 - share, 0.0) + share * taught
    loss = -(wanted * logprobs).sum(-1) * weights
    return ((logprobs.exp() - wanted) * weights[:, None]).bfloat16(), loss.sum()


@torch.compile(dynamic=True)
def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(x, weight, eps).bfloat16()


@torch.compile(dynamic=True)
def turned(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, rows, H, D] normed and rotated by their positions [B or 1, rows, 1, D], to [B, H, rows, D]."""
    return rotate(rms(x, weight, eps), cos, sin).bfloat16().transpose(1, 2).contiguous()


@torch.compile(dynamic=True)
def gated(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).bfloat16()


class Draft(torch.nn.Module):
    """A published DFlash 1 draft; its parameters are the file's, with dots as double underscores."""

    def __init__(self, directory: Path):
        super().__init__()
        self.config = json.loads((directory / "config.json").read_text())
        self.published_vocabulary: np.ndarray | None = None
        for name, array in load_file(directory / "model.safetensors").items():
            if name == "d2t":
                self.published_vocabulary = array.numpy().astype(np.int64) + np.arange(len(array))
            else:
                self.register_parameter(name.replace(".", "__"), torch.nn.Parameter(array.float()))
        self.rotary = Rotary(self.config, self.config["head_dim"])
        self.size, self.eps = self.config["block_size"], self.config["rms_norm_eps"]

    def weight(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "__") + "__weight")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(name).bfloat16())

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[B, rows, E] to [B, rows, H, D]."""
        return self.linear(x, name).view(*x.shape[:2], -1, self.config["head_dim"])

    def turned(self, x: Tensor, layer: str, part: str, at: tuple[Tensor, Tensor]) -> Tensor:
        norm = self.weight(f"{layer}self_attn.{part}_norm")
        return turned(self.heads(x, f"{layer}self_attn.{part}_proj"), norm, self.eps, *at)

    def layers(self) -> list[str]:
        return [f"layers.{i}." for i in range(self.config["num_hidden_layers"])]

    def context(self, captured: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [B, H, L, D] of each layer from captured [B, L, n × E], whose coordinates have this scale."""
        x = F.linear(captured, (self.weight("fc") / scale).bfloat16())
        x = normed(x, self.weight("hidden_norm"), self.eps)
        at = tuple(part[None, :, None] for part in self.rotary.at(torch.arange(x.shape[1])))
        return [
            (self.turned(x, layer, "k", at), self.heads(x, layer + "self_attn.v_proj").transpose(1, 2).contiguous())
            for layer in self.layers()
        ]

    def forward(self, inputs: Tensor, context: list[tuple[Tensor, Tensor]], anchors: Tensor) -> Tensor:
        """Embedded blocks [B, A, S, E] after the context before anchors [B, A]: normed hidden [B, A, S, E]."""
        batch, num, size = inputs.shape[:3]
        kv_heads, dim = self.config["num_key_value_heads"], self.config["head_dim"]
        at = tuple(part[:, :, None] for part in self.rotary.at((anchors[..., None] + torch.arange(size)).flatten(1)))
        columns = torch.arange(context[0][0].shape[2])
        mask = torch.where(columns < anchors[..., None], 0.0, -1e9).bfloat16()
        x = inputs.flatten(1, 2)
        for layer, (keys, values) in zip(self.layers(), context, strict=True):
            y = normed(x, self.weight(layer + "input_layernorm"), self.eps)
            blocks = (batch, kv_heads, -1, num, size, dim)
            q, k = (self.turned(y, layer, part, at).view(blocks) for part in "qk")
            v = self.heads(y, layer + "self_attn.v_proj").transpose(1, 2).reshape(blocks)
            out = Attention.apply(q, keys, values, k, v, mask)
            x = x + self.linear(
                out.flatten(1, 2).permute(0, 2, 3, 1, 4).reshape(batch, num * size, -1), layer + "self_attn.o_proj"
            )
            y = normed(x, self.weight(layer + "post_attention_layernorm"), self.eps)
            y = gated(self.linear(y, layer + "mlp.gate_proj"), self.linear(y, layer + "mlp.up_proj"))
            x = x + self.linear(y, layer + "mlp.down_proj")
        return normed(x, self.weight("norm"), self.eps).view(batch, num, size, -1)

    def code(self, hidden: Tensor, before: Tensor) -> Tensor:
        """What a Domino head's last matrix reads, [N, S, R], where embedded tokens `before` [N, S, E] went before.

        hidden [N, S, E] of slots 1... Without such a head it has no columns.
        """
        if not self.domino:
            return hidden[..., :0]
        gates = [self.get_parameter(f"prefix_gru__weight_{part}_l0") for part in ("ih", "hh")]
        start = torch.zeros(1, len(before), gates[1].shape[1])
        states, _ = torch.gru(before, start, gates, False, 1, 0.0, True, False, True)
        code = F.silu(self.linear(torch.cat([hidden, states.bfloat16()], -1), "embed_proj.0"))
        plain = self.config["dflash_config"]["pure_draft_prefix_len"]
        return torch.cat([torch.zeros_like(code[:, :plain]), code[:, plain:]], 1)

    @property
    def domino(self) -> bool:
        return self.config["dflash_config"].get("projector_type") == "domino"


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
                x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
            x = x.T if rows > columns else x
            parameter.add_(x.float(), alpha=-rate * max(1, rows / columns) ** 0.5)


@dataclass
class Batch:
    """ids and features of rows; anchors [B, A]; of slots 1..: labels, weights, tokens and whether they count."""

    ids: Tensor
    features: Tensor
    anchors: Tensor
    labels: Tensor
    weights: Tensor
    tokens: Tensor
    whole: Tensor

    def part(self, anchors: slice, slots: int) -> Batch:
        """Some of the anchors, and the first of their slots."""
        per_slot = (x[:, anchors, :slots] for x in (self.labels, self.weights, self.tokens, self.whole))
        return Batch(self.ids, self.features, self.anchors[:, anchors], *per_slot)


def follows(role: np.ndarray) -> np.ndarray:
    """Whether a position's next token is the target's answer, [B, L]."""
    found = np.zeros(role.shape, bool)
    found[:, 1:-1] = role[:, 2:] == ANSWER
    return found


def anchors_of(role: np.ndarray, places: np.ndarray, rng: Any) -> np.ndarray:
    """Anchors [B, A] at `places` that can be, once each, the rest drawn from the other positions; in no order.

    role [B, L]; places [B, A], negative where any will do. Where too few can be, some are drawn that don't count.
    """
    free = follows(role)
    order = np.where(free, rng.random(role.shape), -1.0)
    rows, columns = np.nonzero(places >= 0)
    order[rows, places[rows, columns]] += 1.0  # before all others; the same place twice is one
    order[~free] = -1.0
    anchors = np.maximum(np.argsort(-order, axis=1)[:, : places.shape[1]], 1)
    return rng.permuted(anchors, axis=1)


def batch_of(data: Conversations, rows: Any, vocabulary: np.ndarray, anchors: np.ndarray, decay: float) -> Batch:
    """Blocks behind anchors [B, A]; slots that aren't the target's answer don't count."""
    size, ids, role = 8, data.ids[rows], data.role[rows]
    drawn = np.take_along_axis(follows(role), anchors, axis=1)[..., None]
    at = anchors[..., None] + np.arange(1, size)
    inside = np.minimum(at, ids.shape[1] - 1)
    every = np.arange(len(ids))[:, None, None]
    tokens, answered = ids[every, inside], (role[every, inside] == ANSWER) & (at < ids.shape[1])
    whole = np.logical_and.accumulate(answered, axis=-1) & drawn
    labels = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
    known = (vocabulary[labels] == tokens) & whole
    weights = (known * np.exp(-np.arange(size - 1) / decay)).astype(np.float32)
    arrays = (torch.from_numpy(x) for x in (anchors, labels, weights, tokens, whole))
    return Batch(torch.from_numpy(ids), data.features[torch.from_numpy(np.asarray(rows))], *arrays)


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        raw = json.loads((args.draft / "config.json").read_text())
        self.target = Target(args.target, raw["dflash_config"]["target_layer_ids"])
        held = Conversations(args.held_out, args.out / "features", self.target)
        self.held = held
        held.kept = held.kept[: args.num_held_out]
        secret = {row.tobytes() for row in held.ids[held.kept]}
        self.data = [Conversations(file, args.out / "features", self.target) for file in files_of(args.data)]
        for part in self.data:
            part.kept = np.array([i for i, row in enumerate(part.ids) if row.tobytes() not in secret])
        self.draft = Draft(args.draft)
        self.vocabulary = self.draft.published_vocabulary
        if self.vocabulary is None:
            answers = np.concatenate([part.ids[part.role == ANSWER] for part in self.data])
            tokens, counts = np.unique(answers, return_counts=True)
            self.vocabulary = np.sort(tokens[np.argsort(-counts, kind="stable")[: args.vocabulary]]).astype(np.int64)
        self.head = self.target.embedding[torch.from_numpy(self.vocabulary)].bfloat16()
        self.mask, self.width = raw["dflash_config"]["mask_token_id"], raw["hidden_size"]
        sample = self.data[0].features[:2, :, : -self.width].float()
        self.scale = sample.pow(2).mean((0, 1)).sqrt() + 1e-4
        with torch.no_grad():
            self.draft.weight("fc").mul_(self.scale)
        named = list(self.draft.named_parameters())
        matrices = {name for name, p in named if p.ndim == 2 and name != "embed_proj__2__weight"}
        self.muon = Muon([p for name, p in named if name in matrices])
        self.adam = torch.optim.AdamW([p for name, p in named if name not in matrices], weight_decay=0.0)
        self.epoch, self.order = 0, self.batches(0)  # every epoch has as many
        # Where decoding goes on behind an epoch's blocks; that is where the next epoch's begin.
        self.places = [
            np.full((len(part.ids), part.ids.shape[1] // args.positions_per_anchor), -1) for part in self.data
        ]
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, Any]] = []

    def batches(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """All conversations once: the number of their file and their rows, `args.tokens` in all."""
        rng = np.random.default_rng((0, 1, epoch))
        found = []
        for number, part in enumerate(self.data):
            size = max(1, self.args.tokens // part.ids.shape[1])
            order = rng.permutation(part.kept)
            found += [(number, order[i : i + size]) for i in range(0, len(order) - size + 1, size)]
        return [found[i] for i in rng.permutation(len(found))]

    def read(self, batch: Batch, context: list[tuple[Tensor, Tensor]], used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For the used slots of 1.. (a mask): the draft's hidden, its Domino head's code, the target's hidden."""
        slots = used.shape[-1]
        blocks = torch.full((*batch.anchors.shape, slots + 1), self.mask)
        blocks[..., :1] = first = batch.ids.gather(1, batch.anchors)[..., None]
        out = self.draft(self.target.embedding[blocks], context, batch.anchors)[:, :, 1:]
        tokens = torch.cat([first, batch.tokens[..., : slots - 1]], -1)
        code = self.draft.code(out.flatten(0, 1), self.target.embedding[tokens].flatten(0, 1)).view(*used.shape, -1)
        before = (batch.anchors[..., None] + torch.arange(slots)).clamp(max=batch.ids.shape[1] - 1)
        rows = torch.arange(len(batch.ids))[:, None, None].expand_as(before)
        return out[used], code[used], batch.features[rows[used], before[used], -self.width :]

    def widen(self) -> Tensor:
        """What makes a Domino head's code a correction, [V, R]; without one it has no columns."""
        return self.draft.weight("embed_proj.2") if self.draft.domino else torch.zeros(len(self.head), 0)

    def context(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return self.draft.context(batch.features[..., : -self.width], self.scale)

    def train(self) -> float:
        args, rng = self.args, np.random.default_rng((0, 2, self.step))
        epoch, at = divmod(self.step, len(self.order))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.batches(epoch)
        number, rows = self.order[at]
        anchors = anchors_of(self.data[number].role[rows], self.places[number][rows], rng)
        num = anchors.shape[1]
        batch = batch_of(self.data[number], rows, self.vocabulary, anchors, args.decay)
        # Late slots weigh little and cost as much: a share of the blocks has them, weighted up.
        whole = max(1, round(num * args.late_share))
        batch.weights[..., EARLY:] *= num / whole
        context = self.context(batch)
        parts = [batch.part(slice(whole), 7), batch.part(slice(whole, None), EARLY)]
        used = [(part, part.weights > 0) for part in parts if part.anchors.numel()]
        pieces = [(*self.read(part, context, mask), part.labels[mask], part.weights[mask]) for part, mask in used]
        hidden, code, taught, labels, weights = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        weights = weights / weights.sum()
        widen = self.widen()
        loss, hits = Distance.apply(hidden, code, widen, taught, self.head, labels, weights, args.distillation)
        self.draft.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        share = self.rate()
        self.muon.step(args.muon_rate * share)
        self.adam.param_groups[0]["lr"] = args.adamw_rate * share
        self.adam.step()
        accepted = []
        for (_, mask), hit in zip(used, hits.split([len(piece[0]) for piece in pieces]), strict=True):
            agree = torch.zeros_like(mask)
            agree[mask] = hit
            accepted.append(agree.long().cumprod(-1).sum(-1))
        places = anchors + 1 + torch.cat(accepted, 1).numpy()
        self.places[number][rows] = np.where(places < batch.ids.shape[1], places, -1)
        self.step += 1
        return loss.item()

    def rate(self) -> float:
        """Share of the peak rate: warm-up, flat, then a cosine to 0 in the last `cooldown` of the run."""
        args, warmup = self.args, 20
        flat = max(warmup, round(args.num_steps * (1 - args.cooldown)))
        if self.step < flat:
            return min(1.0, (self.step + 1) / warmup)
        return 0.5 * (1 + math.cos(math.pi * (self.step - flat) / max(1, args.num_steps - flat)))

    def agreed(self, batch: Batch, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Slots [B, A, 7] that the draft has right, and all before them."""
        hidden, code, _ = self.read(batch, context, torch.ones_like(batch.whole))
        logits = F.linear(hidden, self.head) + F.linear(code, self.widen().bfloat16())
        chosen = torch.from_numpy(self.vocabulary)[logits.argmax(-1)].view_as(batch.tokens)
        return ((chosen == batch.tokens) & batch.whole).long().cumprod(-1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """On held-out rows, greedy answers (even rows) and sampled ones apart; greedy ones as decoding goes, too."""
        found: dict[str, Any] = {}
        for kind, first in (("greedy", 0), ("sampled", 1)):
            hits = []
            for row in self.held.kept[first::2]:
                rng, anywhere = np.random.default_rng((0, int(row))), np.full((1, 48), -1)
                anchors = anchors_of(self.held.role[[row]], anywhere, rng)
                batch = batch_of(self.held, [row], self.vocabulary, anchors, self.args.decay)
                hits.append(self.agreed(batch, self.context(batch))[batch.whole[..., 0]])
            prefix = torch.cat(hits).float()
            found[kind] = round(1 + prefix.sum(-1).mean().item(), 4)
            found[kind + "_by_position"] = [round(x, 4) for x in prefix.mean(0).tolist()]
        return found | {"decoded": self.decode(128)}

    def decode(self, tokens: int) -> float:
        """Acceptance length where a round begins behind what the last one committed, in first greedy answers."""
        rows = self.held.kept[::2]
        role = self.held.role[rows]
        anchors = (role == ANSWER).argmax(1)[:, None]
        end, total, rounds, context = anchors + tokens, 0, 0, None
        while True:
            at = np.minimum(anchors, role.shape[1] - 1)
            on = np.take_along_axis(follows(role), at, 1) & (at < end)
            if not on.any():
                return round(total / rounds, 4)
            batch = batch_of(self.held, rows, self.vocabulary, at, self.args.decay)
            context = context or self.context(batch)
            committed = 1 + self.agreed(batch, context).sum(-1).numpy()
            total, rounds = total + int(committed[on].sum()), rounds + int(on.sum())
            anchors = np.where(on, anchors + committed, role.shape[1])

    def save(self, loss: float) -> None:
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        self.curve.append({"step": self.step, "seconds": round(self.seconds), "loss": loss, **self.evaluate()})
        print(json.dumps(self.curve[-1]), flush=True)
        state = {"draft": self.draft.state_dict(), "muon": self.muon.momenta, "adam": self.adam.state_dict()}
        state |= {name: getattr(self, name) for name in ("step", "seconds", "curve", "scale", "places")}
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
            "conversations": sum(len(part.kept) for part in self.data),
            "held_out": self.curve[-1],
        }

    def resume(self) -> bool:
        file = self.args.out / "trainer.pt"
        if not file.exists():
            return False
        state = torch.load(file, weights_only=False)
        self.draft.load_state_dict(state["draft"])
        for mine, saved in zip(self.muon.momenta, state["muon"], strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self.scale, self.places = state["scale"], state["places"]
        return True


def files_of(paths: list[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--draft", "--target", "--held-out", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--num-held-out", type=int, default=64, help="rows of --held-out, never trained on")
    parser.add_argument("--num-steps", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=4096, help="of context a step")
    parser.add_argument("--positions-per-anchor", type=int, default=5)
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--adamw-rate", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=2.0, help="γ of the weights exp(−(k − 1) / γ) of slots k")
    parser.add_argument("--cooldown", type=float, default=0.5)
    parser.add_argument("--distillation", type=float, default=0.5)
    parser.add_argument("--late-share", type=float, default=0.25, help="of blocks that have slots 4 to 7")
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--minutes-between", type=float, default=4.0, help="between checkpoints")
    parser.add_argument("--profile", type=int, default=0, help="steps to time, and nothing else")
    args = parser.parse_args()
    run = Run(args)
    print(sum(len(part.kept) for part in run.data), "conversations", flush=True)
    if args.profile:
        print(run.evaluate(), flush=True)
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
