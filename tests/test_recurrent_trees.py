"""Every node of a tree is the last step of its own path, layer by layer and through whole models."""

from __future__ import annotations

import copy
import inspect
import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from test_recurrent_zoo import (
    CONFIGS,
    DENSE,
    FLOAT32,
    PROMPT,
    model_of,
    over_blocks,
    relative,
    stepwise,
)
from tiny import VOCAB

from dflash_mlx.cache import Block, Positions, carry
from dflash_mlx.cache.block import tree_mask
from dflash_mlx.targets.instrument import rope_swaps, swapped
from dflash_mlx.targets.recurrent import LAYERS, recurrent_subclass


def random_block(rng, size):
    """Parents before children; depth and breadth vary."""
    reach = rng.choice([1, 2, 4, size])
    return Block((-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, size))))


def calls_of_recurrent_layers(model):
    """One recurrent layer of each class and the named arguments of its call in a step behind the prompt."""
    seen = {}

    def recorder(base):
        names = tuple(inspect.signature(base.__call__).parameters)[1:]

        def call(layer, *args, **kwargs):
            arguments = dict(zip(names, args, strict=False), **kwargs)
            seen[type(layer)] = layer, names, arguments | {"cache": copy.deepcopy(arguments["cache"])}
            return base.__call__(layer, *args, **kwargs)

        return type(base.__name__, (base,), {"__call__": call})

    cache = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=cache)
    layers = [m for m in model.modules() if recurrent_subclass(m) is not None]
    # Of each class the last, which is not a special first one.
    last = {type(m): m for m in layers}
    with swapped([(m, recorder(type(m))) for m in last.values()]):
        model(mx.array([[7]]), cache=cache)
    return list(seen.values())


def rows_like(rng_key, argument, size):
    """A block of random rows in place of the one row of a call."""
    if argument.dtype in (mx.int32, mx.uint32, mx.int64):
        return mx.random.randint(0, VOCAB, (1, size), key=rng_key).astype(argument.dtype)
    return mx.random.normal((1, size, *argument.shape[2:]), key=rng_key).astype(argument.dtype)


def is_rows(argument):
    return isinstance(argument, mx.array) and argument.ndim >= 2


def one_step(layer, arguments, rows, node, depth, cache):
    step = arguments | {name: x[:, node : node + 1] for name, x in rows.items()} | {"cache": cache}
    if "offset" in arguments:
        step["offset"] = arguments["offset"] + depth
    return layer(**step)


def first(out):
    return out[0] if isinstance(out, tuple) else out


def stepped(layer, arguments, rows, path):
    cache = copy.deepcopy(arguments["cache"])
    for depth, node in enumerate(path):
        out = first(one_step(layer, arguments, rows, node, depth, cache))
    return out[:, 0], cache


def states(cache):
    return cache.cache if isinstance(cache, ArraysCache) else cache.caches[0].cache


def over_tree(layer, arguments, rows, block):
    """The layer's output over the block, and its cache."""
    cache = copy.deepcopy(arguments["cache"])
    changed = dict(rows)
    if isinstance(cache, CacheList):
        changed["mask"] = tree_mask(block, cache[1].offset)
    if "offset" in arguments:
        changed["offset"] = Positions(arguments["offset"], block)
    cache = carry(cache)
    cache.open(block)
    with swapped([(layer, recurrent_subclass(layer)), *rope_swaps(layer)]):
        return first(layer(**arguments | changed | {"cache": cache})), cache


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [(a, mx.float32) for a in CONFIGS] + [(a, mx.bfloat16) for a in DENSE],
    ids=[*CONFIGS, *(f"{a}-bfloat16" for a in DENSE)],
)
def test_nodes_of_a_layer_equal_steps_along_their_paths(architecture, dtype):
    rng = random.Random(architecture)
    model = model_of(architecture, dtype)
    # float32: one layer, so only the order of sums differs. bfloat16: mlx-lm's one-row step rounds a product more
    # than its own blocks do in Mamba-2 and lightning attention, a few units in the last place; the others are equal.
    tolerance, state_tolerance = (3e-6, 1e-6) if dtype == mx.float32 else (2.5e-2, 2e-3)
    for layer, _, arguments in calls_of_recurrent_layers(model):
        for size in (2, 7, 16, 20):
            block = random_block(rng, size)
            key = mx.random.key(size)
            rows = {name: rows_like(key, x, size) for name, x in arguments.items() if is_rows(x) and name != "mask"}
            out, cache = over_tree(layer, arguments, rows, block)
            for node in range(size):
                expected, plain = stepped(layer, arguments, rows, block.path_to(node))
                assert relative(out[:, node], expected) <= tolerance, (layer, block, node)
            shared = isinstance(plain, ArraysCache) and "ChannelMixing" in type(layer).__name__
            if shared or "TimeMixing" in type(layer).__name__:
                continue  # two layers fill this cache; the whole model's test commits
            cache.commit(block.path_to(node))
            for mine, theirs in zip(states(cache.release()), states(plain), strict=True):
                assert mine.dtype == theirs.dtype
                assert relative(mine, theirs) <= state_tolerance


@pytest.mark.parametrize("architecture", CONFIGS)
def test_nodes_of_a_model_equal_plain_decoding_of_their_paths(architecture):
    rng = random.Random(architecture)
    model = model_of(architecture)
    tokens = list(PROMPT)
    plain = make_prompt_cache(model)
    model(mx.array([tokens[:-1]]), cache=plain)
    caches = [carry(c) for c in plain]
    for size in (12, 1, 5, 18):
        block = random_block(rng, size)
        nodes = [tokens[-1], *(rng.randrange(VOCAB) for _ in range(size - 1))]
        for cache in caches:
            cache.open(block)
        with over_blocks(model):
            logits = model(mx.array([nodes]), cache=caches)[0]
        for node in {0, size // 2, size - 1}:
            path = [nodes[i] for i in block.path_to(node)]
            expected, _ = stepwise(model, tokens[:-1] + path, len(tokens) + len(path) - 2)
            assert relative(logits[node], expected[-1]) < FLOAT32
        path = block.path_to(rng.randrange(size))
        for cache in caches:
            cache.commit(path)
        tokens = tokens[:-1] + [nodes[i] for i in path] + [rng.randrange(VOCAB)]


def test_every_recurrent_class_of_mlx_lm_is_covered_here():
    covered = set()
    for architecture in CONFIGS:
        for module in model_of(architecture).modules():
            if recurrent_subclass(module) is not None:
                covered.add((type(module).__module__.rpartition(".")[2], type(module).__name__))
    assert covered == set(LAYERS)
