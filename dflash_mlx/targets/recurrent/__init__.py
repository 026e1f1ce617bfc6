"""Recurrent layers of mlx-lm over an open block: one subclass per layer class, worn by an instance during a forward.

The subclass computes the layer over the block where its cache carries one, and is the class itself everywhere else.
A chain of one row takes mlx-lm's own step, so that undrafted decoding has its very bits and cost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

import mlx.nn as nn

from ...cache.lists import ListBlock
from ...cache.recurrent import RecurrentBlock
from . import layers_conv, layers_decay, layers_delta, layers_step


@dataclass(frozen=True)
class OverBlock:
    """How a layer class runs over a block. slots: those of its cache that are the layer's own, None for all."""

    run: Callable[..., Any]
    slots: tuple[int, ...] | None = None


# Model file and class of mlx-lm → the layer over a block.
LAYERS: dict[tuple[str, str], OverBlock] = {
    ("qwen3_next", "Qwen3NextGatedDeltaNet"): OverBlock(layers_delta.qwen3_next),
    ("qwen3_5", "GatedDeltaNet"): OverBlock(layers_delta.qwen3_5),
    ("olmo_hybrid", "GatedDeltaNet"): OverBlock(layers_delta.olmo_hybrid),
    ("kimi_linear", "KimiDeltaAttention"): OverBlock(layers_delta.kimi_linear),
    ("kimi_k3", "KimiK3DeltaAttention"): OverBlock(layers_delta.kimi_k3),
    ("bailing_moe_v3", "BailingKDA"): OverBlock(layers_delta.bailing_moe_v3),
    ("rwkv7", "Rwkv7TimeMixing"): OverBlock(layers_step.rwkv7_time_mixing, slots=(0, 1)),
    ("rwkv7", "Rwkv7ChannelMixing"): OverBlock(layers_step.rwkv7_channel_mixing, slots=(2,)),
    ("mamba2", "Mamba2Block"): OverBlock(layers_decay.mamba2),
    ("granitemoehybrid", "GraniteMoeHybridMamba2Mixer"): OverBlock(layers_decay.mamba2_in_hybrids),
    ("nemotron_h", "NemotronHMamba2Mixer"): OverBlock(layers_decay.mamba2_in_hybrids),
    ("falcon_h1", "FalconH1Mixer"): OverBlock(layers_decay.falcon_h1),
    ("plamo2", "Mamba"): OverBlock(layers_decay.plamo2),
    ("mamba", "MambaBlock"): OverBlock(layers_step.mamba),
    ("jamba", "JambaMambaMixer"): OverBlock(layers_step.jamba),
    ("bailing_moe_linear", "LinearAttention"): OverBlock(layers_step.bailing_moe_linear),
    ("bailing_hybrid", "LinearAttention"): OverBlock(layers_decay.bailing_hybrid),
    ("recurrent_gemma", "RecurrentBlock"): OverBlock(layers_step.recurrent_gemma),
    ("lfm2", "ShortConv"): OverBlock(layers_conv.lfm2),
    ("lfm2_moe", "ShortConv"): OverBlock(layers_conv.lfm2),
    ("gear", "ConvKVGatedMixer"): OverBlock(layers_conv.gear),
    ("baichuan_m1", "Attention"): OverBlock(layers_conv.baichuan_m1),
    ("longcat_flash_ngram", "NgramEmbedding"): OverBlock(layers_conv.ngram_embedding),
}


def recurrent_subclass(layer: nn.Module) -> type | None:
    """The subclass for a layer whose class keeps recurrent state; None for every other module."""
    base = type(layer)
    package, _, file = base.__module__.rpartition(".")
    over_block = LAYERS.get((file, base.__name__)) if package == "mlx_lm.models" else None
    return None if over_block is None else _subclass(base, over_block)  # type: ignore[arg-type]


def recurrent_swaps(model: nn.Module) -> list[tuple[nn.Module, type]]:
    """Every recurrent layer of the model with its subclass."""
    found = ((module, recurrent_subclass(module)) for module in model.modules())
    return [(module, subclass) for module, subclass in found if subclass is not None]


@cached
def _subclass(base: type, over_block: OverBlock) -> type:
    names = tuple(inspect.signature(base.__call__).parameters)[1:]

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False), **kwargs)
        cache = arguments.get("cache")
        if isinstance(cache, RecurrentBlock) and cache.block.size == 1:
            return base.__call__(layer, **arguments | {"cache": cache.one_row(over_block.slots)})
        if isinstance(cache, RecurrentBlock) or _leads_list(cache):
            return over_block.run(layer, **arguments)
        return base.__call__(layer, *args, **kwargs)

    return type(f"Block{base.__name__}", (base,), {"__call__": call})


def _leads_list(cache: Any) -> bool:
    """Whether this is a list of caches whose first carries a block: attention that convolves its keys and values."""
    return isinstance(cache, ListBlock) and isinstance(cache[0], RecurrentBlock)


__all__ = ["LAYERS", "OverBlock", "recurrent_subclass", "recurrent_swaps"]
