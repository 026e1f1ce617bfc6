"""The builder's tree holds exactly the most probable prefixes, parents first."""

import itertools
import math
import random
import time

import pytest

from dflash_mlx.speculative.tree import build_conditioned_tree, build_tree

SETTINGS = [(1, 1), (1, 4), (2, 3), (3, 3), (4, 2), (7, 1)]


def random_rows(rng: random.Random, depth: int, k: int, ties: bool = False):
    """Log-probabilities of the k best of a distribution and their tokens, best first."""
    logprobs, ids = [], []
    for _ in range(depth):
        weights = [rng.choice([1, 1, 2, 4]) if ties else rng.expovariate(1) for _ in range(k + 3)]
        row = sorted((math.log(w / sum(weights)) for w in weights), reverse=True)[:k]
        logprobs.append(row)
        ids.append(rng.sample(range(100), k))
    return logprobs, ids


def paths_of(tree) -> list[tuple[int, ...]]:
    paths = [()]
    for parent, token in zip(tree.parents[1:], tree.tokens, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def brute_force(children, depth: int, budget: int, tau: float = math.inf) -> set[tuple[int, ...]]:
    """All prefixes, sorted by probability and then by rank."""
    found = []

    def visit(path, ranks, score):
        logprobs, ids = children(path) if len(path) < depth else ((), ())
        for rank, (logprob, token) in enumerate(zip(logprobs, ids, strict=True)):
            longer = ((*path, token), (*ranks, rank), score + logprob)
            found.append(longer)
            visit(*longer)

    visit((), (), 0.0)
    found.sort(key=lambda item: (-item[2], item[1]))
    return {path for path, _, score in found[:budget] if score >= found[0][2] - tau}


@pytest.mark.parametrize(("depth", "k"), SETTINGS)
@pytest.mark.parametrize("ties", [False, True])
def test_tree_is_the_most_probable_prefixes(depth, k, ties):
    rng = random.Random(depth * 10 + k)
    for _, budget in itertools.product(range(20), (1, 2, 3, 8, 30, 1000)):
        logprobs, ids = random_rows(rng, depth, k, ties)
        expected = brute_force(lambda path, rows=(logprobs, ids): tuple(r[len(path)] for r in rows), depth, budget)
        tree = build_tree(logprobs, ids, budget)
        assert len(tree.tokens) == len(expected) and set(paths_of(tree)) == expected
        assert len(tree.block.depths) == tree.block.size  # made only if parents stand before their children


@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0])
def test_tau_leaves_out_what_is_far_below_the_best(tau):
    rng = random.Random(4)
    for _ in range(20):
        logprobs, ids = random_rows(rng, 3, 4)
        expected = brute_force(lambda path, rows=(logprobs, ids): tuple(r[len(path)] for r in rows), 3, 12, tau)
        assert set(paths_of(build_tree(logprobs, ids, 12, tau=tau))) == expected


@pytest.mark.parametrize("ties", [False, True])
def test_conditioned_tree_is_the_most_probable_prefixes(ties):
    def children(path):
        if len(path) == 3:
            return (), ()
        logprobs, ids = random_rows(random.Random(hash(path)), 1, 3, ties)
        return logprobs[0], ids[0]

    for budget in (1, 4, 9, 20, 100):
        asked = []

        def noted(path, asked=asked):
            asked.append(path)
            return children(path)

        tree = build_conditioned_tree(noted, budget)
        assert set(paths_of(tree)) == brute_force(children, 3, budget)
        assert len(asked) == len(set(asked)) <= budget + 1


def test_chain_seed_and_branches_are_there_first():
    rng = random.Random(1)
    logprobs, ids = random_rows(rng, 6, 4)
    firsts = tuple(row[0] for row in ids)
    paths = paths_of(build_tree(logprobs, ids, 10, chain_seed=True))
    assert paths[:6] == [firsts[:n] for n in range(1, 7)] and len(paths) == 10
    # A branch that begins as the draft's own choice shares its nodes; one that is longer than the draft is kept.
    branch = (ids[0][0], ids[1][1], *range(200, 210))
    paths = paths_of(build_tree(logprobs, ids, 20, branches=[branch]))
    assert {branch[:n] for n in range(1, 13)} <= set(paths) and len(set(paths)) == len(paths) == 20
    assert len(build_tree(logprobs, ids, 3, branches=[branch]).tokens) == 3
    tree = build_tree([], [], 9, branches=[(7, 8), (7, 9), ()])
    assert paths_of(tree) == [(7,), (7, 8), (7, 9)]
    assert tree.nodes_along((7, 9)) == [1, 3] and tree.nodes_along((7, 8, 5)) == [1, 2] and not tree.nodes_along((8,))


def test_best_path_stands_at_the_front():
    logprobs = [[math.log(0.8), math.log(0.1)]] * 4
    paths = paths_of(build_tree(logprobs, [[1, 2]] * 4, 12))
    assert paths[:4] == [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)] and len(paths) == 12


def test_a_large_tree_takes_less_than_a_millisecond():
    logprobs, ids = random_rows(random.Random(0), 15, 16)
    times = []
    for _ in range(30):
        started = time.perf_counter()
        build_tree(logprobs, ids, 64)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3, min(times)
