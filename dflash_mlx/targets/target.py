"""Between two rounds the target's caches hold every committed token except the anchor.

A `Target` is one generation's view of an mlx-lm model: the model itself is shared and stays untouched, the caches
belong to this generation. From the first verify until `finish` the caller's list holds stand-ins in their place, so
that caches which a failure left in an unknown state are never used in silence, by this package or by mlx-lm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..cache import Block, BlockCache, carry
from ..errors import TargetStateError, UnsupportedTargetError
from .anatomy import Anatomy, dissect
from .instrument import Swaps, swapped, tree_swaps
from .recurrent import recurrent_swaps
from .support import chain_refusal, tree_refusal
from .taps import Taps
from .verification import Verification


@dataclass(frozen=True)
class KVQuantization:
    """mlx-lm's kv_bits, kv_group_size and quantized_kv_start."""

    bits: int
    group_size: int = 64
    start: int = 5000

    def due(self, cache: Any) -> bool:
        return hasattr(cache, "to_quantized") and cache.offset >= self.start

    def quantized(self, cache: Any) -> Any:
        return cache.to_quantized(group_size=self.group_size, bits=self.bits)


class LentCache:
    """Stands in the caller's list for a cache that a generation has taken and has not handed back."""

    def __getattr__(self, name: str) -> Any:
        raise TargetStateError(
            "This prompt cache belongs to a generation that has not ended, or that failed in a way that cannot be "
            "undone; end that generation, or start again from a fresh prompt cache."
        )

    def __getitem__(self, index: int) -> Any:
        return self.__getattr__("cache")


