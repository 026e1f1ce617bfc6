"""The output of a captured layer is read while the layer runs; what that output is differs in two families."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .anatomy import family
from .instrument import Swaps


@dataclass(frozen=True)
class TapPoint:
    """Where the output [B, L, E] of a layer can be read: `read(argument, result)` of a call of `module`."""

    module: nn.Module
    read: Callable[[Any, Any], mx.array]


def _result(argument: Any, result: Any) -> mx.array:
    return result[0] if isinstance(result, tuple) else result


def _active_stream(layers: list[nn.Module], layer_id: int) -> TapPoint:
    """Of the stacked streams [n, B, L, E] the one that attention and MLP work on."""
    layer = layers[layer_id]
    return TapPoint(layer, lambda argument, result: result[layer.config.altup_active_idx])


def _next_input(layers: list[nn.Module], layer_id: int, norm: nn.Module) -> TapPoint:
    """A model that calls the parts of its layers itself: what a layer puts out is what the next norm takes in."""
    module = layers[layer_id + 1].input_layernorm if layer_id + 1 < len(layers) else norm
    return TapPoint(module, lambda argument, result: argument)


def tap_point(model: nn.Module, layer_id: int) -> TapPoint:
    layers = list(model.layers)
    files = {family(model), family(layers[layer_id])}
    if "gemma3n" in files:
        return _active_stream(layers, layer_id)
    if "iquestloopcoder" in files:
        return _next_input(layers, layer_id, model.model.norm)
    return TapPoint(layers[layer_id], _result)


class Taps:
    """Records the outputs of the captured layers during a forward of the thread that owns it."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        self._layer_ids = layer_ids
        self._recorded: dict[int, mx.array] = {}
        self._thread = threading.get_ident()
        points = [(i, tap_point(model, i)) for i in sorted(set(layer_ids))]
        self.swaps: Swaps = [(point.module, self._subclass(point, i)) for i, point in points]

    def _subclass(self, point: TapPoint, layer_id: int) -> type:
        base = type(point.module)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = base.__call__(module, *args, **kwargs)
            if threading.get_ident() == self._thread:
                # A looped model calls a layer several times: its last output counts.
                self._recorded[layer_id] = point.read(args[0] if args else None, result)
            return result

        return type(f"Tapped{base.__name__}", (base,), {"__call__": call})

    def take(self) -> mx.array | None:
        """The target hidden [B, L, n_captured × E] of the last forward, in the order of the layer ids."""
        if not self._layer_ids:
            return None
        hidden = mx.concatenate([self._recorded[i] for i in self._layer_ids], axis=-1)
        self._recorded.clear()
        return hidden
