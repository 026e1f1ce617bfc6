"""The definition that every cache kind is held to: a list of tokens, and who sees whom by position.

A token's K/V row carries the token in its first column, so that what a fetch makes visible can be read back exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from dflash_mlx.cache import Block, carry
from dflash_mlx.cache.buffer import RowBuffer

HEADS = 2
RANDOM = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)


@dataclass(frozen=True)
class Kind:
    """A cache kind: how mlx-lm makes it, and which indices of a sequence its last token sees."""

    name: str
    make: Callable[[], Any]
    sees: Callable[[int, int | None], set[int]]  # (position, window asked for) → positions, itself among them
    windows: tuple[int | None, ...] = (None,)
    key_width: int = 4
    value_width: int = 4
    trees: bool = True
    chunk: int = 0
    constant_rows: bool = False  # quantization keeps those exactly
    younger_snapshots_survive: bool = True  # coming back to an older one


def full() -> Callable:
    return lambda p, _: set(range(p + 1))


def sliding(size: int, keep: int) -> Callable:
    def sees(p: int, window: int | None) -> set[int]:
        last = min(window or size, size) - keep
        return {j for j in range(p + 1) if j < keep or j > p - last}

    return sees


def chunked(size: int) -> Callable:
    return lambda p, _: {j for j in range(p + 1) if j // size == p // size}


def rotating(size: int, keep: int = 0) -> Kind:
    windows = (None, size, size + 1) if keep else (None, size, size + 1, max(1, size - 2))
    return Kind(f"rotating {size} keep {keep}", lambda: RotatingKVCache(size, keep), sliding(size, keep), windows)


def chunks(size: int) -> Kind:
    return Kind(f"chunked {size}", lambda: ChunkedKVCache(size), chunked(size), trees=False, chunk=size)


FULL = Kind("full", KVCache, full(), younger_snapshots_survive=False)
QUANTIZED = Kind(
    "quantized",
    lambda: QuantizedKVCache(group_size=32, bits=8),
    full(),
    key_width=32,
    value_width=64,
    constant_rows=True,
    younger_snapshots_survive=False,
)
LATENT = Kind("latent", KVCache, full(), key_width=6, value_width=1, younger_snapshots_survive=False)
KEYS_ONLY = Kind("keys only", KVCache, full(), value_width=0, younger_snapshots_survive=False)


def rows(kind: Kind, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """K/V rows [1, H, n, width] of tokens."""

    def make(width: int, shift: int) -> mx.array:
        x = np.zeros((1, HEADS, len(tokens), width), np.float32)
        for i, token in enumerate(tokens):
            x[0, :, i] = token if kind.constant_rows else np.roll(RANDOM[token], shift)[:width]
        x[..., :1] = np.array(tokens, np.float32)[None, None, :, None]
        return mx.array(x)

    return make(kind.key_width, 0), make(kind.value_width, 7)


def tokens_in(cache: Any, fetched: Any) -> list[int]:
    """The tokens of fetched rows, the same in K, in V and in every head."""
    if hasattr(cache, "bits"):
        fetched = [mx.dequantize(*x, group_size=cache.group_size, bits=cache.bits) for x in fetched]
    heads = [x[0, h, :, 0].tolist() for x in fetched if x.shape[-1] for h in range(HEADS)]
    assert all(head == heads[0] for head in heads)
    return [int(token) for token in heads[0]]


def seen(fetched: list[int], mask: Any, row: int, num_rows: int) -> list[int]:
    """The fetched tokens that query `row` of `num_rows` attends under a mask as mlx-lm's models use it."""
    if mask is None:
        return fetched
    if isinstance(mask, str):
        assert mask == "causal"
        return fetched[: len(fetched) - num_rows + row + 1]
    mask = np.array(mask)
    assert mask.shape[-1] == len(fetched), "columns are the fetched rows"
    visible = mask if mask.ndim == 1 else mask[row]
    return [token for token, v in zip(fetched, visible, strict=True) if v]


