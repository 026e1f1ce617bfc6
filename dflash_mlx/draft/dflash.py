"""A DFlash draft proposes a whole block in one forward, from the target's hidden states of committed tokens.

One Qwen3-style network (DFlash, Z Lab): queries come from the block [anchor, mask, ..]; keys and values from the
committed tokens' projected target hidden states and from the block itself. Later families add parts of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from .config import DraftConfig
from .context import DraftContext
from .dflash2 import CandidateSelector, GroupedConvolution
from .domino import DominoHead
from .drafted import Drafted
from .heads import Head, PrunedHead

# Drafts lose acceptance beyond the contexts they were trained on; a window of this many tokens restores it.
CONTEXT_LIMIT = 4096


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class KeyNorm(nn.Module):
    """RMSNorm of the keys of all layers; row i of the weight belongs to layer i."""

    def __init__(self, num_layers: int, head_dim: int, eps: float):
        super().__init__()
        self.weight = mx.ones((num_layers, head_dim))
        self.eps = eps

    def __call__(self, keys: mx.array) -> mx.array:
        """Keys [1, n, layers, H, D] of all layers at once."""
        return mx.fast.rms_norm(keys, None, self.eps) * self.weight[:, None]

    def of(self, layer: int, keys: mx.array) -> mx.array:
        """Keys [.., D] of one layer."""
        return mx.fast.rms_norm(keys, self.weight[layer], self.eps)


class Attention(nn.Module):
    """The parts of a layer's attention that only the block needs; those of the keys and values are stacked."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)


class Layer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.convolution is not None:
            self.attention_conv = GroupedConvolution(config.hidden_size, config.convolution)
            self.mlp_conv = GroupedConvolution(config.hidden_size, config.convolution)


