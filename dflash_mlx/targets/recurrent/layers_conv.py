"""Layers of mlx-lm that remember only the last few rows, over a block; arguments as in layers_delta."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from ...cache.block import Block
from ...cache.recurrent import RecurrentBlock
from .ancestry import last_rows, windows
from .short_conv import causal_conv, with_history


def lfm2(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, C, x = mx.split(layer.in_proj(x), 3, axis=-1)
    history = with_history(B * x, cache[0], layer.L_cache - 1)
    cache.record(lambda path: [history.after(path)])
    return layer.out_proj(C * causal_conv(history, layer.conv.weight, layer.conv.get("bias"), cache.block))


def gear(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = x.shape
    query = layer.q_norm(layer.q_proj(x).reshape(B, N, layer.n_heads, layer.head_dim)).reshape(B, N, -1)
    key = layer.k_norm(layer.k_proj(x).reshape(B, N, layer.n_kv_heads, layer.head_dim)).reshape(B, N, -1)
    inputs = (key, layer.key_conv), (layer.v_proj(x), layer.value_conv)
    histories = [with_history(u, cache[slot], layer.L_cache - 1) for slot, (u, _) in enumerate(inputs)]
    cache.record(lambda path: [history.after(path) for history in histories])
    key, value = (
        layer._expand_kv(causal_conv(history, conv.weight, conv.get("bias"), cache.block))
        for history, (_, conv) in zip(histories, inputs, strict=True)
    )
    return layer.o_proj(mx.sigmoid(query * key) * value)


def baichuan_m1(layer: nn.Module, x: mx.array, cache: Any, mask: Any = None) -> mx.array:
    """cache: the recurrent cache, and the attention's. Keys and values are convolved before the attention."""
    recurrent, attention = cache[0], cache[1]
    B, N, E = x.shape
    size = layer.num_kv_heads * layer.head_dim
    q, k, v = (
        part.reshape(B, N, -1, layer.head_dim).swapaxes(1, 2)
        for part in mx.split(layer.W_pack(x), [E, E + size], axis=-1)
    )
    recurrent.record(lambda path: [row[:, :, path[-1] : path[-1] + 1] for row in (k, v)])
    mixed_k = _two_taps(k, layer.conv_k, recurrent[0], recurrent.block)
    mixed_v = _two_taps(v, layer.conv_v, recurrent[1], recurrent.block)
    q, mixed_k = (layer.rope(part, offset=attention.offset) for part in (q, mixed_k))
    keys, values = attention.update_and_fetch(mixed_k, mixed_v)
    out = scaled_dot_product_attention(q, keys, values, cache=attention, scale=layer.scale, mask=mask)
    return layer.o_proj(out.swapaxes(1, 2).reshape(B, N, E))


def _two_taps(u: mx.array, weight: mx.array, last: mx.array | None, block: Block) -> mx.array:
    """parent · w_0 + row · w_1 per head; u: [B, H, N, D], last: [B, H, 1, D] or None for zeros."""
    B, H, _, D = u.shape
    last = mx.zeros((B, H, 1, D), u.dtype) if last is None else last
    parents = mx.take(mx.concatenate([last, u], axis=2), windows(block, 2)[:, 0], axis=2)
    weight = weight.reshape(1, H, 2, 1, 1)
    return parents * weight[:, :, 0] + u * weight[:, :, 1]


def ngram_embedding(layer: nn.Module, input_ids: mx.array, cache: RecurrentBlock) -> mx.array:
    """Token embeddings with hashed n-grams of the node's own path added; the cache keeps the last n − 1 tokens."""
    block, keep = cache.block, layer.n - 1
    ids = input_ids.astype(mx.int64)
    stored = mx.zeros((ids.shape[0], 0), mx.int64) if cache[0] is None else cache[0]
    known = stored.shape[1]
    # Before the text begins every token counts as 0.
    rows = mx.concatenate([mx.zeros((ids.shape[0], keep - known), mx.int64), stored, ids], axis=1)

    def after(path: tuple[int, ...]) -> list[mx.array]:
        taken = last_rows(path, keep)[-min(keep, known + len(path)) :]
        return [mx.take(rows, mx.array(taken, mx.int32), axis=1)]

    cache.record(after)
    grams = mx.take(rows, windows(block, layer.n), axis=1)  # [B, N, n], the node's own token last
    x = layer.word_embeddings(ids)
    for (n, split), mods in layer._vocab_mods.items():
        index = (n - 2) * layer.k + split
        hashed = ids + sum(grams[..., -k] * mods[k - 2] for k in range(2, n + 1))
        x = x + layer.post_projs[index](layer.embedders[index](hashed % (layer.m + index * 2 + 1)))
    return x / (1 + layer.k * (layer.n - 1))
