"""Gated delta layers of mlx-lm over a block; each mirrors its own `__call__` up to the convolution and the recurrence.

A function takes the layer (an instance of mlx-lm's class), its own arguments, and a cache that carries an open block.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import normalize_qk

from ...cache.recurrent import RecurrentBlock
from .gated_delta import gated_delta
from .short_conv import History, causal_conv, with_history


def softplus_log_gate(A_log: mx.array, a: mx.array, dt_bias: mx.array) -> mx.array:
    """The logarithm of mlx-lm's compute_g, in its dtypes; never the log of a gate, which may have underflowed."""
    return -mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias)


def bounded_log_gate(A_log: mx.array, a: mx.array, dt_bias: mx.array, lower_bound: float) -> mx.array:
    """The logarithm of mlx-lm's compute_lower_bound_g."""
    return lower_bound * mx.sigmoid(mx.exp(A_log.astype(mx.float32)) * (a.astype(mx.float32) + dt_bias))


def _convolved(
    x: mx.array, conv: nn.Module, kernel_size: int, cache: RecurrentBlock, slot: int = 0
) -> tuple[mx.array, History]:
    history = with_history(x, cache[slot], kernel_size - 1)
    return nn.silu(causal_conv(history, conv.weight, conv.get("bias"), cache.block)), history


def _convolved_each(
    x: mx.array, kernel_size: int, cache: RecurrentBlock, *projections: tuple[nn.Module, nn.Module]
) -> tuple[list[mx.array], list[History]]:
    """Queries, keys and values with a convolution each; slot i of the cache is the history of the i-th."""
    pairs = [_convolved(project(x), conv, kernel_size, cache, i) for i, (project, conv) in enumerate(projections)]
    return [mixed for mixed, _ in pairs], [history for _, history in pairs]


def _rule(
    cache: RecurrentBlock,
    histories: list[History],
    qkv: tuple[mx.array, mx.array, mx.array],
    log_gate: mx.array,
    beta: mx.array,
) -> mx.array:
    """The recurrence behind the convolutions; their histories and the state, in this order, are the cache's slots."""
    q, k, v = qkv
    q, k = normalize_qk(q, k, inv_scale=q.shape[-1] ** -0.5, eps=1e-6)
    y, tape = gated_delta(q, k, v, log_gate, beta, cache[len(histories)], cache.block)
    cache.record(lambda path: [*(history.after(path) for history in histories), tape.after(path)])
    return y.astype(q.dtype)


