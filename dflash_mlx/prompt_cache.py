"""A prompt cache is mlx-lm's list of mlx-lm's caches; ours can carry the draft context of the same tokens beside it.

The draft context never stands in the list itself, so every function of mlx-lm takes the list as its own.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as plain

from .draft import DFlashDraft, DraftContext
from .errors import CheckpointError

POSITION, LAYERS = "draft_context_position", "draft_context_layers"


class PromptCache(list):
    """A list of mlx-lm caches that remembers the draft context which belongs to them."""

    _context: DraftContext | None = None
    _draft: DFlashDraft | None = None
    _stored: dict[str, Any] | None = None  # read from a file, for a draft that is not known yet

    def draft_context(self, draft: DFlashDraft, position: int) -> DraftContext | None:
        """The context for `draft`, when it covers the caches up to `position` exactly; else None."""
        if self._stored is not None and _fits(self._stored, draft):
            self._context, self._draft = _rebuilt(self._stored, draft), draft
        self._stored = None
        same = self._draft is draft and self._context is not None and self._context.position == position
        return self._context if same else None

    def remember(self, draft: DFlashDraft, context: DraftContext | None) -> None:
        self._draft, self._context, self._stored = draft, context, None

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        """What mlx-lm's server does to share a prefix; the draft stays one and the same."""
        twin = PromptCache(copy.deepcopy(cache, memo) for cache in self)
        twin._context, twin._draft = copy.deepcopy(self._context, memo), self._draft
        twin._stored = self._stored
        return twin


def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> PromptCache:
    """mlx_lm's make_prompt_cache, as a list that keeps the draft context from turn to turn."""
    return PromptCache(plain.make_prompt_cache(model, max_kv_size))


def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
    """Save in mlx-lm's file format, with the draft context where there is one; mlx-lm reads such a file as its own."""
    context = cache._context if isinstance(cache, PromptCache) else None
    if context is None:
        plain.save_prompt_cache(file_name, cache, metadata)
        return
    rows = context.rows()
    metadata = dict(metadata or {}) | {POSITION: str(context.position), LAYERS: str(len(rows))}
    # mlx-lm pairs states with classes by place and looks no further, so a state behind the last class is ours.
    plain.save_prompt_cache(file_name, cache, metadata)
    arrays, head = mx.load(file_name, return_metadata=True)
    extra = {f"{len(cache)}.{i}.{j}": x for i, pair in enumerate(rows) for j, x in enumerate(pair)}
    mx.save_safetensors(file_name, arrays | extra, head)


def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
    """Load a file that mlx-lm or this module saved: a PromptCache or, on request, (PromptCache, metadata).

    CheckpointError when the file cannot be read.
    """
    try:
        caches, metadata = plain.load_prompt_cache(file_name, return_metadata=True)
        cache = PromptCache(caches)
        if POSITION in metadata:
            position, layers = int(metadata.pop(POSITION)), int(metadata.pop(LAYERS))
            cache._stored = {"position": position, "layers": _layers(mx.load(file_name), len(caches), layers)}
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"The prompt cache {file_name} cannot be read ({error}); make it again.") from error
    return (cache, metadata) if return_metadata else cache


def _layers(arrays: dict[str, mx.array], place: int, count: int) -> list[tuple[mx.array, mx.array]]:
    return [(arrays[f"{place}.{i}.0"], arrays[f"{place}.{i}.1"]) for i in range(count)]


def _fits(stored: dict[str, Any], draft: DFlashDraft) -> bool:
    shape = (draft.config.num_key_value_heads, draft.config.head_dim)
    layers = stored["layers"]
    return len(layers) == draft.config.num_hidden_layers and all(
        (keys.shape[1], keys.shape[3]) == shape and keys.dtype == draft.dtype for keys, _ in layers
    )


def _rebuilt(stored: dict[str, Any], draft: DFlashDraft) -> DraftContext:
    context = draft.make_context(stored["position"])
    for layer, (keys, values) in enumerate(stored["layers"]):
        context.append(layer, keys, values)
    return context