class DFlashDraft(nn.Module):
    """The network of every family; the config says which parts it has.

    What makes keys and values is stacked over the layers: the rows of `kv_proj` are [k of layer 0, v of layer 0, k of
    layer 1, ..]. One matmul, one norm and one rotation give the K/V of committed tokens for all layers, and a layer's
    own rows give the K/V of the block.

    token_ids: the tokens that its logits stand for, where those are fewer than the target's; of a head over all of
    them, the target's or its own embedding, the draft takes these rows.
    """

    def __init__(self, config: DraftConfig, token_ids: mx.array | None = None):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.capture_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._kv_width = config.num_key_value_heads * config.head_dim
        kv_rows = 2 * config.num_hidden_layers * self._kv_width
        self.kv_proj = nn.Linear(config.hidden_size, kv_rows, bias=config.attention_bias)
        self.k_norm = KeyNorm(config.num_hidden_layers, config.head_dim, config.rms_norm_eps)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._token_ids = token_ids
        self._pruned_head = None if token_ids is None else PrunedHead(token_ids)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.vocab_size, config.hidden_size, config.selector)
        if config.domino is not None:
            self.domino = DominoHead(config)
        self.rope = initialize_rope(
            dims=config.head_dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    @property
    def block_size(self) -> int:
        """Nodes that it proposes at most, the anchor included."""
        return self.config.block_size + self.config.sample_from_anchor

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def capture_layer_ids(self) -> tuple[int, ...]:
        return self.config.capture_layer_ids

    @property
    def token_ids(self) -> mx.array | None:
        """The target's tokens that its logits stand for; None where these are all."""
        return self._token_ids

    @property
    def dtype(self) -> mx.Dtype:
        """The type of its activations."""
        return self.norm.weight.dtype

    def make_context(self, position: int = 0, *, limit: int | None = None) -> DraftContext:
        """An empty context.

        position: the tokens of the target that the draft will never see. limit: the last tokens that a layer without
        a window attends; by default CONTEXT_LIMIT or, where it is less, what the draft was made for.
        """
        whole = min(self.config.max_position_embeddings, CONTEXT_LIMIT) if limit is None else limit
        windows = [self.config.window(i) for i in range(self.config.num_hidden_layers)]
        limits = [whole if window is None else window - 1 for window in windows]
        return DraftContext(limits, self.block_size, position)

    def extend(self, context: DraftContext, target_hidden: mx.array) -> None:
        """Add n committed tokens, target_hidden [1, n, n_captured × E]; lazy."""
        committed, skipped = target_hidden.shape[1], 0
        if committed > context.bound:
            skipped = committed - context.bound
            target_hidden = target_hidden[:, skipped:]
        if committed > 0:
            keys, values = self._context_kv(target_hidden, context.position + skipped)
            heads = self.config.num_key_value_heads
            for i in range(self.config.num_hidden_layers):
                of_layer = slice(i * heads, (i + 1) * heads)
                context.append(i, keys[:, of_layer], values[:, of_layer])
        context.advance(committed)

    def __call__(self, inputs: mx.array, context: DraftContext) -> mx.array:
        """Embedded block [1, L, E] at positions context.position.. to normed hidden [1, L, E]."""
        x = inputs.astype(self.dtype)
        masks = self._masks(x.shape[1], context)
        for i, layer in enumerate(self.layers):
            attend = partial(self._attend, i, layer.self_attn, context=context, mask=masks[i])
            x = x + _between(layer.get("attention_conv"), attend, layer.input_layernorm(x))
            x = x + _between(layer.get("mlp_conv"), layer.mlp, layer.post_attention_layernorm(x))
        return self.norm(x)

    def draft(
        self,
        anchor: int,
        num_positions: int,
        context: DraftContext,
        target_embed: Callable[[mx.array], mx.array],
        target_head: Head,
    ) -> Drafted:
        """What it says of the `num_positions` tokens behind the anchor; lazy."""
        rows = num_positions + (not self.config.sample_from_anchor)
        block = mx.array([[anchor] + [self.mask_token_id] * (rows - 1)])
        hidden = self(self.embed(block, target_embed), context)[:, rows - num_positions :]
        # A draft in float16 can overflow; any finite distribution keeps the acceptance exact.
        is_finite = mx.isfinite(hidden)
        hidden = mx.where(is_finite, hidden, 0)
        drafted = Drafted(self.logits(hidden, target_head)[0], mx.all(is_finite), self._token_ids)
        if "domino" in self:
            return self.domino(drafted, hidden[0], anchor, lambda tokens: self.embed(tokens, target_embed))
        return self.candidate_selector(drafted, hidden[0], anchor) if "candidate_selector" in self else drafted

    def embed(self, tokens: mx.array, target_embed: Callable[[mx.array], mx.array]) -> mx.array:
        """Tokens [..] to the block's inputs [.., E]; the draft's own embedding where it has one."""
        embedded = self.get("embed_tokens", target_embed)(tokens)
        scale = self.config.input_embedding_scale
        return embedded if scale == 1.0 else embedded * scale

    def logits(self, hidden: mx.array, target_head: Head) -> mx.array:
        """Normed hidden [1, L, E] to logits [1, L, C] of its vocabulary; the draft's own head where it has one."""
        logits = self._head(target_head)(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits

    def _head(self, target_head: Head) -> Head:
        if "lm_head" in self:
            return self.lm_head
        tied = self.config.tie_word_embeddings and "embed_tokens" in self
        head = self.embed_tokens.as_linear if tied else target_head
        return head if self._pruned_head is None else self._pruned_head.of(head)

    def _masks(self, length: int, context: DraftContext) -> list[mx.array | str | None]:
        """The layers' masks; layers of one kind share theirs."""
        layers = range(self.config.num_hidden_layers)
        kinds = [(context.length(i), self.config.window(i), self.config.causal(i)) for i in layers]
        made = {kind: block_mask(length, *kind) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def _attend(
        self, i: int, attention: Attention, x: mx.array, *, context: DraftContext, mask: mx.array | str | None
    ) -> mx.array:
        config, length = self.config, x.shape[1]
        queries = attention.q_proj(x).reshape(1, length, config.num_attention_heads, config.head_dim)
        queries = self.rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=context.position)
        block = self._block_kv(i, x, context.position)
        keys, values = context.with_block(i, *block)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=config.head_dim**-0.5, mask=mask)
        return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(1, length, -1))

    def _context_kv(self, target_hidden: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Keys and values of committed tokens for all layers, each [1, layers × H, n, D]."""
        config, n = self.config, target_hidden.shape[1]
        heads = config.num_hidden_layers * config.num_key_value_heads
        kv = self.kv_proj(self.hidden_norm(self.fc(target_hidden.astype(self.dtype))))
        kv = kv.reshape(1, n, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        keys = self.k_norm(kv[:, :, :, 0]).reshape(1, n, heads, config.head_dim).transpose(0, 2, 1, 3)
        values = kv[:, :, :, 1].reshape(1, n, heads, config.head_dim).transpose(0, 2, 1, 3)
        return self.rope(keys, offset=position), values

    def _block_kv(self, i: int, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """The block's keys and values for one layer, each [1, H, L, D]."""
        heads = self.config.num_key_value_heads
        kv = self._project_kv(i, x).reshape(1, x.shape[1], 2 * heads, self.config.head_dim).transpose(0, 2, 1, 3)
        return self.rope(self.k_norm.of(i, kv[:, :heads]), offset=position), kv[:, heads:]

    def _project_kv(self, i: int, x: mx.array) -> mx.array:
        """One layer's rows of the stacked projection; the slices are views, nothing is copied."""
        kv_proj, rows = self.kv_proj, slice(2 * i * self._kv_width, 2 * (i + 1) * self._kv_width)
        if isinstance(kv_proj, nn.QuantizedLinear):
            biases = kv_proj.get("biases")
            out = mx.quantized_matmul(
                x,
                kv_proj.weight[rows],
                scales=kv_proj.scales[rows],
                biases=None if biases is None else biases[rows],
                transpose=True,
                group_size=kv_proj.group_size,
                bits=kv_proj.bits,
                mode=kv_proj.mode,
            )
        else:
            out = x @ kv_proj.weight[rows].T
        return out + kv_proj.bias[rows] if "bias" in kv_proj else out


def _between(conv: GroupedConvolution | None, part: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """A part of a layer with its convolutions before and behind it, where there are any."""
    if conv is None:
        return part(x)
    x, kernel = conv.before(x)
    return conv.behind(part(x), kernel)


def finite(x: mx.array) -> mx.array:
    """Whether every number is finite, lazy; a draft in float16 can overflow and then drafts nothing of use."""
    return mx.all(mx.isfinite(x))


def block_mask(length: int, context: int, window: int | None, causal: bool) -> mx.array | str | None:
    """What the block's rows see of [context | block]; no array where the stock kernels' own masks will do.

    window: a row sees the context's positions less than this far behind it; it sees the block whole, or up to itself
    when causal.
    """
    if window is None or context + length <= window:
        return "causal" if causal else None
    row, column = context + mx.arange(length)[:, None], mx.arange(context + length)[None]
    in_block = column >= context
    return ((row - column < window) & ~in_block) | (in_block & (column <= row) if causal else in_block)
