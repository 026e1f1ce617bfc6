"""Layers of mlx-lm whose state only decays and adds, over a block: Mamba-1, Mamba-2, lightning attention, RG-LRU.

Each mirrors its own `__call__` up to the convolution and the recurrence; arguments as in layers_delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.ssm import compute_dt

from ...cache.recurrent import RecurrentBlock
from .linear_attention import linear_attention
from .scan import decayed_scan, gated_scan, selective_scan
from .short_conv import History, causal_conv, with_history


def _convolved(x: mx.array, layer: nn.Module, cache: RecurrentBlock) -> tuple[mx.array, History]:
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
    mixed, history = _convolved(conv_input, layer, cache)
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
    x, history = _convolved(x.flatten(2), layer, cache)
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


def _mamba1(
    layer: nn.Module, x: mx.array, cache: RecurrentBlock, normed: Callable[..., tuple[mx.array, mx.array, mx.array]]
) -> mx.array:
    x, z = mx.split(layer.in_proj(x), 2, axis=-1)
    x, history = _convolved(x, layer, cache)
    rank, size = layer.time_step_rank, layer.ssm_state_size
    delta, B, C = normed(*mx.split(layer.x_proj(x), [rank, rank + size], axis=-1))
    delta = nn.softplus(layer.dt_proj(delta))
    y, tape = selective_scan(x, delta, -mx.exp(layer.A_log), B, C, cache[1], cache.block)
    cache.record(lambda path: [history.after(path), tape.after(path)])
    return layer.out_proj(swiglu(z, y + layer.D * x))


def mamba(layer: nn.Module, x: mx.array, cache: RecurrentBlock) -> mx.array:
    def normed(*parts: mx.array) -> tuple[mx.array, ...]:
        if not layer.use_bcdt_rms:
            return parts
        return tuple(mx.fast.rms_norm(part, weight=None, eps=layer.args.mixer_rms_eps) for part in parts)

    return _mamba1(layer, x, cache, normed)


def jamba(layer: nn.Module, x: mx.array, cache: RecurrentBlock) -> mx.array:
    def normed(delta: mx.array, B: mx.array, C: mx.array) -> tuple[mx.array, ...]:
        return layer.dt_layernorm(delta), layer.b_layernorm(B), layer.c_layernorm(C)

    return _mamba1(layer, x, cache, normed)


def bailing_moe_linear(
    layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None, offset: int = 0
) -> mx.array:
    return _lightning(layer, x, cache, offset, x.dtype)


def bailing_hybrid(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None, offset: int = 0) -> mx.array:
    return _lightning(layer, x, cache, offset, mx.float32)


def _lightning(layer: nn.Module, x: mx.array, cache: RecurrentBlock, offset: int, dtype: mx.Dtype) -> mx.array:
    """Lightning attention; mlx-lm stores its state as [B, H, Dk, Dv] in `dtype`, and rounds the decay to it."""
    B, N, _ = x.shape
    qkv = layer.query_key_value(x).reshape(B, N, -1, layer.head_dim).swapaxes(1, 2)
    q, k, v = mx.split(qkv, 3, axis=1)
    if layer.use_qk_norm:
        q, k = layer.query_layernorm(q), layer.key_layernorm(k)
    q, k = layer.rope(q, offset=offset), layer.rope(k, offset=offset)
    q, k, v = (part.swapaxes(1, 2) for part in (q * layer.scale, k, v))
    decay = mx.exp(layer._slope).astype(dtype)
    if dtype == mx.float32:
        stored = None if cache[0] is None else cache[0].swapaxes(2, 3)
        log_decay = mx.broadcast_to(mx.log(decay), q.shape[:3])
        y, sums = linear_attention(q, k, v, log_decay, stored, cache.block)
        cache.record(lambda path: [sums.after(path).swapaxes(2, 3)])
    else:
        y, steps = decayed_scan(q, k, v, decay, cache[0], cache.block)
        cache.record(lambda path: [steps.after(path)])
    return layer.dense(layer.g_norm(y.astype(q.dtype).flatten(2)) * mx.sigmoid(layer.g_proj(x)))


def recurrent_gemma(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    gate = nn.gelu_approx(layer.linear_y(x))
    history = with_history(layer.linear_x(x), cache[0], layer.conv1d_temporal_width - 1)
    x = causal_conv(history, layer.conv_1d.weight, layer.conv_1d.bias, cache.block)
    h = gated_scan(*_rg_lru(layer.rg_lru, x, cache[1] is None), cache[1], cache.block)
    cache.record(lambda path: [history.after(path), h[:, path[-1]]])
    return layer.linear_out(h * gate)


def _rg_lru(unit: nn.Module, x: mx.array, fresh: bool) -> tuple[mx.array, mx.array]:
    """What the RG-LRU adds at each node, and its decay, each [B, N, C]. The first of a sequence is not damped."""
    B, N, _ = x.shape
    heads = x.reshape(B, N, unit.num_heads, unit.head_dim).swapaxes(1, 2)

    def gate(weight: mx.array, bias: mx.array) -> mx.array:
        return mx.sigmoid(((heads @ weight).swapaxes(1, 2) + bias).flatten(2, 3))

    log_a = -8.0 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias) * nn.softplus(unit.recurrent_param)
    damping = mx.sqrt(1 - mx.exp(2 * log_a))
    if fresh:
        damping[:, 0] = 1.0
    return x * gate(unit.input_gate_weight, unit.input_gate_bias) * damping.astype(x.dtype), mx.exp(log_a)
