"""Layers of mlx-lm with a float32 state that decays and adds, over a block: Mamba-2 and lightning attention.

Each mirrors its own `__call__` up to the convolution and the recurrence; arguments as in layers_delta.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.ssm import compute_dt

from ...cache.recurrent import RecurrentBlock
from .linear_attention import linear_attention
from .short_conv import History, causal_conv, with_history


def convolved(x: mx.array, layer: nn.Module, cache: RecurrentBlock) -> tuple[mx.array, History]:
    history = with_history(x, cache[0], layer.conv_kernel_size - 1)
    return nn.silu(causal_conv(history, layer.conv1d.weight, layer.conv1d.get("bias"), cache.block)), history


def _ssm(
    layer: nn.Module,
    cache: RecurrentBlock,
    history: History,
    x: mx.array,
    B: mx.array,
    C: mx.array,
    dt: mx.array,
    D: mx.array,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
) -> mx.array:
    """mlx-lm's ssm_attn over the block: x [B, N, H, Dh], B and C [B, N, G, Ds], dt [B, N, H] to [B, N, H · Dh]."""
    dt = compute_dt(dt, layer.dt_bias, time_step_limit)
    log_decay = dt * -mx.exp(layer.A_log).astype(dt.dtype)
    y, tape = linear_attention(C, B, dt[..., None] * x, log_decay, cache[1], cache.block)
    cache.record(lambda path: [history.after(path), tape.after(path)])
    return (y.astype(x.dtype) + x * D[:, None]).flatten(2)


def _mamba2(layer: nn.Module, x: mx.array, cache: RecurrentBlock, *, cast_D: bool) -> tuple[mx.array, mx.array]:
    """Projection, convolution and recurrence that the Mamba-2 mixers share: output [B, N, H · Dh] and its gate."""
    projected = layer.in_proj(x)
    inner, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    gate, conv_input, dt = mx.split(projected, [inner, inner + layer.conv_dim], axis=-1)
    mixed, history = convolved(conv_input, layer, cache)
    hidden, B, C = mx.split(mixed, [inner, inner + states], axis=-1)
    y = _ssm(
        layer,
        cache,
        history,
        hidden.reshape(*x.shape[:2], layer.num_heads, layer.head_dim),
        B.reshape(*x.shape[:2], layer.n_groups, layer.ssm_state_size),
        C.reshape(*x.shape[:2], layer.n_groups, layer.ssm_state_size),
        dt,
        layer.D.astype(hidden.dtype) if cast_D else layer.D,
        layer.time_step_limit,
    )
    return y, gate


def mamba2(layer: nn.Module, hidden_states: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    return layer.out_proj(layer.norm(*_mamba2(layer, hidden_states, cache, cast_D=False)))


def mamba2_in_hybrids(layer: nn.Module, hidden_states: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    """Granite's and Nemotron-H's mixers."""
    return layer.out_proj(layer.norm(*_mamba2(layer, hidden_states, cache, cast_D=True)))


def falcon_h1(layer: nn.Module, input_states: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    y, gate = _mamba2(layer, input_states, cache, cast_D=False)
    return layer.out_proj(layer.norm(y, gate) if layer.mamba_rms_norm else swiglu(gate, y))


def plamo2(layer: nn.Module, hidden_states: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    B, N, _ = hidden_states.shape
    zx = layer.in_proj(hidden_states).reshape(B, N, layer.num_heads, -1)
    z, x = mx.split(zx, [layer.hidden_size_per_head], axis=-1)
    x, history = convolved(x.flatten(2), layer, cache)
    parts = mx.split(layer.bcdt_proj(x), [layer.d_state, layer.d_state * 2], axis=-1)
    weights = (layer.B_norm_weight, layer.C_norm_weight, layer.dt_norm_weight)
    eps = layer.config.rms_norm_eps
    in_, out, dt = (mx.fast.rms_norm(part, weight, eps) for part, weight in zip(parts, weights, strict=True))
    y = _ssm(
        layer,
        cache,
        history,
        x.reshape(B, N, layer.num_heads, layer.hidden_size_per_head),
        in_[:, :, None],
        out[:, :, None],
        layer.dt_proj(dt),
        layer.D,
    )
    return layer.out_proj(swiglu(z.flatten(-2), y))


def bailing_hybrid(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None, offset: int = 0) -> mx.array:
    """Its state stands as [B, H, Dk, Dv] in the cache."""
    q, k, v = lightning_heads(layer, x, offset)
    stored = None if cache[0] is None else cache[0].swapaxes(2, 3)
    y, tape = linear_attention(q, k, v, mx.broadcast_to(layer._slope, q.shape[:3]), stored, cache.block)
    cache.record(lambda path: [tape.after(path).swapaxes(2, 3)])
    return lightning_output(layer, x, y.astype(q.dtype))


def lightning_heads(layer: nn.Module, x: mx.array, offset: int) -> tuple[mx.array, mx.array, mx.array]:
    """Scaled queries, keys and values of Bailing's lightning attention, each [B, N, H, D]."""
    B, N, _ = x.shape
    qkv = layer.query_key_value(x).reshape(B, N, -1, layer.head_dim).swapaxes(1, 2)
    q, k, v = mx.split(qkv, 3, axis=1)
    if layer.use_qk_norm:
        q, k = layer.query_layernorm(q), layer.key_layernorm(k)
    q, k = layer.rope(q, offset=offset), layer.rope(k, offset=offset)
    return (q * layer.scale).swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def lightning_output(layer: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return layer.dense(layer.g_norm(y.flatten(2)) * mx.sigmoid(layer.g_proj(x)))