def _split_heads(layer: nn.Module, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    B, N, _ = mixed.shape
    q, k, v = mx.split(mixed, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    return (
        q.reshape(B, N, layer.num_k_heads, layer.head_k_dim),
        k.reshape(B, N, layer.num_k_heads, layer.head_k_dim),
        v.reshape(B, N, layer.num_v_heads, layer.head_v_dim),
    )


def qwen3_next(layer: nn.Module, inputs: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = inputs.shape
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(inputs), layer.in_proj_ba(inputs))
    qkv = mx.concatenate([x.reshape(B, N, -1) for x in (q, k, v)], axis=-1)
    mixed, history = _convolved(qkv, layer.conv1d, layer.conv_kernel_size, cache)
    log_gate = softplus_log_gate(layer.A_log, a, layer.dt_bias)
    out = _rule(cache, [history], _split_heads(layer, mixed), log_gate, mx.sigmoid(b))
    return layer.out_proj(layer.norm(out, z).reshape(B, N, -1))


def qwen3_5(layer: nn.Module, inputs: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = inputs.shape
    z = layer.in_proj_z(inputs).reshape(B, N, layer.num_v_heads, layer.head_v_dim)
    b, a = layer.in_proj_b(inputs), layer.in_proj_a(inputs)
    mixed, history = _convolved(layer.in_proj_qkv(inputs), layer.conv1d, layer.conv_kernel_size, cache)
    log_gate = softplus_log_gate(layer.A_log, a, layer.dt_bias)
    out = _rule(cache, [history], _split_heads(layer, mixed), log_gate, mx.sigmoid(b))
    out = layer.out_proj(layer.norm(out, z).reshape(B, N, -1))
    return out if layer.sharding_group is None else mx.distributed.all_sum(out, group=layer.sharding_group)


def olmo_hybrid(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = x.shape
    mixed, histories = _convolved_each(
        x,
        layer.conv_kernel_size,
        cache,
        (layer.q_proj, layer.q_conv1d),
        (layer.k_proj, layer.k_conv1d),
        (layer.v_proj, layer.v_conv1d),
    )
    qkv = _split_heads(layer, mx.concatenate(mixed, axis=-1))
    beta = mx.sigmoid(layer.b_proj(x)) * (2.0 if layer.allow_neg_eigval else 1.0)
    log_gate = softplus_log_gate(layer.A_log, layer.a_proj(x), layer.dt_bias)
    out = _rule(cache, histories, qkv, log_gate, beta).reshape(-1, layer.head_v_dim)
    out = layer.o_norm(out, layer.g_proj(x).reshape(-1, layer.head_v_dim))
    return layer.o_proj(out.reshape(B, N, -1))


def _per_head(layer: nn.Module, x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:2], layer.num_heads, layer.head_dim)


def _by_channel(layer: nn.Module) -> tuple[mx.array, mx.array]:
    """A_log and dt_bias of a gate per key channel."""
    return layer.A_log.reshape(layer.num_heads, 1), layer.dt_bias.reshape(layer.num_heads, layer.head_dim)


def kimi_linear(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = x.shape
    mixed, histories = _convolved_each(
        x,
        layer.conv_kernel,
        cache,
        (layer.q_proj, layer.q_conv.conv),
        (layer.k_proj, layer.k_conv.conv),
        (layer.v_proj, layer.v_conv.conv),
    )
    A_log, dt_bias = _by_channel(layer)
    log_gate = softplus_log_gate(A_log, _per_head(layer, layer.f_b_proj(layer.f_a_proj(x))), dt_bias)
    qkv = tuple(_per_head(layer, m) for m in mixed)
    out = _rule(cache, histories, qkv, log_gate, mx.sigmoid(layer.b_proj(x)))
    gate = _per_head(layer, layer.g_b_proj(layer.g_a_proj(x)))
    return layer.o_proj((layer.o_norm(out) * mx.sigmoid(gate)).reshape(B, N, -1))


def kimi_k3(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = x.shape
    mixed, history = _convolved(layer.qkv_proj(x), layer.qkv_conv.conv, layer.conv_kernel, cache)
    qkv = tuple(_per_head(layer, m) for m in mx.split(mixed, 3, axis=-1))
    A_log, dt_bias = _by_channel(layer)
    a = _per_head(layer, layer.f_b_proj(layer.f_a_proj(x)))
    if layer.lower_bound is None:
        log_gate = softplus_log_gate(A_log, a, dt_bias)
    else:
        log_gate = bounded_log_gate(A_log, a, dt_bias, layer.lower_bound)
    out = _rule(cache, [history], qkv, log_gate, mx.sigmoid(layer.b_proj(x)))
    gate = layer.g_proj(x) if layer.use_full_rank_gate else layer.g_b_proj(layer.g_a_proj(x))
    return layer.o_proj((layer.o_norm(out) * mx.sigmoid(_per_head(layer, gate))).reshape(B, N, -1))


def bailing_moe_v3(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = x.shape
    mixed, histories = _convolved_each(
        x,
        layer.conv_kernel_size,
        cache,
        (layer.q_proj, layer.q_conv1d),
        (layer.k_proj, layer.k_conv1d),
        (layer.v_proj, layer.v_conv1d),
    )
    A_log, dt_bias = _by_channel(layer)
    log_gate = bounded_log_gate(A_log, _per_head(layer, layer.f_proj(x)), dt_bias, layer.lower_bound)
    qkv = tuple(_per_head(layer, m) for m in mixed)
    beta = mx.sigmoid(layer.b_proj(x).astype(mx.float32))
    out = layer.o_norm(_rule(cache, histories, qkv, log_gate, beta))
    gate = mx.sigmoid(_per_head(layer, layer.g_proj(x)).astype(mx.float32)).astype(out.dtype)
    return layer.o_proj((out * gate).reshape(B, N, -1))
