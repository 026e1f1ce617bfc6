"""Drafts whose tokens depend on those chosen before: one path, the best prefixes, the whole loop."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import pytest
from drafts import CONFIG, dflash2, domino, random_draft, shifted_domino, unshifted_domino
from mlx_lm.models.cache import make_prompt_cache
from run import run
from test_sampling import SMALL, chi_square_z, exact_probabilities
from test_tree_loop import NUM_TOKENS, PROMPT, SHAPES, case, generate
from tiny import build

from dflash_mlx import make_sampler
from dflash_mlx.draft import DFlashDraft, Drafted
from dflash_mlx.speculative.causal import children_along, followed
from dflash_mlx.speculative.proposers import DraftProposer, Shape
from dflash_mlx.speculative.tree import build_conditioned_tree
from dflash_mlx.speculative.width import make_width
from dflash_mlx.targets.target import Target

FAMILIES = {
    "DFlash 2": dflash2,
    "Domino": domino,
    "Domino, all corrected": shifted_domino,
    "Domino, labels not shifted": unshifted_domino,
    "Domino, shortlist": domino,
    "Domino, own vocabulary": lambda raw=CONFIG: domino(raw | {"draft_vocab_size": 5 * raw["vocab_size"] // 7}),
    "DFlash 2, own vocabulary": lambda raw=CONFIG: dflash2(
        raw | {"draft_vocab_size": 5 * raw["vocab_size"] // 7}, top_k=4
    ),
}
BOTH = ("DFlash 2", "Domino")
VOCAB, HIDDEN = 97, 32
# What a random target's features do to a random draft leaves its distributions flat; this makes them say something.
SHARPER = 4.0


def family_draft(family: str, raw: dict = CONFIG) -> DFlashDraft:
    draft = random_draft(FAMILIES[family](raw))
    if "shortlist" in family:
        draft.domino.shortlist = 2 * draft.config.vocab_size // 3
    return draft


def drafted(draft: DFlashDraft, num_positions: int, anchor: int = 5, seed: int = 0) -> Drafted:
    """What the draft says behind seven committed tokens of random features."""
    keys = mx.random.split(mx.random.key(seed), 3)
    context = draft.make_context()
    width = draft.config.hidden_size
    draft.extend(context, mx.random.normal((1, 7, len(draft.capture_layer_ids) * width), key=keys[0]))
    embedding = mx.random.normal((draft.config.vocab_size, width), key=keys[1])
    head = SHARPER * mx.random.normal((draft.config.vocab_size, width), key=keys[2]) / width**0.5
    return draft.draft(anchor, num_positions, context, lambda tokens: embedding[tokens], lambda x: x @ head.T)


def conditional(said: Drafted, path: tuple[int, ...]) -> dict[int, float]:
    """Log-probabilities of the tokens behind a path, one question at a time."""
    assert said.correction is not None
    state = said.correction.start()
    for position, token in enumerate(path):
        state = said.correction.advance(position, state, mx.array([token]))
    logits = said.correction.logits(len(path), state)[0]
    columns = mx.arange(logits.size)
    logprobs = (logits - mx.logsumexp(logits)).tolist()
    return dict(zip(said.tokens_at(len(path), columns).tolist(), logprobs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_followed_path_is_the_step_by_step_choice(family: str) -> None:
    said = drafted(family_draft(family), 7)
    along, columns = followed(said, lambda logits: mx.argmax(logits, axis=-1))
    tokens = along.tokens(columns[:, None])[:, 0].tolist()
    assert along.correction is None and along.logits.shape[0] == 7
    for depth in range(7):
        behind = conditional(said, tuple(tokens[:depth]))
        assert tokens[depth] == max(behind, key=behind.__getitem__)
    # The correction matters: the positions' own favourites are another path.
    assert tokens != said.tokens(mx.argmax(said.logits, axis=-1)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("budget", [1, 2, 7, 20, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_holds_the_most_probable_prefixes(family: str, budget: int) -> None:
    said = drafted(family_draft(family, CONFIG | {"vocab_size": 11}), 4)
    tree = build_conditioned_tree(children_along(said, budget, k=97), budget)
    paths: dict[tuple[int, ...], float] = {}
    grown = {(): 0.0}
    for _ in range(4):
        grown = {
            (*path, token): score + logprob
            for path, score in grown.items()
            for token, logprob in conditional(said, path).items()
        }
        paths |= grown
        grown = dict(sorted(grown.items(), key=lambda item: -item[1])[:budget])
    best = sorted(paths.values(), reverse=True)[:budget]
    nodes = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens, strict=True):
        nodes.append((*nodes[parent], token))
    chosen = sorted((paths[node] for node in nodes[1:]), reverse=True)
    # float32 against float64 sums of a few log-probabilities
    assert len(chosen) == len(best) and all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(chosen, best, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_of_one_token_a_position_is_the_greedy_path(family: str) -> None:
    said = drafted(family_draft(family), 7)
    along, columns = followed(said, lambda logits: mx.argmax(logits, axis=-1))
    tree = build_conditioned_tree(children_along(said, 7, k=1), 7)
    assert list(tree.tokens) == along.tokens(columns[:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_gives_plain_decodings_tokens(family: str, architecture: str, name: str) -> None:
    model, expected = case(architecture)
    draft = family_draft(family, CONFIG | {"num_target_layers": len(model.layers)})
    responses = generate(model, PROMPT, NUM_TOKENS, draft_model=draft, **SHAPES[name])
    assert [r.token for r in responses] == expected
    budget = SHAPES[name].get("tree_budget", 0) or SHAPES[name].get("block_size", draft.block_size) - 1
    assert responses[-1].statistics.summary()["max_width"] <= 1 + budget


def small_draft(family: str) -> DFlashDraft:
    raw = CONFIG | {"hidden_size": 16, "vocab_size": 7, "num_target_layers": 1, "num_attention_heads": 2}
    raw["dflash_config"] = {"mask_token_id": 4, "target_layer_ids": [0]}
    draft = family_draft(family, raw)
    draft.fc.weight = SHARPER * draft.fc.weight
    return draft


# What a width leaves out does not depend on the kind of Domino export.
SAMPLED = [
    (family, width) for family in FAMILIES for width in ("full", "auto", 0.2) if width == "full" or family in BOTH
]


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize(("family", "width"), SAMPLED)
def test_sampled_drafts_keep_the_targets_distribution(family: str, budget: int, width) -> None:
    model = build("llama", SMALL, seed=3)
    draft, sampler = small_draft(family), make_sampler(temp=0.9, top_p=0.9)
    mx.random.seed(15)
    counts: dict = {}
    accepted = 0
    for _ in range(800):
        cache = make_prompt_cache(model)
        target = Target(model, cache, capture_layer_ids=(0,))
        proposer = DraftProposer(
            draft, target, shape=Shape(4, budget), sampler=sampler, width=make_width(width, timed=False)
        )
        # Longer than what is counted, so that a block covers all that is counted but the first token.
        result = run(model, [1, 5, 2], proposer, 5, sampler=sampler, cache=cache, target=target)
        accepted += sum(step.num_accepted for step in result.steps)
        tokens = tuple(result.tokens[:3])
        counts[tokens] = counts.get(tokens, 0) + 1
    assert accepted > 100
    assert chi_square_z(counts, exact_probabilities(model, sampler.probs), 800) < 3.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampled_chain_says_the_distribution_its_tokens_were_drawn_from(family: str) -> None:
    """Tokens come as often as draft_probs says, given the tokens before them."""
    model = build("llama", SMALL, seed=3)
    draft, sampler = small_draft(family), make_sampler(temp=0.8, top_p=0.95)
    target = Target(model, make_prompt_cache(model), capture_layer_ids=(0,))
    mx.random.seed(3)
    proposer = DraftProposer(draft, target, shape=Shape(3), sampler=sampler)
    draft.extend(proposer.context, mx.random.normal((1, 3, 16)))
    counts: dict[tuple[int, int], int] = {}
    probs: dict[tuple[int, int], float] = {}
    for _ in range(2000):
        proposal = proposer.propose(2, 3, 3)
        _, first, second = proposal.tokens[0].tolist()
        rows = proposal.draft_probs.tolist()
        counts[first, second] = counts.get((first, second), 0) + 1
        probs |= {(first, token): rows[0][first] * rows[1][token] for token in range(7)}
    for first, second in itertools.product(range(7), repeat=2):
        probs.setdefault((first, second), 0.0)
    assert abs(sum(probs.values()) - 1) < 0.02
    assert chi_square_z(counts, {pair: p for pair, p in probs.items() if p > 0}, 2000) < 3.5
