"""Layers of mlx-lm that keep their state in the dtype of the activations: Mamba-1, RG-LRU, RWKV-7, lightning attention.

Each mirrors its own `__call__` up to the convolution and the recurrence; arguments as in layers_delta.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ...cache.recurrent import RecurrentBlock
from .layers_decay import convolved, lightning_heads, lightning_output
from .scan import Step, decayed_scan, gated_scan, scan, selective_scan
from .short_conv import causal_conv, shifted, with_history


def _mamba1(
    layer: nn.Module, x: mx.array, cache: RecurrentBlock, normed: Callable[..., tuple[mx.array, mx.array, mx.array]]
) -> mx.array:
    x, z = mx.split(layer.in_proj(x), 2, axis=-1)
    x, history = convolved(x, layer, cache)
    rank, size = layer.time_step_rank, layer.ssm_state_size
    delta, B, C = normed(*mx.split(layer.x_proj(x), [rank, rank + size], axis=-1))
    delta = nn.softplus(layer.dt_proj(delta))
    y, states = selective_scan(x, delta, -mx.exp(layer.A_log), B, C, cache[1], cache.block)
    cache.record(lambda path: [history.after(path), states.after(path)])
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
    q, k, v = lightning_heads(layer, x, offset)
    y, states = decayed_scan(q, k, v, mx.exp(layer._slope).astype(q.dtype), cache[0], cache.block)
    cache.record(lambda path: [states.after(path)])
    return lightning_output(layer, x, y)


def recurrent_gemma(layer: nn.Module, x: mx.array, cache: RecurrentBlock, mask: Any = None) -> mx.array:
    gate = nn.gelu_approx(layer.linear_y(x))
    history = with_history(layer.linear_x(x), cache[0], layer.conv1d_temporal_width - 1)
    x = causal_conv(history, layer.conv_1d.weight, layer.conv_1d.bias, cache.block)
    h, states = gated_scan(*_rg_lru(layer.rg_lru, x, cache[1] is None), cache[1], cache.block)
    cache.record(lambda path: [history.after(path), states.after(path)])
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


def _per_head(layer: nn.Module, x: mx.array) -> mx.array:
    return x.reshape(*x.shape[:2], layer.num_heads, layer.head_dim)


def rwkv7_time_mixing(
    layer: nn.Module, x: mx.array, v_first: mx.array | None, cache: RecurrentBlock
) -> tuple[mx.array, mx.array]:
    B, N, E = x.shape
    history = with_history(x, cache[0], 1)
    step = shifted(history, cache.block) - x

    def mixed(weight: mx.array) -> mx.array:
        return x + step * weight

    xv = mixed(layer.x_v)
    key, value = _per_head(layer, layer.k_proj(mixed(layer.x_k))), _per_head(layer, layer.v_proj(xv))
    receptance = _per_head(layer, layer.r_proj(mixed(layer.x_r)))
    rate = _per_head(layer, mx.sigmoid(layer.a_lora(mixed(layer.x_a))))
    if layer.layer_idx == 0:
        v_first = value
    else:
        value = value + (v_first - value) * _per_head(layer, mx.sigmoid(layer.v_lora(xv)))
    decay = mx.sigmoid(_per_head(layer, layer.w_lora(mixed(layer.x_w)))).astype(mx.float32)
    decay = mx.exp(-0.606531 * decay).astype(receptance.dtype)
    direction = key * layer.k_k
    direction = direction / mx.maximum(mx.linalg.norm(direction, axis=-1, keepdims=True), 1e-7)
    key = key * (1 + (rate - 1) * layer.k_a)
    parts = (receptance, decay, key, value, -direction, direction * rate)
    y, states = scan(cache[1], _wkv_step(layer, parts), cache.block)
    cache.record(lambda path: [history.after(path), states.after(path)], slots=(0, 1))

    out = layer.g_norm(y)
    out = out + (receptance * key * layer.r_k).sum(axis=-1, keepdims=True) * value
    return layer.o_proj(out.reshape(B, N, E) * layer.g_lora(mixed(layer.x_g))), v_first


def _wkv_step(layer: nn.Module, parts: tuple[mx.array, ...]) -> Step:
    """The layer's own step, with the nodes of a level as its batch; parts: [B, N, H, D] each."""

    def step(parents: mx.array | None, nodes: mx.array) -> tuple[mx.array, mx.array]:
        rows = [mx.take(part, nodes, axis=1) for part in parts]
        flat = [row.flatten(0, 1)[:, None] for row in rows]
        y, states = layer._wkv7(*flat, None if parents is None else parents.flatten(0, 1))
        return states.reshape(*rows[0].shape[:2], *states.shape[1:]), y.reshape(rows[0].shape)

    return step


def rwkv7_channel_mixing(layer: nn.Module, x: mx.array, cache: RecurrentBlock) -> mx.array:
    history = with_history(x, cache[2], 1)
    cache.record(lambda path: [history.after(path)], slots=(2,))
    mixed = x + (shifted(history, cache.block) - x) * layer.x_k
    return layer.value(nn.relu2(layer.key(mixed)))