def mask_of(kind: Kind, cache: Any, num_rows: int, window: int | None, return_array: bool = False) -> Any:
    if hasattr(cache, "make_mask"):
        return cache.make_mask(num_rows, return_array=return_array, window_size=window)
    # A model with chunked attention makes its own mask (mlx_lm/models/llama4.py).
    cache.maybe_trim_front()
    end = cache.offset + num_rows
    columns, queries = mx.arange(cache.start_position, end), mx.arange(cache.offset, end)[:, None]
    return (columns // kind.chunk == queries // kind.chunk) & (columns <= queries)


def assert_attends(kind: Kind, cache: Any, fetched: Any, mask: Any, expected: list[list[int]]) -> None:
    """mlx-lm's own attention over the fetch equals attention over exactly the expected tokens of each query."""
    if not kind.value_width:
        return
    queries = RANDOM[100 : 100 + len(expected), : kind.key_width].copy()
    queries[:, 0] = 0  # the token's number is no direction
    q = mx.broadcast_to(mx.array(queries)[None, None], (1, HEADS, *queries.shape))
    scale = 0.0 if kind.constant_rows else 0.7
    out = scaled_dot_product_attention(q, *fetched, cache=cache, scale=scale, mask=mask)
    for i, visible in enumerate(expected):
        keys, values = (np.array(x)[0, 0] for x in rows(kind, visible))
        scores = np.exp(scale * keys @ queries[i])
        np.testing.assert_allclose(np.array(out)[0, 0, i], scores @ values / scores.sum(), rtol=2e-4, atol=2e-4)


@contextlib.contextmanager
def slack(step: int):
    """Buffers with little room, so that rows move often."""
    usual, RowBuffer.step = RowBuffer.step, step
    try:
        yield
    finally:
        RowBuffer.step = usual


# What can happen to a cache, in any order.


@dataclass(frozen=True)
class Round:
    """A block, and what becomes of it. shape: distance of each node's parent from the node before it."""

    shape: tuple[int, ...]
    node: int
    kept: int | None  # rows left after a rewind
    window: int
    return_array: bool
    fails: str | None = None

    def block(self, trees: bool) -> Block:
        if not trees:
            return Block.chain(len(self.shape) + 1)
        return Block((-1, *(max(0, i - back) for i, back in enumerate(self.shape))))


@dataclass(frozen=True)
class Release:
    """Back to mlx-lm, which goes on with updates of these widths; then carried again."""

    widths: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    pass


@dataclass(frozen=True)
class Restore:
    which: int


shapes = st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), max_size=12).map(tuple)
rounds = st.builds(
    Round,
    shape=shapes,
    node=st.integers(0, 99),
    kept=st.none() | st.integers(0, 99),
    window=st.integers(0, 9),
    return_array=st.booleans(),
    fails=st.sampled_from([None] * 6 + ["before", "half way", "in the commit"]),
)
widths = st.sampled_from([1, 1, 1, 2, 3, 6, 11])
releases = st.lists(widths, max_size=4).map(tuple).map(Release)
histories = st.lists(
    st.one_of(rounds, rounds, rounds, rounds, releases, st.just(Snapshot()), st.integers(0, 9).map(Restore)),
    min_size=1,
    max_size=14,
)
prefills = st.lists(st.sampled_from([1, 1, 2, 3, 7, 20]), max_size=4)


