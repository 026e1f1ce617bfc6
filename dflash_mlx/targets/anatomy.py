"""Where a target keeps its layers, its embedding and its head; found once, nothing is changed.

mlx-lm's models name these parts alike but nest them differently, so they are looked up breadth first from the
outermost module. What a family does beside (scaling its embeddings, transforming its logits) stands in two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedTargetError

EMBEDDING_NAMES = (
    "embed_tokens",
    "word_embeddings",
    "tok_embeddings",
    "token_embeddings",
    "embeddings",
    "embedding",
    "embed_in",
    "wte",
)
HEAD_NAMES = ("lm_head", "embed_out", "output")

# Module of the family → factor on the embedding, read from the model that owns the embedding and from its args.
EMBEDDING_SCALE: dict[str, Callable[[nn.Module], float]] = {
    "gemma": lambda owner: owner.args.hidden_size**0.5,
    "gemma2": lambda owner: owner.args.hidden_size**0.5,
    "gemma3_text": lambda owner: owner.args.hidden_size**0.5,
    "gemma3n": lambda owner: owner.hidden_size**0.5,
    "gemma4_text": lambda owner: owner.embed_scale,
    "gear": lambda owner: owner.embed_scale,
    "granite": lambda owner: owner.embedding_multiplier,
    "granitemoe": lambda owner: owner.embedding_multiplier,
    "granitemoehybrid": lambda owner: owner.embedding_multiplier,
    "minicpm": lambda owner: owner.args.scale_emb,
    "recurrent_gemma": lambda owner: owner.config.hidden_size**0.5 if owner.scale_by_sqrt_dim else 1.0,
}


def _soft_cap(cap: float | None) -> Callable[[mx.array], mx.array]:
    return (lambda logits: mx.tanh(logits / cap) * cap) if cap else (lambda logits: logits)


# Module of the family → what it does to the head's output, read from the outermost text model.
LOGITS_TRANSFORM: dict[str, Callable[[nn.Module], Callable[[mx.array], mx.array]]] = {
    "gemma2": lambda model: _soft_cap(model.final_logit_softcapping),
    "gemma3n": lambda model: _soft_cap(model.model.language_model.final_logit_softcapping),
    "gemma4_text": lambda model: _soft_cap(model.final_logit_softcapping),
    "gear": lambda model: _soft_cap(model.args.final_logit_softcapping),
    "granite": lambda model: lambda logits: logits / model.logits_scaling,
    "granitemoe": lambda model: lambda logits: logits / model.logits_scaling,
    "granitemoehybrid": lambda model: lambda logits: logits / model.logits_scaling,
    "cohere": lambda model: lambda logits: logits * model.model.args.logit_scale,
    "cohere2": lambda model: lambda logits: logits * model.model.args.logit_scale,
}


@dataclass(frozen=True)
class Anatomy:
    """The parts of a target that a draft shares.

    embed_tokens maps int tokens [..] to [.., E] unscaled; lm_head maps [.., E] to raw logits [.., V].
    """

    embed_tokens: nn.Module
    lm_head: Callable[[mx.array], mx.array]
    embedding_scale: float
    logits_transform: Callable[[mx.array], mx.array]

    @property
    def vocab_size(self) -> int:
        return self.embed_tokens.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        embedding = self.embed_tokens
        if "scales" in embedding:  # quantized: the weight is packed
            return embedding.scales.shape[-1] * embedding.group_size
        return embedding.weight.shape[-1]


def family(module: nn.Module) -> str:
    """The mlx-lm model file that a module's class comes from."""
    return type(module).__module__.rpartition(".")[2]


def breadth_first(model: nn.Module) -> Iterator[nn.Module]:
    """Modules from the outermost inwards, lists (the layers) left out."""
    queue = [model]
    while queue:
        module = queue.pop(0)
        yield module
        queue += [child for child in module.children().values() if isinstance(child, nn.Module)]


def _find(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, nn.Module] | None:
    for owner in breadth_first(model):
        for name in names:
            if isinstance(owner.get(name), nn.Module):
                return owner, owner[name]
    return None


def vocab_size(model: nn.Module) -> int | None:
    """Rows of the token embedding; None where it is not found, which matters to drafts alone."""
    found = _find(model, (*EMBEDDING_NAMES, "embed"))
    return None if found is None else found[1].weight.shape[0]


def dissect(model: nn.Module) -> Anatomy:
    """Find the parts of `model`; UnsupportedTargetError names the class where there are none."""
    found = _find(model, EMBEDDING_NAMES)
    if found is None:
        raise UnsupportedTargetError(
            f"{family(model)} has no token embedding that a draft could share; leave out the draft, n-grams work."
        )
    owner, embedding = found
    head = _find(model, HEAD_NAMES)
    text_model = next((m for m in breadth_first(model) if family(m) in LOGITS_TRANSFORM), model)
    transform = LOGITS_TRANSFORM.get(family(text_model), lambda _: lambda logits: logits)
    return Anatomy(
        embed_tokens=embedding,
        lm_head=head[1] if head else embedding.as_linear,
        embedding_scale=EMBEDDING_SCALE.get(family(owner), lambda _: 1.0)(owner),
        logits_transform=transform(text_model),
    )
