"""Every published draft structure, in every packaging, loads and drafts losslessly for its kind of target."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from drafts import save
from reference import plain_tokens
from run import run
from test_draft_parity import REFERENCE, draw

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import conformance as targets

from dflash_mlx.draft import DFlashDraft
from dflash_mlx.errors import CheckpointError, PairMismatchError
from dflash_mlx.load import check_pair, load_draft
from dflash_mlx.speculative.proposers import DraftProposer
from dflash_mlx.targets.target import Target

Weights = dict[str, mx.array]
PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]
NUM_TOKENS = 20
VOCAB, DRAFT_VOCAB, HIDDEN = 97, 40, 32
# Published draft: the mlx-lm architecture of its target.
FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_coder_30b_a3b": "qwen3_moe",
    "qwen3_coder_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_6_27b": "qwen3_5",
    "gpt_oss_20b": "gpt_oss",
    "gpt_oss_120b": "gpt_oss",
    "llama_3_1": "llama",
    "gemma_4": "gemma4",
    "kimi_k2": "kimi_k25",
    "minimax_m2": "minimax",
    "glm_5_1": "glm_moe_dsa",
}


def published(family: str) -> tuple[dict[str, Any], Weights]:
    description = json.loads(str(np.load(REFERENCE / f"published_{family}.npz")["description"]))
    shapes = {name: tuple(shape) for name, shape in description["tensors"].items()}
    return description["config"], {name: draw(description["seed"], name, shape) for name, shape in shapes.items()}


def write(path: Path, raw: dict[str, Any], weights: Weights, shards: int = 1) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    save(path, weights, shards)


def one_file(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    write(path, raw, weights)


def sharded(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    write(path, raw, weights, shards=3)


def half_precision(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    write(path, raw, {name: x.astype(mx.bfloat16) for name, x in weights.items()})


def quantized(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    """What mlx-lm's conversion writes."""
    out = {}
    for name, x in weights.items():
        module = name.removesuffix(".weight")
        if x.ndim < 2 or x.shape[-1] % 32:  # a group is 32 wide
            out[name] = x
        else:
            out[name], out[f"{module}.scales"], out[f"{module}.biases"] = mx.quantize(x, group_size=32, bits=8)
    write(path, raw | {"quantization": {"group_size": 32, "bits": 8}}, out)