@dataclass
class Driver:
    """Runs a history on the carried cache and on the list, and compares what they show."""

    kind: Kind
    stock: Any = None
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # widths of what mlx-lm itself was fed; 1 for committed tokens
    used: int = 0
    snapshots: list[tuple[Any, list[int]]] = field(default_factory=list)

    def fresh_tokens(self, count: int) -> list[int]:
        self.used += count
        return list(range(self.used - count, self.used))

    def run(self, prefill: list[int], history: list[Any]) -> None:
        self.stock, self.tokens, self.fed = self.kind.make(), [], []
        for width in prefill:
            self.feed_stock(self.stock, self.fresh_tokens(width))
        self.carried = carry(self.stock)
        for event in history:
            {Round: self.round, Release: self.release, Snapshot: self.snapshot, Restore: self.restore}[type(event)](
                event
            )
        self.release(Release((1, 3, 1)))

    def feed_stock(self, cache: Any, tokens: list[int]) -> None:
        mask_of(self.kind, cache, len(tokens), None)
        mx.eval(cache.update_and_fetch(*rows(self.kind, tokens)))
        self.tokens += tokens
        self.fed.append(len(tokens))

    def round(self, event: Round) -> None:
        kind, cache = self.kind, self.carried
        block = event.block(kind.trees)
        proposed = self.fresh_tokens(block.size)
        window = kind.windows[event.window % len(kind.windows)]
        cache.open(block)
        assert int(cache.offset) == len(self.tokens)
        if event.fails == "before":
            return cache.rewind(0)
        mask = mask_of(kind, cache, block.size, window, event.return_array)
        assert not (event.return_array and isinstance(mask, str))
        keys, values = rows(kind, proposed)
        if event.fails == "half way":
            with contextlib.suppress(ValueError):
                cache.update_and_fetch(keys, mx.concatenate([values, values], axis=2)[:, :, : block.size + 1])
            return cache.rewind(0)
        fetched = cache.update_and_fetch(keys, values)
        self.assert_sees(fetched, mask, block, proposed, window)
        path = block.path_to(event.node % block.size)
        cache.commit(path)
        if event.fails == "in the commit":
            return cache.rewind(0)
        if event.kept is not None:
            path = path[: event.kept % (len(path) + 1)]
            cache.rewind(len(path))
        self.tokens += [proposed[node] for node in path]
        self.fed += [1] * len(path)

    def assert_sees(self, fetched: Any, mask: Any, block: Block, proposed: list[int], window: int | None) -> None:
        got = tokens_in(self.carried, fetched)
        expected = []
        for node in range(block.size):
            sequence = self.tokens + [proposed[i] for i in block.path_to(node)]
            visible = self.kind.sees(len(sequence) - 1, window)
            expected.append([token for position, token in enumerate(sequence) if position in visible])
            assert sorted(seen(got, mask, node, block.size)) == expected[-1]
        assert_attends(self.kind, self.carried, fetched, mask, expected)
        again = self.carried.keys_and_values()
        assert tokens_in(self.carried, again) == got, "layers that share K/V read the same rows"

    def release(self, event: Release) -> None:
        """mlx-lm goes on from the released cache as from one that was never carried."""
        assert self.carried.release() is self.stock
        assert type(self.stock) is type(self.kind.make()) and self.stock.offset == len(self.tokens)
        never = self.kind.make()
        done = 0
        for width in self.fed:
            mask_of(self.kind, never, width, None)
            never.update_and_fetch(*rows(self.kind, self.tokens[done : done + width]))
            done += width
        for i, width in enumerate(event.widths):
            window = self.kind.windows[i % len(self.kind.windows)]
            tokens = self.fresh_tokens(width)
            shown = []
            for cache in (self.stock, never):
                mask = mask_of(self.kind, cache, width, window)
                got = tokens_in(cache, cache.update_and_fetch(*rows(self.kind, tokens)))
                shown.append([sorted(seen(got, mask, row, width)) for row in range(width)])
            assert shown[0] == shown[1]
            self.tokens += tokens
            self.fed.append(width)
        self.carried = carry(self.stock)
        self.snapshots.clear()

    def snapshot(self, _: Snapshot) -> None:
        self.snapshots.append((self.carried.snapshot(), list(self.tokens), list(self.fed)))

    def restore(self, event: Restore) -> None:
        if self.snapshots:
            which = event.which % len(self.snapshots)
            state, tokens, fed = self.snapshots[which]
            self.carried.restore(state)
            self.carried.rewind(0)  # no block is open that it could undo
            self.tokens, self.fed = list(tokens), list(fed)
            if not self.kind.younger_snapshots_survive:
                del self.snapshots[which + 1 :]
