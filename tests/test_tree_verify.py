"""Every node of a tree gets the logits of a fresh prefill of its path, and commit keeps exactly the path taken."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from reference import fresh_prefill
from test_greedy import assert_same_caches
from tiny import FULL_ATTENTION, VOCAB, build

from dflash_mlx.cache import Block
from dflash_mlx.speculative.proposal import Proposal
from dflash_mlx.targets.target import Target

PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]


def random_tree(rng: random.Random, size: int, anchor: int) -> Proposal:
    """Parents before children, in any order else; siblings hold different tokens."""
    parents, tokens = [-1], [anchor]
    while len(parents) < size:
        parent = rng.randrange(max(0, len(parents) - 6), len(parents))
        token = rng.randrange(VOCAB)
        if all(t != token for p, t in zip(parents, tokens, strict=True) if p == parent):
            parents.append(parent)
            tokens.append(token)
    return Proposal(mx.array([tokens]), Block(tuple(parents)))


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_nodes_equal_fresh_prefills_of_their_paths(architecture):
    rng = random.Random(architecture)
    model = build(architecture)
    cache = make_prompt_cache(model)
    target = Target(model, cache, capture_layer_ids=(0, 2))
    committed = list(PROMPT)
    for _ in target.prefill(mx.array(committed), 7):
        pass
    for _ in range(5):
        proposal = random_tree(rng, rng.choice([1, 2, 5, 12]), committed[-1])
        tokens = proposal.tokens[0].tolist()
        verification = target.verify(proposal)
        for node in range(proposal.block.size):
            path = proposal.block.path_to(node)
            _, logits = fresh_prefill(model, committed[:-1] + [tokens[i] for i in path])
            assert mx.allclose(verification.row(node), logits, atol=2e-4)
        path = proposal.block.path_to(rng.randrange(proposal.block.size))
        target.commit(path)
        if rng.random() < 0.3 and len(path) > 1:
            path = path[: rng.randrange(1, len(path))]
            target.rewind(len(path))
        committed = committed[:-1] + [tokens[i] for i in path]
        committed.append(rng.randrange(VOCAB))
    target.finish()
    assert_same_caches(cache, fresh_prefill(model, committed[:-1])[0])
