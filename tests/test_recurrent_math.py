"""The recurrences over a block against their definition, one step at a time in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.cache import Block
from dflash_mlx.targets.recurrent.ancestry import levels, on_path, panels, routes, strict_ancestors, windows
from dflash_mlx.targets.recurrent.gated_delta import gated_delta
from dflash_mlx.targets.recurrent.linear_attention import exact_terms, linear_attention
from dflash_mlx.targets.recurrent.scan import gated_scan, selective_scan
from dflash_mlx.targets.recurrent.short_conv import causal_conv, with_history


@st.composite
def blocks(draw, most=40):
    size = draw(st.integers(1, most))
    reach = draw(st.sampled_from([1, 2, 5, most]))
    return Block((-1, *(draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, size))))


EXAMPLES = settings(max_examples=25, deadline=None)
H, G, DK, DV = 4, 2, 8, 6


def along_paths(block, start, step):
    """State behind every node, each from its parent's, by step(state, node)."""
    after = []
    for node, parent in enumerate(block.parents):
        after.append(step(start if parent < 0 else after[parent], node))
    return after


def random(rng, *shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def close(mine, theirs, tolerance=1e-5):
    mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    assert np.isfinite(mine).all()
    assert np.abs(mine - theirs).max() <= tolerance * max(1.0, np.abs(theirs).max())


def repeated(x):
    return np.repeat(x, H // x.shape[0], axis=0)


def delta_inputs(rng, n, *, vector, decay):
    groups = H if vector else G
    q, k = random(rng, 1, n, groups, DK, scale=DK**-0.5), unit(random(rng, 1, n, groups, DK))
    gate_shape = (1, n, H, DK) if vector else (1, n, H)
    log_gate = -decay * rng.exponential(size=gate_shape).astype(np.float32)
    beta = rng.uniform(0, 1, (1, n, H)).astype(np.float32)
    return q, k, random(rng, 1, n, H, DV), log_gate, beta


def delta_by_steps(q, k, v, log_gate, beta, state, block):
    q, k, v, log_gate, beta = (x[0].astype(np.float64) for x in (q, k, v, log_gate, beta))

    def step(S, i):
        gate = np.exp(log_gate[i])
        S = S * (gate[:, None, None] if gate.ndim == 1 else gate[:, None])
        key = repeated(k[i])
        S = S + (beta[i][:, None] * (v[i] - np.einsum("hvk,hk->hv", S, key)))[..., None] * key[:, None]
        return S

    states = along_paths(block, state[0].astype(np.float64), step)
    return np.stack([np.einsum("hvk,hk->hv", S, repeated(q[i])) for i, S in enumerate(states)]), states


@EXAMPLES
@given(blocks(), st.booleans(), st.sampled_from([0.01, 1.0, 100.0]), st.integers(0, 2**31), st.booleans())
def test_gated_delta(block, vector, decay, seed, fresh):
    rng = np.random.default_rng(seed)
    inputs = delta_inputs(rng, block.size, vector=vector, decay=decay)
    state = np.zeros((1, H, DV, DK), np.float32) if fresh else random(rng, 1, H, DV, DK)
    y, states = delta_by_steps(*inputs, state, block)
    mine, tape = gated_delta(*map(mx.array, inputs), None if fresh else mx.array(state), block)
    close(mine[0], y)
    for node in {0, block.size // 2, block.size - 1}:
        close(tape.after(block.path_to(node))[0], states[node])


@pytest.mark.parametrize("vector", [False, True], ids=["scalar gate", "vector gate"])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_gated_delta_is_stable_on_repeated_tokens(size, vector):
    """Keys alike, β near 1, no decay: inverting by repeated squaring is off by 50 here at 32 rows."""
    rng = np.random.default_rng(size)
    q, k, v, log_gate, beta = delta_inputs(rng, size, vector=vector, decay=1e-5)
    k = unit(k[:, :1] + 1e-3 * k)
    beta = np.full_like(beta, 0.9999)
    state = random(rng, 1, H, DV, DK)
    block = Block.chain(size)
    y, states = delta_by_steps(q, k, v, log_gate, beta, state, block)
    mine, tape = gated_delta(*map(mx.array, (q, k, v, log_gate, beta, state)), block)
    close(mine[0], y)
    close(tape.after(tuple(range(size)))[0], states[-1])


def test_gated_delta_stays_finite_where_beta_doubles():
    """β near 2 reflects: rows of a panel that are not final yet grow by 3 each, and must not reach infinity."""
    rng = np.random.default_rng(0)
    q, k, v, log_gate, beta = delta_inputs(rng, 256, vector=False, decay=1e-5)
    k, beta = unit(k[:, :1] + 1e-3 * k), np.full_like(beta, 1.99)
    state = random(rng, 1, H, DV, DK)
    y, states = delta_by_steps(q, k, v, log_gate, beta, state, Block.chain(256))
    mine, tape = gated_delta(*map(mx.array, (q, k, v, log_gate, beta, state)), Block.chain(256))
    # The recurrence itself amplifies roundings: mlx-lm's own steps in float32 are as far off.
    close(mine[0], y, 1e-3)
    close(tape.after(tuple(range(256)))[0], states[-1], 1e-3)


@EXAMPLES
@given(blocks(), st.sampled_from([0.01, 1.0, 100.0]), st.integers(0, 2**31), st.booleans())
def test_linear_attention(block, decay, seed, fresh):
    rng = np.random.default_rng(seed)
    n = block.size
    q, k, v = random(rng, 1, n, G, DK), random(rng, 1, n, G, DK), random(rng, 1, n, H, DV)
    log_decay = -decay * rng.exponential(size=(1, n, H)).astype(np.float32)
    state = np.zeros((1, H, DV, DK), np.float32) if fresh else random(rng, 1, H, DV, DK)

    def step(S, i):
        added = v[0, i].astype(np.float64)[..., None] * repeated(k[0, i])[:, None]
        return S * np.exp(log_decay[0, i].astype(np.float64))[:, None, None] + added

    states = along_paths(block, state[0].astype(np.float64), step)
    inputs = map(mx.array, (q, k, v, log_decay))
    mine, tape = linear_attention(*inputs, None if fresh else mx.array(state), block)
    close(mine[0], np.stack([np.einsum("hvk,hk->hv", S, repeated(q[0, i])) for i, S in enumerate(states)]))
    close(tape.after(block.path_to(n - 1))[0], states[-1])


@EXAMPLES
@given(blocks(), st.integers(0, 2**31), st.booleans())
def test_elementwise_scans(block, seed, fresh):
    rng = np.random.default_rng(seed)
    n = block.size
    x, delta = random(rng, 1, n, DK), rng.exponential(size=(1, n, DK)).astype(np.float32)
    A, B, C = -rng.exponential(size=(DK, DV)).astype(np.float32), random(rng, 1, n, DV), random(rng, 1, n, DV)
    state = np.zeros((1, DK, DV), np.float32) if fresh else random(rng, 1, DK, DV)

    def step(S, i):
        d = delta[0, i].astype(np.float64)[:, None]
        return S * np.exp(d * A) + d * x[0, i][:, None] * B[0, i]

    states = along_paths(block, state[0].astype(np.float64), step)
    mine, tape = selective_scan(*map(mx.array, (x, delta, A, B, C)), None if fresh else mx.array(state), block)
    close(mine[0], np.stack([S @ C[0, i] for i, S in enumerate(states)]))
    for node in range(n):
        close(tape.after(block.path_to(node))[0], states[node])

    a, h = np.exp(-delta), None if fresh else mx.array(state[..., 0])
    expected = along_paths(block, state[0, :, 0].astype(np.float64), lambda S, i: a[0, i] * S + x[0, i])
    close(gated_scan(mx.array(x), mx.array(a), h, block)[0][0], np.stack(expected))


@EXAMPLES
@given(blocks(), st.integers(2, 5), st.integers(0, 2**31), st.booleans())
def test_causal_conv(block, kernel_size, seed, fresh):
    rng = np.random.default_rng(seed)
    n, keep = block.size, kernel_size - 1
    x, weight, bias = random(rng, 1, n, DK), random(rng, DK, kernel_size, 1), random(rng, DK)
    stored = np.zeros((1, keep, DK), np.float32) if fresh else random(rng, 1, keep, DK)
    history = with_history(mx.array(x), None if fresh else mx.array(stored), keep)
    mine = causal_conv(history, mx.array(weight), mx.array(bias), block)
    for node in range(n):
        path = block.path_to(node)
        rows = np.concatenate([stored[0], x[0][list(path)]])[-kernel_size:]
        close(mine[0, node], (rows * weight[..., 0].T).sum(0) + bias)
        np.testing.assert_array_equal(np.array(history.after(path))[0], rows[1:])


@given(blocks())
@EXAMPLES
def test_geometry(block):
    paths = [block.path_to(i) for i in range(block.size)]
    strict = np.array(strict_ancestors(block))
    assert (np.array(on_path(block)) == np.array(block.ancestors)).all()
    assert all(set(np.flatnonzero(strict[i])) == set(path[:-1]) for i, path in enumerate(paths))
    assert np.array(windows(block, 3)).tolist() == [[0, 1, *(2 + n for n in path)][-3:] for path in paths]
    laid = [n for nodes in levels(block).nodes for n in nodes.tolist()]
    assert [laid[place] for place in levels(block).order.tolist()] == list(range(block.size))
    for i, path in enumerate(paths):
        nodes, parents = levels(block).nodes[len(path) - 1], levels(block).parents[len(path) - 1]
        place = levels(block).places[i]
        assert nodes[place].item() == i
        if parents is not None:
            assert levels(block).nodes[len(path) - 2][parents[place]].item() == path[-2]
    for panel in panels(block):
        inside = [sum(n >= panel.start for n in paths[i]) for i in range(panel.start, panel.stop)]
        assert panel.generations == max(inside)


@EXAMPLES
@given(blocks(12))
def test_routes(block):
    marks = np.array(routes(block)).reshape(block.size, block.size + 1, block.size)
    for i in range(block.size):
        path = block.path_to(i)
        for j in range(block.size):
            behind = [m for m in path if m > j] if j in path else []
            assert np.flatnonzero(marks[i, j]).tolist() == behind
        assert np.flatnonzero(marks[i, block.size]).tolist() == list(path)


def test_decays_survive_matmuls_that_round_their_inputs():
    x = mx.array(np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 30)
    terms = exact_terms(x)
    assert all((term.astype(mx.bfloat16).astype(mx.float32) == term).all().item() for term in terms)
    assert (sum(terms) == x).all().item()
