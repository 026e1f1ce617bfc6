"""Domino's correction against a transcription of its formula in NumPy, in float64, for every kind of export."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from drafts import CONFIG, domino, save, with_dflash, write_draft
from mlx.utils import tree_flatten
from test_draft_parity import along

from dflash_mlx.draft import DFlashDraft, Drafted, load_draft
from dflash_mlx.draft.checkpoint import stack
from dflash_mlx.errors import CheckpointError

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


@pytest.mark.parametrize("name", EXPORTS)
def test_corrected_logits_equal_the_formula(name: str, tmp_path: Path) -> None:
    export = EXPORTS[name]
    meant = write(tmp_path, export)
    draft = load_draft(tmp_path)
    drafted, hidden = said(draft)
    assert drafted.num_positions == (8 if export.shift else 7)
    own = list(export.tokens or range(CONFIG["vocab_size"]))
    for seed in range(3):
        tokens = [own[i] for i in np.random.RandomState(seed).randint(len(own), size=drafted.num_positions)]
        theirs = expected(export, meant, hidden, tokens)
        # float32 against float64; logits are O(10)
        assert np.abs(np.array(along(drafted, tokens)) - theirs).max() < 1e-4
        corrected = np.abs(theirs - np.array(drafted.logits)).max(axis=1) > 0.1
        assert corrected.tolist() == [i >= export.plain for i in range(drafted.num_positions)]
    assert drafted.tokens_at(0, mx.arange(len(own))).tolist() == own


@pytest.mark.parametrize("shortlist", [64, 100, 300, 900])
def test_a_shortlist_leaves_out_what_no_position_finds_likely(tmp_path: Path, shortlist: int) -> None:
    vocab = 1000
    raw = domino(CONFIG | {"vocab_size": vocab})
    write_draft(tmp_path, raw)
    draft = load_draft(tmp_path)
    head = mx.random.normal((vocab, HIDDEN), key=mx.random.key(6))
    embedding = mx.random.normal((vocab, HIDDEN), key=mx.random.key(7))

    def drafted(length: int) -> Drafted:
        draft.domino.shortlist = length
        context = draft.make_context()
        draft.extend(context, mx.random.normal((1, CONTEXT, 2 * HIDDEN), key=mx.random.key(4)))
        return draft.draft(ANCHOR, 8, context, lambda tokens: embedding[tokens], lambda x: x @ head.T)

    whole, short = drafted(vocab), drafted(shortlist)
    listed = short.tokens_at(0, mx.arange(shortlist))
    assert listed.tolist() == sorted(set(listed.tolist()))
    # A token that is left out is farther from the best, at every position, than all that are listed somewhere.
    distance = mx.max(whole.logits, axis=1, keepdims=True) - whole.logits
    nearest = mx.min(distance, axis=0)
    left_out = mx.array([token for token in range(vocab) if token not in set(listed.tolist())])
    worst = mx.max(nearest[listed]).item()
    assert mx.min(distance[:, left_out]).item() >= worst
    # So the base logits' own favourites are in it, and so is what a correction of less than `worst` can lift.
    assert set(mx.argmax(whole.logits, axis=1).tolist()) <= set(listed.tolist())
    # On what is listed nothing changes.
    tokens = listed[:8].tolist()
    assert mx.allclose(along(short, tokens), along(whole, tokens)[:, listed], atol=1e-4)
    best = mx.argmax(along(whole, tokens), axis=1)
    for position, token in enumerate(best.tolist()):
        if token in listed.tolist():
            assert listed[mx.argmax(along(short, tokens)[position])].item() == token


def test_a_correction_smaller_than_the_shortlists_reach_chooses_the_same_path(tmp_path: Path) -> None:
    vocab = 1000
    write_draft(tmp_path, domino(CONFIG | {"vocab_size": vocab}))
    draft = load_draft(tmp_path)
    head = mx.random.normal((vocab, HIDDEN), key=mx.random.key(6))
    embedding = mx.random.normal((vocab, HIDDEN), key=mx.random.key(7))
    draft.domino.widen.weight = 0.3 * draft.domino.widen.weight / mx.abs(draft.domino.widen.weight).max()

    def greedy(length: int) -> list[int]:
        draft.domino.shortlist = length
        context = draft.make_context()
        draft.extend(context, mx.random.normal((1, CONTEXT, 2 * HIDDEN), key=mx.random.key(4)))
        drafted = draft.draft(ANCHOR, 8, context, lambda tokens: embedding[tokens], lambda x: x @ head.T)
        tokens: list[int] = []
        for position in range(8):
            logits = along(drafted, [*tokens, 0])[position]
            tokens.append(drafted.tokens_at(position, mx.argmax(logits)).item())
        return tokens

    assert greedy(vocab) == greedy(200)


def test_every_naming_is_the_same_draft(tmp_path: Path) -> None:
    answers = []
    for naming in ("authors'", "logit_head.", "logits_correction.", "older"):
        write(tmp_path / naming.strip("."), Export(naming=naming, biased=ALL))
        drafted, _ = said(load_draft(tmp_path / naming.strip(".")))
        answers.append(along(drafted, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert all(mx.array_equal(answers[0], answer) for answer in answers[1:])


Spoil = Callable[[Weights, dict[str, Any]], Any]
UNUSABLE: dict[str, tuple[Spoil, str]] = {
    "no GRU input": (lambda w, _: w.pop("prefix_gru.weight_ih_l0"), r"missing prefix_gru\.weight_ih_l0"),
    "no GRU state": (lambda w, _: w.pop("prefix_gru.weight_hh_l0"), r"missing prefix_gru\.weight_hh_l0"),
    "no narrow": (lambda w, _: w.pop("embed_proj.0.weight"), r"missing embed_proj\.0\.weight"),
    "no wide": (lambda w, _: w.pop("embed_proj.2.weight"), r"missing embed_proj\.2\.weight"),
    "two layers": (
        lambda w, _: w.update({"prefix_gru.weight_ih_l1": mx.zeros((36, 12))}),
        r"unexpected prefix_gru\.weight_ih_l1",
    ),
    "confidence": (lambda w, _: w.update({"confidence.weight": mx.zeros((1, 32))}), "unexpected confidence.weight"),
    "wrong width": (
        lambda w, _: w.update({"embed_proj.2.weight": mx.zeros((96, RANK))}),
        r"embed_proj\.2\.weight is \(96, 8\) instead of \(97, 8\)",
    ),
    "two names": (
        lambda w, _: w.update({"logit_head.embed_proj.0.weight": w["embed_proj.0.weight"]}),
        r"a tensor under two names \(logit_head\.embed_proj\.0\.weight\)",
    ),
    "not said": (
        lambda _, raw: raw.update(dflash_config=CONFIG["dflash_config"]),
        r"unexpected embed_proj\.0\.weight",
    ),
    "no state size": (lambda _, raw: raw["dflash_config"].pop("gru_hidden_dim"), "gru_hidden_dim is missing"),
    "no rank": (lambda _, raw: raw["dflash_config"].pop("emb_dim"), "emb_dim is missing"),
    "fusion": (lambda _, raw: raw["dflash_config"].update(fusion_mode="flare"), r"dflash_config\.fusion_mode is"),
    "other head": (lambda _, raw: raw["dflash_config"].update(projector_type="dspark"), "projector_type is 'dspark'"),
    "Markov": (lambda _, raw: raw["dflash_config"].update(markov_rank=8), r"dflash_config\.markov_rank is 8"),
    "two shifts": (
        lambda _, raw: raw["dflash_config"].update(sample_from_anchor=False),
        "shift_label is True beside sample_from_anchor False",
    ),
    "negative prefix": (lambda _, raw: raw["dflash_config"].update(pure_draft_prefix_len=-1), "prefix_len is -1"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spoil, message = UNUSABLE[name]
    write(tmp_path, Export())
    weights, raw = mx.load(str(tmp_path / "model.safetensors")), json.loads((tmp_path / "config.json").read_text())
    spoil(weights, raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save(tmp_path, weights)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path)


def test_names_go_back_to_the_authors(tmp_path: Path) -> None:
    """The tensors read under the older names are those of the authors' names, none lost."""
    export = EXPORTS["learned start"]
    meant = write(tmp_path, export)
    draft = load_draft(tmp_path)
    stacked = stack(meant, draft.config)
    ours = dict(tree_flatten(draft.parameters()))
    assert ours.keys() == stacked.keys()
    assert all(mx.array_equal(ours[name], stacked[name]) for name in ours)
