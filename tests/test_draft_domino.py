"""Domino's correction against a transcription of its formula in NumPy, in float64, for every kind of export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from domino import ALL, ANCHOR, CONTEXT, EXPORTS, HIDDEN, RANK, Export, Weights, expected, said, write
from drafts import CONFIG, along, domino, save, write_draft
from mlx.utils import tree_flatten

from dflash_mlx.draft import Drafted, load_draft
from dflash_mlx.draft.checkpoint import stack
from dflash_mlx.errors import CheckpointError


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
