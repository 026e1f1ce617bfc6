"""The draft's forward over many anchors at once gives what one forward per anchor would give."""

from __future__ import annotations

import mlx.core as mx

from ..draft import DFlashDraft


def block_hidden(draft: DFlashDraft, inputs: mx.array, target_hidden: mx.array, anchors: mx.array) -> mx.array:
    """Normed hidden [B, A × block, E] of the blocks that begin at `anchors`.

    inputs: embedded blocks [B, A × block, E]. target_hidden: [B, L, n_captured × E]. anchors: int [B, A], each at
    least 1. A block sees the context before its anchor and itself, never another block. Layers with a window see the
    context within it.
    """
    config = draft.config
    batch, length = target_hidden.shape[:2]
    num_anchors, size = anchors.shape[1], config.block_size
    context = context_kv(draft, target_hidden)
    offsets = anchors.reshape(-1)

    def rotated(x: mx.array) -> mx.array:
        """[B, A × block, H, D] by each block's own positions, to [B, H, A × block, D]."""
        heads = x.shape[2]
        x = x.reshape(batch * num_anchors, size, heads, config.head_dim).transpose(0, 2, 1, 3)
        x = draft.rope(x, offset=offsets)
        x = x.reshape(batch, num_anchors, heads, size, config.head_dim).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch, heads, num_anchors * size, config.head_dim)

    x = inputs
    for i, layer in enumerate(draft.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        rows = normed.shape[1]
        queries = attention.q_proj(normed).reshape(batch, rows, config.num_attention_heads, config.head_dim)
        kv = draft._project_kv(i, normed).reshape(batch, rows, 2, config.num_key_value_heads, config.head_dim)
        keys = mx.concatenate([context[i][0], rotated(draft.k_norm.of(i, kv[:, :, 0]))], axis=2)
        values = mx.concatenate([context[i][1], kv[:, :, 1].transpose(0, 2, 1, 3)], axis=2)
        mask = block_masks(anchors, length, size, config.window(i), config.causal(i))
        out = mx.fast.scaled_dot_product_attention(
            rotated(attention.q_norm(queries)), keys, values, scale=config.head_dim**-0.5, mask=mask[:, None]
        )
        x = x + attention.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, rows, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return draft.norm(x)


def context_kv(draft: DFlashDraft, target_hidden: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Keys and values [B, H, L, D] of the context, layer by layer."""
    config, (batch, length) = draft.config, target_hidden.shape[:2]
    shape = (batch, length, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
    kv = draft.kv_proj(draft.hidden_norm(draft.fc(target_hidden))).reshape(shape)
    keys, values = draft.k_norm(kv[:, :, :, 0]), kv[:, :, :, 1]
    return [
        (draft.rope(keys[:, :, i].transpose(0, 2, 1, 3)), values[:, :, i].transpose(0, 2, 1, 3))
        for i in range(config.num_hidden_layers)
    ]


def block_masks(anchors: mx.array, length: int, size: int, window: int | None, causal: bool) -> mx.array:
    """What rows see of [context | blocks]: bool [B, A × block, length + A × block]."""
    batch, num_anchors = anchors.shape
    slot = mx.tile(mx.arange(size), num_anchors)
    owner = mx.repeat(mx.arange(num_anchors), size)
    start = mx.repeat(anchors, size, axis=1)[..., None]
    column = mx.arange(length)
    context = column < start
    if window is not None:
        context = context & (start + slot[:, None] - column < window)
    own = owner[:, None] == owner
    if causal:
        own = own & (slot <= slot[:, None])
    return mx.concatenate([context, mx.broadcast_to(own, (batch, *own.shape))], axis=-1)
