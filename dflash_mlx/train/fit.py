"""The trainer: a step is a function of the checkpoint and its number, so a resumed run is the run itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..draft import DFlashDraft
from ..draft.save import published_weights
from ..errors import DFlashError
from ..targets.anatomy import dissect
from ..targets.instrument import swapped
from ..targets.taps import Taps
from .blocks import block_hidden
from .data import ANSWER, Shard, check_tensors, make_directory, replace


@dataclass(frozen=True)
class Settings:
    """What a run is; a checkpoint of other settings is not resumed.

    batch_size: sequences a step. num_anchors: blocks of a sequence. decay: γ of the weights exp(−(k − 1) / γ) of
    slots k. distillation: share of the loss that is cross-entropy with the target's distribution. vocabulary: most
    frequent tokens that the loss is over. muon_rate is for matrices, adamw_rate for the rest, both a new draft's (for
    a trained one a tenth and a half of them); they are reached after `warmup_steps`, stand, and fall to 0 as a cosine
    in the last `cooldown` of the run (1: all of it).
    """

    num_steps: int = 1000
    batch_size: int = 2
    num_anchors: int = 56
    decay: float = 3.0
    distillation: float = 0.0
    vocabulary: int = 8192
    muon_rate: float = 4e-2
    adamw_rate: float = 2e-3
    warmup_steps: int = 20
    cooldown: float = 1.0
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_anchors", "vocabulary"):
            if getattr(self, name) < 1:
                raise DFlashError(f"{name} is {getattr(self, name)}; use 1 or more.")
        for name in ("warmup_steps", "seed"):
            if getattr(self, name) < 0:
                raise DFlashError(f"{name} is {getattr(self, name)}; use 0 or more.")
        for name in ("distillation", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise DFlashError(f"{name} is {getattr(self, name)}; use 0 to 1.")
        for name in ("muon_rate", "adamw_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DFlashError(f"{name} is {getattr(self, name)}; use a finite number, 0 or more.")
        for name in ("decay", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise DFlashError(f"{name} is {getattr(self, name)}; use a finite number above 0.")


@dataclass(frozen=True)
class Batch:
    """ids int [B, L]; anchors int [B, A]; labels and weights [B, A, block − 1] of slots 1..: labels are indices into
    the training vocabulary, weights 0 where nothing is to be learnt."""

    ids: np.ndarray
    anchors: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def vocabulary_of(shard: Shard, size: int) -> np.ndarray:
    """The most frequent tokens of the answers, in order of their ids."""
    tokens, counts = np.unique(shard.ids[shard.role == ANSWER], return_counts=True)
    if not tokens.size:
        raise DFlashError("The training data hold no answers; write some with `dflash-mlx train data`.")
    return np.sort(tokens[np.argsort(-counts, kind="stable")[:size]])


def make_batch(
    shard: Shard, rows: Sequence[int], vocabulary: np.ndarray, block_size: int, num_anchors: int, decay: float, rng: Any
) -> Batch:
    """Anchors drawn at random from the positions whose next token is the target's answer."""
    ids, role = shard.ids[rows], shard.role[rows]
    follows = np.zeros(role.shape, bool)
    follows[:, 1:-1] = role[:, 2:] == ANSWER
    draws = np.where(follows, rng.random(role.shape), -1.0)
    anchors = np.sort(np.argsort(-draws, axis=1)[:, :num_anchors], axis=1)
    anchors = np.maximum(anchors, 1)
    drawn = np.take_along_axis(follows, anchors, axis=1)[..., None]
    at = anchors[..., None] + np.arange(1, block_size)
    inside = np.minimum(at, ids.shape[1] - 1)
    every = np.arange(len(rows))[:, None, None]
    tokens, answered = ids[every, inside], (role[every, inside] == ANSWER) & (at < ids.shape[1])
    labels = np.minimum(np.searchsorted(vocabulary, tokens), len(vocabulary) - 1)
    # A block that crosses the answer's end learns only what is before it.
    whole = np.logical_and.accumulate(answered, axis=-1) & drawn
    known = (vocabulary[labels] == tokens) & whole
    weights = known * np.exp(-np.arange(block_size - 1) / decay)
    return Batch(ids, anchors, labels.astype(np.int32), weights.astype(np.float32))


