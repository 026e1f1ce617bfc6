"""A recurrent cache after any rounds is the state of exactly the committed rows."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache
from test_recurrent_zoo import Rounds, model_of, relative, stepwise
from tiny import VOCAB

from dflash_mlx.cache import Block
from dflash_mlx.cache.recurrent import RecurrentBlock
from dflash_mlx.errors import TargetStateError, UnsupportedTargetError
from dflash_mlx.targets.instrument import swapped
from dflash_mlx.targets.recurrent import recurrent_subclass


def filled(*rows):
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.array(rows), mx.array([sum(rows)])
    return cache


def run(cache, rows):
    """A layer whose states are all rows so far, and their sum."""
    all_rows, total = cache[0], cache[1]

    def after(path):
        taken = mx.array([rows[node] for node in path])
        return [mx.concatenate([all_rows, taken]), total + taken.sum()]

    cache.record(after)


def held(cache):
    states = cache.snapshot()
    assert sum(states[0].tolist()) == states[1].item()
    return states[0].tolist()


@st.composite
def rounds(draw):
    size = draw(st.integers(1, 8))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, size)))
    block = Block(parents)
    path = block.path_to(draw(st.integers(0, size - 1)))
    ending = draw(st.sampled_from(["stands", "rewound", "undone", "failed", "restored"]))
    return block, path, ending, draw(st.integers(1, len(path)))


@settings(max_examples=60, deadline=None)
@given(st.lists(rounds(), max_size=8))
def test_state_is_that_of_the_committed_rows(script):
    cache, committed, token = RecurrentBlock(filled(1, 2)), [1, 2], 3
    for block, path, ending, kept in script:
        rows = list(range(token, token + block.size))
        token += block.size
        snapshot = cache.snapshot()
        cache.open(block)
        if ending == "failed":
            cache.rewind(0)
            assert held(cache) == committed
            continue
        run(cache, rows)
        cache.commit(path)
        assert held(cache) == committed + [rows[node] for node in path]
        if ending == "restored":
            cache.restore(snapshot)
            path = ()
        elif ending == "undone":
            cache.rewind(0)
            path = ()
        elif ending == "rewound":
            cache.rewind(kept)
            path = path[:kept]
        committed += [rows[node] for node in path]
        assert held(cache) == committed
    assert cache.release().cache[0].tolist() == committed


def test_layer_sees_the_state_before_the_block_until_the_next_opens():
    cache = RecurrentBlock(filled(1))
    cache.open(Block.chain(2))
    run(cache, [5, 6])
    cache.commit((0, 1))
    assert cache[0].tolist() == [1]
    cache.open(Block.chain(1))
    assert cache[0].tolist() == [1, 5, 6]


def test_commit_without_a_record_says_so_and_can_be_undone():
    cache = RecurrentBlock(filled(1))
    cache.open(Block.chain(2))
    cache.record(lambda path: [mx.array([0])], slots=(0,))
    with pytest.raises(TargetStateError, match=r"\[1\]"):
        cache.commit((0,))
    cache.rewind(0)
    assert held(cache) == [1]


def test_layer_that_overwrites_its_state_is_refused():
    with pytest.raises(UnsupportedTargetError):
        RecurrentBlock(filled(1))[0] = mx.array([2])


def test_padded_batches_are_refused():
    cache = ArraysCache(1, left_padding=[2])
    with pytest.raises(UnsupportedTargetError, match="padded"):
        RecurrentBlock(cache)
    assert RecurrentBlock(ArraysCache(1, left_padding=[0])).make_mask(4) is None


def test_empty_cache_is_empty_again_after_undoing():
    cache = ArraysCache(2)
    carried = RecurrentBlock(cache)
    assert carried.empty() and carried.arrays() == [] and carried.batch_size == 1
    carried.open(Block.chain(2))
    carried.record(lambda path: [mx.zeros((1, 3)), mx.zeros((1, 3))])
    carried.commit((0,))
    carried.rewind(0)
    assert carried.release() is cache and cache.cache == [None, None]


KINDS = ["qwen3_5", "kimi_linear", "mamba2", "mamba", "rwkv7", "lfm2", "recurrent_gemma", "longcat_flash_ngram"]


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("width", [1, 6])
def test_any_rewind_equals_plain_decoding(architecture, width):
    rng = random.Random(architecture)
    model = model_of(architecture)
    prompt = [5, 9, 11]
    for kept in range(width + 1):
        rounds = Rounds(model, prompt)
        drafted = [rng.randrange(VOCAB) for _ in range(width - 1)]
        rounds.verify(drafted)
        for cache in rounds.caches:
            cache.commit(tuple(range(width)))
            cache.rewind(kept)
        rounds.tokens = [*[*prompt, *drafted][: len(prompt) - 1 + kept], 17]
        logits = rounds.verify([])
        expected, _ = stepwise(model, rounds.tokens, len(rounds.tokens) - 1)
        assert relative(logits, expected) < 2e-5


@pytest.mark.parametrize("architecture", KINDS)
def test_forward_that_failed_half_way_is_undone(architecture):
    model = model_of(architecture)
    rounds = Rounds(model, [5, 9, 11])
    for cache in rounds.caches:
        cache.open(Block.chain(4))
    layers = [m for m in model.modules() if recurrent_subclass(m) is not None]

    def fail(*args, **kwargs):
        raise MemoryError

    failing = type("Failing", (type(layers[0]),), {"__call__": fail})
    with pytest.raises(MemoryError), swapped([*((m, recurrent_subclass(m)) for m in layers), (layers[0], failing)]):
        model(mx.array([[11, 1, 2, 3]]), cache=rounds.caches)
    assert not any(type(layer) is failing for layer in layers)
    for cache in rounds.caches:
        cache.rewind(0)
    expected, _ = stepwise(model, [5, 9, 11], 2)
    assert relative(rounds.verify([])[0], expected[0]) < 2e-5


@pytest.mark.parametrize("architecture", KINDS)
def test_prompt_of_one_token_starts_from_an_empty_cache(architecture):
    model = model_of(architecture)
    rounds = Rounds(model, [7])
    logits = rounds.verify([3, 4, 5])
    rounds.commit([3, 4, 5], 1, 9)
    _, plain = stepwise(model, [7, 3], 0)
    for cache, expected in zip(rounds.caches, plain, strict=True):
        if isinstance(cache, RecurrentBlock):
            assert [state.shape for state in cache.snapshot()] == [state.shape for state in expected.cache]
    again = rounds.verify([2, 2])
    expected, _ = stepwise(model, [7, 3, 9, 2, 2], 0)
    assert relative(logits[:2], expected[:2]) < 2e-5
    assert relative(again, expected[2:]) < 2e-5


@pytest.mark.parametrize("architecture", ["mamba2", "mamba", "rwkv7"])  # without attention, whose caches do grow
def test_rounds_leave_no_growing_graph_behind(architecture):
    """Only logits are ever evaluated, as the engine does; what a round leaves pending the next consumes."""
    model = model_of(architecture)
    rounds = Rounds(model, [5, 9, 11])
    memory = []
    for i in range(90):
        drafted = [3, 5, 8, 9, 2, 1, 4][: 0 if i % 3 == 0 else 7]
        mx.eval(rounds.verify(drafted))
        rounds.commit(drafted, len(drafted) // 2, 7)
        memory.append(mx.get_active_memory())
    assert memory[-1] <= 1.02 * min(memory[29], memory[59])