def own_vocabulary(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    shape = (raw["vocab_size"], raw["hidden_size"])
    own = {f"{name}.weight": draw(1, name, shape) for name in ("embed_tokens", "lm_head")}
    write(path, raw, weights | own)


def speculators(path: Path, raw: dict[str, Any], weights: Weights, *, head: bool = True) -> None:
    """The packaging of the speculators library, with a pruned vocabulary."""
    own = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    own += ("intermediate_size", "rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings")
    own += ("layer_types", "sliding_window", "model_type", "tie_word_embeddings")
    dflash = raw["dflash_config"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.6.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": {key: raw[key] for key in own if key in raw},
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "block_size": raw["block_size"],
        "draft_vocab_size": DRAFT_VOCAB,
        "sliding_window_non_causal": raw.get("is_causal") is False,
        "sample_from_anchor": False,
        "target_hidden_size": None,
    }
    write(path, config, weights | vocabulary(raw["hidden_size"], head))


def vocabulary(hidden_size: int, head: bool) -> Weights:
    """A draft's own vocabulary: d2t holds how far a draft id is below its token's, t2d marks the tokens."""
    ids = draft_tokens()
    selected = np.zeros(VOCAB, bool)
    selected[ids] = True
    own = {"d2t": mx.array(ids - np.arange(DRAFT_VOCAB)), "t2d": mx.array(selected)}
    own["verifier_norm.weight"] = mx.ones((hidden_size,))
    own["verifier_lm_head.weight"] = draw(2, "verifier_lm_head.weight", (DRAFT_VOCAB, hidden_size))
    if head:
        own["lm_head.weight"] = draw(3, "lm_head.weight", (DRAFT_VOCAB, hidden_size))
    return own


def draft_tokens() -> np.ndarray:
    return np.sort(np.random.RandomState(0).choice(VOCAB, DRAFT_VOCAB, replace=False))


def shared_head(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    speculators(path, raw, weights, head=False)


def pruned_vocabulary(path: Path, raw: dict[str, Any], weights: Weights) -> None:
    """The authors' packaging with a vocabulary of its own: one key and one map, no head."""
    offsets = {"d2t": vocabulary(raw["hidden_size"], head=False)["d2t"]}
    write(path, raw | {"draft_vocab_size": DRAFT_VOCAB}, weights | offsets)


VARIANTS: dict[str, Callable[[Path, dict[str, Any], Weights], None]] = {
    "one file": one_file,
    "sharded": sharded,
    "bfloat16": half_precision,
    "8 bits": quantized,
    "own embedding and head": own_vocabulary,
    "pruned, target's head": pruned_vocabulary,
    "speculators, own head": speculators,
    "speculators, target's head": shared_head,
}


@functools.cache
def target(architecture: str):
    model = targets.build(architecture)
    return model, plain_tokens(model, PROMPT, NUM_TOKENS)


def drafted(draft: DFlashDraft, embed=None, head=None):
    """What the draft says behind seven committed tokens of random features."""
    context = draft.make_context()
    features = draw(4, "features", (1, 7, len(draft.capture_layer_ids) * HIDDEN))
    draft.extend(context, features)
    embed = embed or (lambda tokens: draw(5, "embed", (VOCAB, HIDDEN))[tokens])
    head = head or (lambda hidden: hidden @ draw(6, "head", (VOCAB, HIDDEN)).T)
    return draft.draft(5, draft.block_size - 1, context, embed, head)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_every_packaging_decodes_as_plainly(family: str, variant: str, tmp_path: Path) -> None:
    model, expected = target(FAMILIES[family])
    VARIANTS[variant](tmp_path, *published(family))
    draft = load_draft(tmp_path, target=model)
    cache = model.make_cache() if hasattr(model, "make_cache") else None
    if cache is None:
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(model)
    verifier = Target(model, cache, capture_layer_ids=draft.capture_layer_ids)
    result = run(model, PROMPT, DraftProposer(draft, verifier), NUM_TOKENS, target=verifier, cache=cache)
    assert result.tokens == expected
    left = NUM_TOKENS - len(result.steps[0].tokens)
    for step in result.steps[1:]:
        assert step.width == min(draft.block_size, left)
        left -= len(step.tokens)
    proposed = {t for step in result.steps[1:] for t in step.proposal.tokens[0, 1:].tolist()}
    if variant.startswith(("speculators", "pruned")):
        assert proposed <= set(draft_tokens().tolist())


def test_packagings_of_one_draft_say_the_same(tmp_path: Path) -> None:
    raw, weights = published("qwen3_5")
    one_file(tmp_path / "a", raw, weights)
    sharded(tmp_path / "b", raw, weights)
    shared_head(tmp_path / "c", raw, weights)
    whole, shards, pruned = (drafted(load_draft(tmp_path / name)) for name in "abc")
    ids = mx.array(draft_tokens())
    assert mx.array_equal(whole.logits, shards.logits)
    # The same network: a pruned head only leaves columns out.
    assert mx.allclose(whole.logits[:, ids], pruned.logits, atol=1e-6)
    assert mx.array_equal(pruned.tokens(mx.argmax(pruned.logits, axis=-1)), ids[mx.argmax(pruned.logits, axis=-1)])


def test_speculators_counts_captures_from_the_embedding(tmp_path: Path) -> None:
    raw, weights = published("qwen3")
    speculators(tmp_path, raw, weights)
    assert load_draft(tmp_path).capture_layer_ids == tuple(raw["dflash_config"]["target_layer_ids"])


def test_a_draft_that_samples_from_its_anchor_drafts_one_token_more(tmp_path: Path) -> None:
    """Row i speaks of position i + 1, so the logits are those of all rows, not of all but the first."""
    raw, weights = published("qwen3")
    one_file(tmp_path / "a", raw, weights)
    shifted = raw | {"dflash_config": raw["dflash_config"] | {"sample_from_anchor": True}}
    one_file(tmp_path / "b", shifted, weights)
    plain, anchored = load_draft(tmp_path / "a"), load_draft(tmp_path / "b")
    assert (plain.block_size, anchored.block_size) == (16, 17)
    # Not bit for bit: a BLAS rounds 15 rows and 16 in its own ways.
    assert mx.allclose(drafted(plain).logits, drafted(anchored).logits[1:], rtol=1e-5, atol=1e-5)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, **changes: Any) -> None:
    weights = mx.load(str(path / "model.safetensors")) | changes
    save(path, {name: x for name, x in weights.items() if x is not None})


UNUSABLE: list[tuple[Callable[[Path], None], str]] = [
    (lambda p: edit_config(p, speculators_model_type="eagle3"), "speculators_model_type is 'eagle3', known are dflash"),
    (lambda p: edit_config(p, transformer_layer_config=None), "transformer_layer_config is None, an object is needed"),
    (lambda p: edit_config(p, aux_hidden_state_layer_ids=[0, 2]), "aux_hidden_state_layer_ids holds 0, the target's"),
    (lambda p: edit_config(p, aux_hidden_state_layer_ids=None), "target_layer_ids is missing"),
    (lambda p: edit_config(p, norm_before_residual=True), "norm_before_residual is True, which this version"),
    (lambda p: edit_config(p, draft_vocab_size=41), "draft_vocab_size is 41 but d2t has 40 entries"),
    (lambda p: edit_config(p, draft_vocab_size=VOCAB), "draft_vocab_size is 97 but d2t has 40 entries"),
    (lambda p: edit_tensors(p, d2t=None), "draft_vocab_size is 40 but there is no d2t"),
    (lambda p: edit_tensors(p, d2t=mx.full((40,), 90)), "d2t does not map the draft's 40 tokens to rising ones below"),
    (lambda p: edit_tensors(p, t2d=mx.zeros((VOCAB,), mx.bool_)), "t2d and d2t name different tokens"),
]


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE)
def test_an_unusable_speculators_draft_is_refused_by_key(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    speculators(tmp_path, *published("qwen3"))
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_draft(tmp_path)


def test_a_speculators_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    speculators(tmp_path, *published("qwen3"))
    edit_config(tmp_path, aux_hidden_state_layer_ids=[1, 9, 17, 25])
    with pytest.raises(PairMismatchError, match="capture_layer_ids up to is 24, the target's layers is 4"):
        check_pair(target("qwen3")[0], load_draft(tmp_path))
