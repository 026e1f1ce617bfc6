"""What DFlash 2 adds: rows of the block see their predecessors through convolutions, tokens through a selector.

A layer's attention and its MLP stand between two causal convolutions over the block's rows. Of every position's best
tokens the selector chooses one by its logit and by how well it follows the token chosen before.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .candidates import largest
from .config import Convolution, Selector
from .drafted import Drafted


class GroupedConvolution(nn.Module):
    """Two causal convolutions over the rows, one before and one behind a part of a layer.

    A channel's kernel is its own (`base_kernel` [2, K, E]) plus what the part's input says for its group in this row.
    """

    def __init__(self, hidden_size: int, config: Convolution):
        super().__init__()
        self._groups = hidden_size // config.group_size
        self.base_kernel = mx.zeros((2, config.kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.kernel_size * self._groups, bias=False)

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The part's input [1, L, E] convolved, and the kernel of `behind`."""
        kernels = self.kernel_projection(x).reshape(*x.shape[:-1], 2, -1, self._groups, 1)
        return self._convolve(x, kernels[..., 0, :, :, :], 0), kernels[..., 1, :, :, :]

    def behind(self, x: mx.array, kernel: mx.array) -> mx.array:
        """The part's output [1, L, E] convolved."""
        return self._convolve(x, kernel, 1)

    def _convolve(self, x: mx.array, dynamic: mx.array, side: int) -> mx.array:
        """x [1, L, E] with what its rows add to the base kernel, [1, L, K, G, 1]."""
        kernel_size, length = dynamic.shape[2], x.shape[1]
        base = self.base_kernel[side].reshape(kernel_size, self._groups, -1).astype(x.dtype)
        rows = mx.pad(x.reshape(1, length, self._groups, -1), ((0, 0), (kernel_size - 1, 0), (0, 0), (0, 0)))
        out = (base[0] + dynamic[:, :, 0]) * rows[:, kernel_size - 1 :]
        for back in range(1, kernel_size):
            first = kernel_size - 1 - back
            out = out + (base[back] + dynamic[:, :, back]) * rows[:, first : first + length]
        return out.reshape(x.shape)


class CandidateSelector(nn.Module):
    """Scores of a position's best tokens: logit + Σ_r predecessor_r · hidden_r · successor_r."""

    def __init__(self, vocab_size: int, hidden_size: int, config: Selector):
        super().__init__()
        self._top_k = config.top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, config.rank)
        self.successor_codebook = nn.Embedding(vocab_size, config.rank)
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    def __call__(self, drafted: Drafted, hidden: mx.array, anchor: int) -> Drafted:
        """What is left of a draft [n, C] with its hidden states [n, E]: the candidates and how they follow."""
        logits, columns = largest(drafted.logits, self._top_k)
        tokens = drafted.tokens(columns)
        edges = mx.expand_dims(self.hidden_projection(hidden), 1) * self.successor_codebook(tokens)
        paths = Paths(logits, edges, self.predecessor_codebook, mx.array([anchor]))
        return replace(drafted, logits=logits, token_ids=tokens, correction=paths)


class Paths:
    """The selector's correction; a path's state is the predecessor's row [W, r]."""

    def __init__(self, logits: mx.array, edges: mx.array, predecessors: nn.Embedding, anchor: mx.array):
        """logits [n, k]. edges [n, k, r]: the candidates' successor rows times the position's hidden."""
        self._logits, self._edges, self._predecessors, self._anchor = logits, edges, predecessors, anchor

    def start(self) -> mx.array:
        return self._predecessors(self._anchor)

    def logits(self, position: int, state: mx.array) -> mx.array:
        return self._logits[position] + state @ self._edges[position].T

    def advance(self, position: int, state: mx.array, tokens: mx.array) -> mx.array:
        return self._predecessors(tokens)