class Target:
    """The target model during one generation (DESIGN, section 4).

    model: an mlx-lm model. prompt_cache: the caller's list of mlx-lm caches; it is changed in place and holds
    mlx-lm's own classes again after `release`. capture_layer_ids: layers whose outputs are the target hidden.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_cache: list[Any],
        *,
        capture_layer_ids: tuple[int, ...] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        kv_quantization: KVQuantization | None = None,
    ):
        refusal = chain_refusal(model)
        if refusal is not None:
            raise UnsupportedTargetError(refusal)
        self.model = model
        self.eos_token_ids = eos_token_ids
        self._prompt_cache = prompt_cache
        self._stock = list(prompt_cache)  # mlx-lm's objects, whatever stands in the caller's list
        self._kv_quantization = kv_quantization
        self._taps = Taps(model, capture_layer_ids)
        self._caches: list[BlockCache] = []
        self._opened: list[BlockCache] = []  # those that the current block reached
        self._failed = False
        self._stepped = False  # mlx-lm quantizes behind a chunk or a step, never before the first
        self.position = self._base = _offset(prompt_cache)

    @cached_property
    def tree_refusal(self) -> str | None:
        """Why this target verifies chains only; None where it takes trees."""
        return tree_refusal(self.model)

    # The parts that a draft shares.

    @cached_property
    def anatomy(self) -> Anatomy:
        return dissect(self.model)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [.., E] with the model's own scale."""
        scale = self.anatomy.embedding_scale
        embedded = self.anatomy.embed_tokens(tokens)
        return embedded if scale == 1.0 else embedded * scale

    @property
    def lm_head(self) -> Callable[[mx.array], mx.array]:
        """Hidden [.., E] to raw logits [.., V]."""
        return self.anatomy.lm_head

    @property
    def embed_tokens(self) -> nn.Module:
        return self.anatomy.embed_tokens

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hidden [.., E] to logits [.., V] with everything the target does to them."""
        return self.anatomy.logits_transform(self.anatomy.lm_head(hidden))

    def head_topk(self, hidden: mx.array, k: int, temperature: float = 1.0) -> tuple[mx.array, mx.array]:
        """The k most probable tokens, best first: ids and probabilities, each [.., k]."""
        logits = self.head(hidden).astype(mx.float32) / temperature
        ids = mx.argpartition(-logits, k - 1, axis=-1)[..., :k]
        logprobs = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
        order = mx.argsort(-logprobs, axis=-1)
        return mx.take_along_axis(ids, order, axis=-1), mx.exp(mx.take_along_axis(logprobs, order, axis=-1))

    # One generation.

    def prefill(self, tokens: mx.array, step_size: int) -> Iterator[tuple[int, mx.array | None]]:
        """Run the prompt [n] through plain mlx-lm, all but its last token, in chunks.

        Yields (tokens done so far, hidden [1, chunk, ..]) before a chunk is evaluated, so that the consumer's work
        on it joins the graph. The last token is left for the first one-row step, as mlx-lm does.
        """
        done, last = 0, tokens.size - 1
        while done < last:
            chunk = tokens[done : min(done + step_size, last)]
            with swapped(self._taps.swaps):
                self.model(chunk[None], cache=self._stock)
                hidden = self._taps.take()
            self._quantize_where_due()
            done += chunk.size
            self.position += chunk.size
            yield done, hidden
            mx.eval([c.state for c in self._stock])
            mx.clear_cache()

    @property
    def widest(self) -> int:
        """How many rows the next verify may have: a block must not cross the start of KV quantization."""
        if self._kv_quantization is None:
            return sys.maxsize
        quantized_later = [c.offset for c in self._stock if isinstance(c, KVCache)]
        return max(1, min((self._kv_quantization.start - offset for offset in quantized_later), default=sys.maxsize))

    def verify(self, proposal: Any) -> Verification:
        """One forward over a proposal (`tokens` int [1, N] and their `block`); a lazy graph.

        The block stays open until `commit` or `abort`.
        """
        if self._failed:
            raise TargetStateError("The caches of this generation are damaged; start again from a fresh prompt cache.")
        if not proposal.block.is_chain and self.tree_refusal is not None:
            raise UnsupportedTargetError(self.tree_refusal)
        self._open(proposal.block)
        with swapped(self._swaps(proposal.block)):
            logits = self.model(proposal.tokens, cache=self._caches)
            hidden = self._taps.take()
        return Verification(logits, hidden)

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the rows of `path` (nodes from the anchor on) and drop the rest of the block; lazy."""
        for cache in self._caches:
            cache.commit(path)
        self._stepped = True
        self.position = self._base + len(path)

    def rewind(self, rows: int) -> None:
        """Shorten what the last commit kept to its first `rows` rows; 0 undoes the whole block.

        TargetStateError when a cache cannot go back.
        """
        try:
            for cache in self._opened:
                cache.rewind(rows)
        except Exception as error:
            self._failed = True
            raise TargetStateError("A failed round could not be undone; start from a fresh prompt cache.") from error
        if self._opened:
            self.position = self._base + rows

    def seal(self) -> None:
        """The last commit stands: from here `abort` undoes nothing until the next verify."""
        self._opened = []

    def abort(self) -> None:
        """Undo a block whose forward or commit failed: the caches are at the last committed state again."""
        self.rewind(0)

    def lose(self) -> None:
        """The caches are in an unknown state: `verify` refuses from here on and `finish` does not hand them back."""
        self._failed = True

    @property
    def is_lost(self) -> bool:
        return self._failed

    def snapshot(self) -> Any:
        """The committed state of now, O(1) and without a copy of K/V."""
        return self.position, [cache.snapshot() for cache in self._carried()]

    def restore(self, snapshot: Any) -> None:
        self.position, states = snapshot
        self._opened = []
        for cache, state in zip(self._carried(), states, strict=True):
            cache.restore(state)

    def finish(self) -> None:
        """Evaluate what is pending and give the caller's list mlx-lm's own caches back; idempotent.

        The list has them all or, when this fails or the caches are lost, none.
        """
        if self._failed or not self._caches:
            return
        for cache in self._caches:
            mx.eval(cache.arrays())
        self._stock = [cache.release() for cache in self._caches]
        self._prompt_cache[:] = self._stock
        self._caches, self._opened = [], []
        self._quantize_where_due()

    def arrays(self) -> list[mx.array]:
        """What is pending in the caches."""
        return [array for cache in self._caches for array in cache.arrays()]

    def _carried(self) -> list[BlockCache]:
        if not self._caches:
            self._caches = [carry(cache) for cache in self._stock]
            self._prompt_cache[:] = [LentCache() for _ in self._caches]
        return self._caches

    def _open(self, block: Block) -> None:
        if self._stepped:
            self._quantize_where_due()
        caches = self._carried()
        self._failed = True  # a cache that is interrupted while it opens cannot be undone
        self._base, self._opened = self.position, []
        for cache in caches:
            cache.open(block)
            self._opened.append(cache)
        self._failed = False

    @cached_property
    def _chain_swaps(self) -> Swaps:
        """Attention takes mlx-lm's own path: an integer offset, the stock mask and kernels."""
        return [*recurrent_swaps(self.model), *self._taps.swaps]

    def _swaps(self, block: Block) -> Swaps:
        return self._chain_swaps if block.is_chain else [*self._chain_swaps, *tree_swaps(self.model, block)]

    def _quantize_where_due(self) -> None:
        if self._kv_quantization is None:
            return
        for i, cache in enumerate(self._stock):
            if self._kv_quantization.due(cache):
                self._stock[i] = self._kv_quantization.quantized(cache)
                if self._caches:
                    self._caches[i] = carry(self._stock[i])
                else:
                    self._prompt_cache[i] = self._stock[i]


def _offset(caches: Any) -> int:
    """Tokens that the caches hold, from the first that counts them; a list of caches is looked into."""
    for cache in caches:
        offset = _offset(cache.caches) if hasattr(cache, "caches") else getattr(cache, "offset", 0)
        if isinstance(offset, int) and offset:
            return offset
    return 0
