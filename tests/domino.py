"""Every kind of Domino export as a directory, and its correction as a NumPy transcription in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from drafts import CONFIG, save, with_dflash, write_draft

from dflash_mlx.draft import DFlashDraft, Drafted

HIDDEN, STATE, RANK = CONFIG["hidden_size"], 12, 8
ANCHOR, CONTEXT = 5, 7
Weights = dict[str, mx.array]


@dataclass(frozen=True)
class Export:
    """One way to publish a Domino draft. tokens: those of its own vocabulary, where it is smaller."""

    shift: bool = True
    plain: int = 1
    biased: tuple[str, ...] = ()
    start: bool = False
    naming: str = "authors'"
    bits: int | None = None
    tokens: tuple[int, ...] | None = None
    own_head: bool = True
    dflash: dict[str, Any] = field(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        sizes = {"projector_type": "domino", "gru_hidden_dim": STATE, "emb_dim": RANK}
        raw = with_dflash(CONFIG, **sizes, pure_draft_prefix_len=self.plain, shift_label=self.shift, **self.dflash)
        return raw if self.tokens is None else raw | {"draft_vocab_size": len(self.tokens)}


ALL = ("weight_ih_l0", "weight_hh_l0", "embed_proj.0", "embed_proj.2")
PRUNED = (3, 4, 5, 9, 17, 18, 31, 40, 41, 42, 60, 77, 90, 96)
EXPORTS = {
    "bias-free": Export(),
    "biased": Export(biased=ALL),
    "biased recurrence only": Export(biased=ALL[:2]),
    "labels not shifted": Export(shift=False),
    "all corrected": Export(plain=0),
    "three plain": Export(plain=3, biased=ALL),
    "none corrected": Export(plain=99),
    "learned start": Export(shift=False, plain=0, biased=ALL, start=True, naming="older"),
    "container": Export(naming="logit_head."),
    "speculators": Export(naming="logits_correction."),
    "speculators, own vocabulary": Export(naming="logits_correction.", tokens=PRUNED),
    "own vocabulary, target's head": Export(tokens=PRUNED, own_head=False),
    "4 bits": Export(bits=4, biased=ALL),
    "8 bits": Export(bits=8),
    "scaled": Export(dflash={"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 9.0}),
}
# What other packagings write for the authors' names.
OLDER = {"prefix_gru.": "domino_gru.", "embed_proj.0": "domino_head.W1", "embed_proj.2": "domino_head.W2"}


def head_tensors(export: Export) -> dict[str, np.ndarray]:
    """A Domino head under the authors' names, large enough to change what is chosen."""
    rng = np.random.RandomState(3)
    vocab = CONFIG["vocab_size"] if export.tokens is None else len(export.tokens)
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * STATE, HIDDEN),
        "prefix_gru.weight_hh_l0": (3 * STATE, STATE),
        "embed_proj.0.weight": (RANK, HIDDEN + STATE),
        "embed_proj.2.weight": (vocab, RANK),
    }
    head = {name: rng.standard_normal(shape) * (3.0 / shape[1] ** 0.5) for name, shape in shapes.items()}
    for (name, (rows, _)), kind in zip(shapes.items(), ALL, strict=True):
        if kind in export.biased:
            name = name.replace("weight_", "bias_") if "weight_" in name else name.replace(".weight", ".bias")
            head[name] = rng.standard_normal(rows)
    if export.start:
        head["domino_start"] = rng.standard_normal(STATE)
    return head


def renamed(name: str, naming: str) -> str:
    if naming == "authors'" or not name.startswith(("prefix_gru", "embed_proj")):
        return name
    if naming == "older":
        theirs = next(theirs for theirs in OLDER if name.startswith(theirs))
        return name.replace(theirs, OLDER[theirs])
    return naming + name


