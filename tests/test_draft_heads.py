"""A draft with a vocabulary of its own and no head takes the rows of the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafts import CONFIG, write_draft
from mlx_lm.models.cache import make_prompt_cache
from reference import plain_tokens
from run import run
from tiny import LLAMA, build

from dflash_mlx.draft import DFlashDraft, load_draft
from dflash_mlx.draft.heads import PrunedHead
from dflash_mlx.errors import CheckpointError
from dflash_mlx.load import check_pair
from dflash_mlx.speculative.proposers import DraftProposer, Shape
from dflash_mlx.targets.target import Target

TOKENS = [3, 4, 5, 9, 17, 18, 31, 40, 41, 42, 60, 77, 90, 96]
ROWS = mx.array(TOKENS)
PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]


def pruned_draft(path: Path, tokens: list[int] = TOKENS, **more: mx.array) -> DFlashDraft:
    """A draft in the authors' own packaging with the smaller vocabulary named: one key, one tensor, no head."""
    weights = write_draft(path)
    (path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": len(tokens)}))
    weights |= {"d2t": mx.array(np.array(tokens) - np.arange(len(tokens)))} | more
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    return load_draft(path)


def a_target(tied: bool, bits: int | None) -> Any:
    model = build("llama", LLAMA | {"tie_word_embeddings": tied, "intermediate_size": 64})
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    return model


def logits(draft: DFlashDraft, target: Target) -> mx.array:
    context = draft.make_context()
    draft.extend(context, mx.random.normal((1, 7, 2 * 32), key=mx.random.key(1)))
    return draft.draft(5, 7, context, target.embed, target.lm_head).logits


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_it_equals_the_targets_head_at_those_rows(tmp_path: Path, tied: bool, bits: int | None) -> None:
    target = Target(a_target(tied, bits), [])
    write_draft(tmp_path / "whole")
    whole, pruned = logits(load_draft(tmp_path / "whole"), target), logits(pruned_draft(tmp_path / "pruned"), target)
    assert pruned.shape == (7, len(TOKENS))
    # float32 sums of 32 products, blocked by another width
    assert mx.allclose(pruned, whole[:, ROWS], atol=1e-5)


@pytest.mark.parametrize("budget", [0, 12])
@pytest.mark.parametrize(("tied", "bits"), [(True, None), (False, 4)])
def test_generations_are_plain_decodings_and_propose_its_tokens_only(
    tmp_path: Path, tied: bool, bits: int | None, budget: int
) -> None:
    model, draft = a_target(tied, bits), pruned_draft(tmp_path)
    check_pair(model, draft)
    cache = make_prompt_cache(model)
    target = Target(model, cache, capture_layer_ids=draft.capture_layer_ids)
    result = run(model, PROMPT, DraftProposer(draft, target, shape=Shape(8, budget)), 24, target=target, cache=cache)
    assert result.tokens == plain_tokens(model, PROMPT, 24)
    proposed = {t for step in result.steps[1:] for t in step.proposal.tokens[0, 1:].tolist()}
    assert proposed and proposed <= set(TOKENS)


def test_rows_are_gathered_once_per_target() -> None:
    head, other, rows = nn.Linear(8, 20), nn.Embedding(20, 8), mx.array([1, 5, 19])
    pruned = PrunedHead(rows)
    first = pruned.of(head)
    assert pruned.of(head) is first
    x = mx.random.normal((2, 8))
    assert mx.allclose(first(x), head(x)[:, rows], atol=1e-6)
    assert mx.allclose(pruned.of(other.as_linear)(x), other.as_linear(x)[:, rows], atol=1e-6)
    second = pruned.of(other.as_linear)
    assert pruned.of(other.as_linear) is second
    other.weight = 2 * other.weight  # another set of weights in the same module
    assert mx.allclose(pruned.of(other.as_linear)(x), other.as_linear(x)[:, rows], atol=1e-6)


def test_a_head_that_does_more_than_multiply_is_asked_as_a_whole() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    rows, x = mx.array([0, 4, 6]), mx.random.normal((3, 8))
    for head in (Doubled(8, 7), lambda x: mx.tanh(x[:, :7])):
        assert mx.array_equal(PrunedHead(rows).of(head)(x), head(x)[:, rows])


def test_the_drafts_own_tied_embedding_is_pruned_too(tmp_path: Path) -> None:
    own = mx.random.normal((97, 32), key=mx.random.key(2))
    draft = pruned_draft(tmp_path, **{"embed_tokens.weight": own})
    raw = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    draft = load_draft(tmp_path)
    hidden = mx.random.normal((1, 3, 32))
    assert mx.allclose(draft.logits(hidden, lambda x: x), hidden @ own[ROWS].T, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "offsets", "message"),
    [
        (4, None, "draft_vocab_size is 4 but there is no d2t"),
        (97, [0, 0, 0], "draft_vocab_size is 97 but d2t has 3 entries"),
        (4, [0, 0, 0], "draft_vocab_size is 4 but d2t has 3 entries"),
        (3, [0, 0, 95], "d2t does not map the draft's 3 tokens to rising ones below 97"),
        (3, [0, 3, 0], "d2t does not map the draft's 3 tokens to rising ones below 97"),
        (3, [-1, 0, 0], "d2t does not map the draft's 3 tokens to rising ones below 97"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, size: int, offsets: list[int] | None, message: str) -> None:
    weights = write_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": size}))
    if offsets is not None:
        weights["d2t"] = mx.array(offsets)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path)