class TargetSide:
    """What the trainer takes from the target: hidden states, its distribution, embeddings and head; never trained."""

    def __init__(self, model: nn.Module, draft: DFlashDraft, vocabulary: np.ndarray):
        self._model = model
        self._draft = draft
        self._anatomy = dissect(model)
        self._taps = Taps(model, draft.capture_layer_ids)
        self.prune(vocabulary)

    def prune(self, vocabulary: np.ndarray) -> None:
        """Let logits be over these tokens."""
        self.vocabulary = mx.array(vocabulary)
        # A linear head of whatever packing, as a matrix: its image of the identity.
        width = self._draft.config.hidden_size
        bias = self._anatomy.lm_head(mx.zeros((1, width)))
        self.head = (self._anatomy.lm_head(mx.eye(width)) - bias)[:, self.vocabulary].astype(mx.float32)
        self.bias = bias[:, self.vocabulary].astype(mx.float32)
        mx.eval(self.head, self.bias)

    def hidden(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Of ids [B, L]: target hidden [B, L, n_captured × E] and logits [B, L, vocabulary], both lazy."""
        with swapped(self._taps.swaps):
            logits = self._model(ids)
            hidden = self._taps.take()
        assert hidden is not None
        return hidden.astype(mx.float32), logits[..., self.vocabulary].astype(mx.float32)

    def inputs(self, ids: mx.array, anchors: mx.array) -> mx.array:
        """Embedded blocks [B, A × block, E]."""
        batch, num_anchors = anchors.shape
        blocks = mx.full((batch, num_anchors, self._draft.block_size), self._draft.mask_token_id)
        blocks[:, :, 0] = mx.take_along_axis(ids, anchors, axis=1)
        return self.embedded(blocks.reshape(batch, -1))

    def embedded(self, tokens: mx.array) -> mx.array:
        """What the draft reads of tokens [..]: [.., E]."""
        embedded = self._draft.embed(tokens, self._anatomy.embed_tokens)
        return (embedded * self._anatomy.embedding_scale).astype(mx.float32)

    def logits(self, hidden: mx.array) -> mx.array:
        """Normed hidden of the draft [.., E] to logits [.., vocabulary], as the draft itself would give them."""
        logits = (hidden @ self.head + self.bias) * self._draft.config.output_multiplier
        cap = self._draft.config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits


def slots_hidden(draft: DFlashDraft, inputs: mx.array, hidden: mx.array, anchors: mx.array) -> mx.array:
    """Normed hidden of slots 1.. [B, A, block − 1, E]."""
    out = block_hidden(draft, inputs, hidden, anchors)
    return out.reshape(*anchors.shape, draft.block_size, -1)[:, :, 1:]


def tokens_before(ids: mx.array, anchors: mx.array, num_slots: int) -> mx.array:
    """The anchor and the tokens behind it, up to the one before the last slot: [B, A, num_slots]."""
    at = mx.minimum(anchors[..., None] + mx.arange(num_slots), ids.shape[1] - 1)
    return mx.take_along_axis(ids, at.reshape(len(ids), -1), axis=1).reshape(at.shape)


def corrected(target: TargetSide, draft: DFlashDraft, logits: mx.array, hidden: mx.array, tokens: mx.array) -> mx.array:
    """What a Domino head makes of logits [B, A, S, V] with hidden [B, A, S, E] when `tokens` [B, A, S] went before.

    The first of the tokens is the anchor; where the tokens before are right, a chain says the same.
    """
    head = draft.domino
    inputs = target.embedded(tokens)
    states = [head.first_state(inputs[:, :, 0])]
    for slot in range(1, tokens.shape[-1]):
        states.append(head.step(states[-1], inputs[:, :, slot]))
    plain = draft.config.domino.plain if draft.config.domino is not None else 0
    code = head.code(hidden[:, :, plain:], mx.stack(states[plain:], axis=2))
    return mx.concatenate([logits[:, :, :plain], logits[:, :, plain:] + head.widen(code)], axis=2)


TRAINABLE = frozenset({"fc", "hidden_norm", "kv_proj", "k_norm", "layers", "norm", "rope", "domino"})


def check_trainable(draft: DFlashDraft) -> None:
    """DFlashError for drafts that the trainer's forward does not know."""
    parts = set(draft.children()) - TRAINABLE
    parts |= {name for layer in draft.layers for name in layer.children() if name.endswith("_conv")}
    if parts:
        raise DFlashError(f"This draft has {', '.join(sorted(parts))}, which `fit` cannot train; use a DFlash 1 draft.")
    if "scales" in draft.kv_proj:
        raise DFlashError("A quantized draft cannot be trained; give the draft that it was made from.")
    if draft.config.sample_from_anchor:
        raise DFlashError("This draft predicts from its anchor too, which `fit` cannot train; use another draft.")


class Trainer:
    """Trains `draft` in place; `step` numbers the steps done."""

    def __init__(
        self,
        model: nn.Module,
        draft: DFlashDraft,
        shard: Shard,
        settings: Settings,
        stored: Callable[[Sequence[int]], mx.array] | None = None,
    ):
        """stored: hidden states [B, L, n_captured × E] of rows of `shard`, where the data keep them."""
        check_trainable(draft)
        draft.set_dtype(mx.float32)
        self.draft, self.shard, self.settings, self._stored = draft, shard, settings, stored
        if draft.token_ids is not None:
            self.vocabulary = np.array(draft.token_ids)
        elif "domino" in draft:  # its head corrects the logits of every token
            self.vocabulary = np.arange(draft.config.vocab_size)
        else:
            self.vocabulary = vocabulary_of(shard, settings.vocabulary)
        self.target = TargetSide(model, draft, self.vocabulary)
        self.step = 0
        self.scale = feature_scale(self.target, shard)
        draft.fc.weight = draft.fc.weight * self.scale
        self.optimizer = optim.MultiOptimizer(
            [
                optim.Muon(partial(_rate, settings.muon_rate, settings), weight_decay=0.0),
                optim.AdamW(partial(_rate, settings.adamw_rate, settings), weight_decay=0.0),
            ],
            # A Domino head's last matrix has a row for every token, of which most go without a gradient.
            [lambda name, array: array.ndim == 2 and "norm" not in name and "widen" not in name],
        )
        self.optimizer.init(draft.trainable_parameters())
        self._loss_and_grad = nn.value_and_grad(draft, self._loss)

    def rows_of(self, step: int) -> list[int]:
        """The conversations of a step; every epoch has its own order."""
        size = min(self.settings.batch_size, len(self.shard.ids))
        per_epoch = len(self.shard.ids) // size
        order = np.random.default_rng((self.settings.seed, 1, step // per_epoch)).permutation(len(self.shard.ids))
        at = step % per_epoch * size
        return order[at : at + size].tolist()

    def run(self, num_steps: int | None = None) -> Iterator[float]:
        """Do the steps that are left, or at most `num_steps`; yields the loss of each."""
        left = self.settings.num_steps - self.step
        for _ in range(left if num_steps is None else min(left, num_steps)):
            settings = self.settings
            rng = np.random.default_rng((settings.seed, 2, self.step))
            rows, size = self.rows_of(self.step), self.draft.block_size
            batch = make_batch(self.shard, rows, self.vocabulary, size, settings.num_anchors, settings.decay, rng)
            loss = self._train_on(batch, rows)
            self.step += 1
            yield loss

    def _train_on(self, batch: Batch, rows: Sequence[int]) -> float:
        settings = self.settings
        ids, anchors = mx.array(batch.ids), mx.array(batch.anchors)
        if self._stored is None or settings.distillation:
            hidden, target_logits = self.target.hidden(ids)
        else:
            hidden, target_logits = self._stored(rows).astype(mx.float32), mx.zeros(0)
        loss, grads = self._loss_and_grad(
            self.target.inputs(ids, anchors),
            mx.stop_gradient(hidden / self.scale),
            anchors,
            mx.array(batch.labels),
            mx.array(batch.weights),
            mx.stop_gradient(target_logits),
            ids,
            mx.array(1 - self.step / settings.num_steps),
        )
        grads, _ = optim.clip_grad_norm(grads, settings.clip_norm)
        self.optimizer.update(self.draft, grads)
        mx.eval(loss, self.draft.parameters(), self.optimizer.state)
        return loss.item()

    def _loss(
        self,
        inputs: mx.array,
        hidden: mx.array,
        anchors: mx.array,
        labels: mx.array,
        weights: mx.array,
        target_logits: mx.array,
        ids: mx.array,
        uncorrected: mx.array,
    ) -> mx.array:
        """uncorrected: the share of the logits before a Domino head's correction; it falls from 1 to 0 over the run."""
        slots = slots_hidden(self.draft, inputs, hidden, anchors)
        logits = self.target.logits(slots)
        loss = self._mean(logits, anchors, labels, weights, target_logits)
        if "domino" not in self.draft:
            return loss
        logits = corrected(self.target, self.draft, logits, slots, tokens_before(ids, anchors, slots.shape[2]))
        return uncorrected * loss + (1 - uncorrected) * self._mean(logits, anchors, labels, weights, target_logits)

    def _mean(
        self, logits: mx.array, anchors: mx.array, labels: mx.array, weights: mx.array, target_logits: mx.array
    ) -> mx.array:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        loss = -mx.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]
        share = self.settings.distillation
        if share:
            loss = (1 - share) * loss + share * self._distance(logprobs, anchors, target_logits)
        return (loss * weights).sum() / mx.maximum(weights.sum(), 1.0)

    def _distance(self, logprobs: mx.array, anchors: mx.array, target_logits: mx.array) -> mx.array:
        """Cross-entropy with the target's distribution of the token at each slot; [B, A, block − 1]."""
        batch, num_anchors, slots, _ = logprobs.shape
        before = mx.minimum(anchors[..., None] + mx.arange(slots), target_logits.shape[1] - 1)
        rows = target_logits[mx.arange(batch)[:, None], before.reshape(batch, -1)]
        target_probs = mx.softmax(rows, axis=-1).reshape(batch, num_anchors, slots, -1)
        return -(target_probs * logprobs).sum(axis=-1)

    # Checkpoints.

    def save(self, directory: Path) -> None:
        """What a later process needs to go on exactly here."""
        make_directory(directory)
        arrays = {f"draft.{name}": array for name, array in tree_flatten(self.draft.parameters())}
        arrays |= {f"optimizer.{name}": array for name, array in tree_flatten(self.optimizer.state)}
        arrays |= {"scale": self.scale, "vocabulary": mx.array(self.vocabulary)}
        metadata = {"step": str(self.step), "settings": json.dumps(asdict(self.settings)), "draft": self._draft_facts()}
        replace(
            directory / "trainer.safetensors", lambda file: mx.save_safetensors(str(file), arrays, metadata=metadata)
        )

    def resume(self, directory: Path) -> bool:
        """Go on from a checkpoint where there is one; DFlashError when it is of another run.

        A run may be made longer or shorter: only the steps after the change differ.
        """
        file = directory / "trainer.safetensors"
        if not file.exists():
            return False
        check_tensors(file, "delete it to begin again, or use another directory")
        arrays, metadata = mx.load(str(file), return_metadata=True)
        try:
            known, wanted = dict(json.loads(metadata["settings"])), asdict(self.settings)
            step, scale, vocabulary = int(metadata["step"]), arrays["scale"], np.array(arrays["vocabulary"])
        except (KeyError, ValueError, TypeError) as error:
            raise DFlashError(
                f"{file} is no checkpoint of `fit` ({error}); delete it to begin again, or use another directory."
            ) from error
        free = ("num_steps", "cooldown")
        if other := [name for name in wanted if name not in free and known.get(name) != wanted[name]]:
            name = other[0]
            raise DFlashError(
                f"{file} was trained with {name} {known.get(name)!r}, not {wanted[name]!r}; "
                "use the same settings to continue it or another directory."
            )
        draft = [(name.removeprefix("draft."), a) for name, a in arrays.items() if name.startswith("draft.")]
        own = tree_flatten(self.draft.parameters())
        if {(name, array.shape) for name, array in draft} != {(name, array.shape) for name, array in own}:
            raise DFlashError(
                f"{file} is of a draft with other layers or another head; use the same flags to continue it or another "
                "directory."
            )
        facts, mine = json.loads(metadata.get("draft", "{}")), json.loads(self._draft_facts())
        if other := [name for name in mine if facts and facts.get(name) != mine[name]]:
            name = other[0]
            raise DFlashError(
                f"{file} is of a draft with {name} {facts.get(name)!r}, not {mine[name]!r}; use the same flags to "
                "continue it or another directory."
            )
        if self.draft.token_ids is not None and self.draft.token_ids.tolist() != vocabulary.tolist():
            raise DFlashError(
                f"{file} is of a draft with logits for other tokens than {self.draft.token_ids.size} of these data; "
                "use the same --data to continue it or another directory."
            )
        self.draft.load_weights(draft)
        state = [(name.removeprefix("optimizer."), a) for name, a in arrays.items() if name.startswith("optimizer.")]
        self.optimizer.state = tree_unflatten(state)
        self.step, self.scale, self.vocabulary = step, scale, vocabulary
        self.target.prune(self.vocabulary)
        return True

    def _draft_facts(self) -> str:
        """The draft's config as a checkpoint keeps it: weights alone do not tell every head from another."""
        return json.dumps(asdict(self.draft.config), sort_keys=True)

    def export(
        self,
        directory: Path,
        raw_config: dict[str, Any],
        provenance: dict[str, Any],
        dtype: mx.Dtype = mx.bfloat16,
    ) -> None:
        """The draft in the published format, with the scale of the features folded in, and how it was made."""
        make_directory(directory)
        weights = published_weights(self.draft)
        weights["fc.weight"] = weights["fc.weight"] / self.scale
        published = {name: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x for name, x in weights.items()}
        replace(
            directory / "model.safetensors",
            lambda file: mx.save_safetensors(str(file), published, metadata={"format": "mlx"}),
        )
        for name, content in (("config.json", raw_config), ("provenance.json", provenance)):
            text = json.dumps(content, indent=1) + "\n"
            replace(directory / name, lambda file, text=text: file.write_text(text))


def _rate(peak: float, settings: Settings, step: mx.array) -> mx.array:
    """Linear warm-up, then `peak`, at last a cosine to 0."""
    warmup = min(settings.warmup_steps, settings.num_steps)
    flat = max(warmup, round(settings.num_steps * (1 - settings.cooldown)))
    done = (step - flat) / max(1, settings.num_steps - flat)
    cosine = 0.5 * (1 + mx.cos(math.pi * mx.clip(done, 0.0, 1.0)))
    return peak * mx.where(step < warmup, (step + 1) / max(1, warmup), cosine)


def feature_scale(target: TargetSide, shard: Shard) -> mx.array:
    """The size of each captured coordinate on the first conversations; single ones are a thousand times the rest."""
    hidden, _ = target.hidden(mx.array(shard.ids[:2]))
    scale = mx.sqrt(mx.mean(hidden * hidden, axis=(0, 1))) + 1e-4
    mx.eval(scale)
    return scale


def evaluate(
    target: TargetSide, draft: DFlashDraft, scale: mx.array, shard: Shard, num_rows: int = 16, num_anchors: int = 48
) -> dict[str, Any]:
    """Teacher-forced on held-out conversations: what a chain would commit per round, and slot by slot."""
    vocabulary = np.array(target.vocabulary)
    right: list[np.ndarray] = []
    for row in range(min(num_rows, len(shard.ids))):
        rng = np.random.default_rng((0, row))
        batch = make_batch(shard, [row], vocabulary, draft.block_size, num_anchors, 1e9, rng)
        ids, anchors = mx.array(batch.ids), mx.array(batch.anchors)
        hidden, _ = target.hidden(ids)
        slots = slots_hidden(draft, target.inputs(ids, anchors), hidden / scale, anchors)
        logits = target.logits(slots)
        if "domino" in draft:
            logits = corrected(target, draft, logits, slots, tokens_before(ids, anchors, slots.shape[2]))
        guesses = vocabulary[np.array(mx.argmax(logits, axis=-1))]
        wanted = batch.ids[
            np.arange(1)[:, None, None],
            np.minimum(batch.anchors[..., None] + np.arange(1, draft.block_size), batch.ids.shape[1] - 1),
        ]
        used = batch.weights[..., 0] > 0
        right.append((guesses == wanted)[used])
    hits = np.concatenate(right)
    prefix = np.logical_and.accumulate(hits, axis=-1)
    reached = np.concatenate([np.ones((len(hits), 1), bool), prefix[:, :-1]], axis=1)
    by_position = [float(prefix[:, i].sum() / max(1, reached[:, i].sum())) for i in range(prefix.shape[1])]
    return {
        "acceptance_length": float(1 + prefix.sum(axis=1).mean()),
        "acceptance_by_position": by_position,
        "num_blocks": len(hits),
    }