def write(path: Path, export: Export) -> Weights:
    """The draft as published; returns the numbers that its tensors mean, under the authors' names."""
    meant: Weights = write_draft(path)
    meant |= {name: mx.array(x.astype(np.float32)) for name, x in head_tensors(export).items()}
    if export.tokens is not None:
        meant["d2t"] = mx.array(np.array(export.tokens) - np.arange(len(export.tokens)))
        if export.own_head:
            meant["lm_head.weight"] = 0.5 * mx.random.normal((len(export.tokens), HIDDEN), key=mx.random.key(9))
    raw, written = export.raw, dict(meant)
    if export.bits is not None:
        raw = raw | {"quantization": {"group_size": 32, "bits": export.bits}}
        for name in list(meant):
            if name.endswith(("weight", "weight_ih_l0")) and meant[name].ndim == 2 and meant[name].shape[1] % 32 == 0:
                packed = mx.quantize(meant[name], group_size=32, bits=export.bits)
                written |= {name.replace("weight", key): x for key, x in zip(PARTS, packed, strict=True)}
                meant[name] = mx.dequantize(*packed, group_size=32, bits=export.bits)
    (path / "config.json").write_text(json.dumps(raw))
    save(path, {renamed(name, export.naming): x for name, x in written.items()})
    return meant


PARTS = ("weight", "scales", "biases")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gru(head: dict[str, np.ndarray], x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """One step, gate by gate: r and z from both inputs, n from the input and the reset part of the state."""
    w, u = (head[f"prefix_gru.weight_{kind}_l0"].reshape(3, STATE, -1) for kind in ("ih", "hh"))
    b, c = (head.get(f"prefix_gru.bias_{kind}_l0", np.zeros(3 * STATE)).reshape(3, STATE) for kind in ("ih", "hh"))
    r = sigmoid(w[0] @ x + b[0] + u[0] @ h + c[0])
    z = sigmoid(w[1] @ x + b[1] + u[1] @ h + c[1])
    n = np.tanh(w[2] @ x + b[2] + r * (u[2] @ h + c[2]))
    return (1 - z) * n + z * h


def transcribed(
    head: dict[str, np.ndarray],
    base: np.ndarray,
    hidden: np.ndarray,
    inputs: list[np.ndarray],
    plain: int,
) -> np.ndarray:
    """Logits [n, V]: base [n, V] corrected with hidden [n, E] behind inputs, the embeddings of anchor and tokens."""
    state, rows = head.get("domino_start", np.zeros(STATE)), []
    for i in range(len(base)):
        state = gru(head, inputs[i], state)
        x = np.concatenate([hidden[i], state])
        x = head["embed_proj.0.weight"] @ x + head.get("embed_proj.0.bias", 0)
        correction = head["embed_proj.2.weight"] @ (x * sigmoid(x)) + head.get("embed_proj.2.bias", 0)
        rows.append(base[i] + (correction if i >= plain else 0))
    return np.array(rows)


EMBEDDING = np.random.RandomState(1).standard_normal((CONFIG["vocab_size"], HIDDEN))
HEAD = np.random.RandomState(2).standard_normal((CONFIG["vocab_size"], HIDDEN)) / HIDDEN**0.5


def said(draft: DFlashDraft, num_positions: int | None = None) -> tuple[Drafted, np.ndarray]:
    """What the draft says behind seven committed tokens, and the hidden states [n, E] that it says it from."""
    embedding, head = (mx.array(x.astype(np.float32)) for x in (EMBEDDING, HEAD))
    context = draft.make_context()
    draft.extend(context, mx.random.normal((1, CONTEXT, 2 * HIDDEN), key=mx.random.key(4)))
    n = draft.block_size - 1 if num_positions is None else num_positions
    drafted = draft.draft(ANCHOR, n, context, lambda tokens: embedding[tokens], lambda x: x @ head.T)
    rows = n + (not draft.config.sample_from_anchor)
    block = mx.array([[ANCHOR] + [draft.mask_token_id] * (rows - 1)])
    hidden = draft(draft.embed(block, lambda tokens: embedding[tokens]), context)
    return drafted, np.array(hidden[0, rows - n :], np.float64)


def expected(export: Export, meant: Weights, hidden: np.ndarray, tokens: list[int]) -> np.ndarray:
    weights = {name: np.array(x.astype(mx.float32), np.float64) for name, x in meant.items()}
    own = weights.get("lm_head.weight")
    rows = HEAD if export.tokens is None else HEAD[list(export.tokens)]
    base = hidden @ (rows if own is None else own).T * export.dflash.get("output_multiplier", 1.0)
    cap = export.dflash.get("final_logit_softcapping")
    base = base if cap is None else np.tanh(base / cap) * cap
    scale = export.dflash.get("input_embedding_scale", 1.0)
    inputs = [scale * EMBEDDING[token] for token in [ANCHOR, *tokens]]
    return transcribed(weights, base, hidden, inputs, export.plain)
