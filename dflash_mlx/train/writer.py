"""The target writes its own training data: whole conversations in step, or answers to prompts.

Rows that converse are in step: every forward gives each row one token, forced where the template or an opener says
so, so no row waits for another and no row is padded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ..errors import DFlashError
from ..targets.instrument import swapped
from ..targets.taps import Taps
from .data import ANSWER, PADDING, TEMPLATE, USER, Shard
from .openers import opener


@dataclass(frozen=True)
class Template:
    """The chat template, taken apart around the turns.

    first: up to the first user turn. answer: between a user turn and the answer. again: between an answer and the
    next user turn. The last two begin with the token that ends a turn.
    """

    first: list[int]
    answer: list[int]
    again: list[int]


def template(tokenizer: Any) -> Template:
    """Take the tokenizer's chat template apart; DFlashError when it has none or it hides the turns."""
    if not tokenizer.has_chat_template:
        raise DFlashError("The target has no chat template to write conversations with; give --prompts.")
    marks = ["USER-TURN-1", "ANSWER-1", "USER-TURN-2"]
    roles = ["user", "assistant", "user"]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)], tokenize=False
    )
    pieces = []
    for mark in marks:
        piece, found, text = text.partition(mark)
        if not found:
            raise DFlashError("The target's chat template does not keep the turns as they are; give --prompts.")
        pieces.append(tokenizer.encode(piece, add_special_tokens=False))
    return Template(*pieces)


class Row:
    """One conversation as it grows; says which token comes next and what it is."""

    def __init__(
        self, tokenizer: Any, parts: Template, temperature: float, limits: tuple[int, int], rng: random.Random
    ):
        self._tokenizer, self._parts, self._rng = tokenizer, parts, rng
        self._temperature, self._limits = temperature, limits
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._forced: list[tuple[int, int]] = []
        self._begin_user(parts.first)

    def _begin_user(self, piece: list[int]) -> None:
        start = self._tokenizer.encode(opener(self._rng), add_special_tokens=False)
        self._force(piece, TEMPLATE)
        self._force(start, USER)
        self._turn, self._left = USER, max(1, self._limits[0] - len(start))

    def _force(self, tokens: Sequence[int], role: int) -> None:
        self._forced += [(token, role) for token in tokens]

    @property
    def temperature(self) -> float | None:
        """At which the next token is to be chosen; None when it is known."""
        if self._forced:
            return None
        return 1.0 if self._turn == USER else self._temperature

    def take(self, chosen: int) -> tuple[int, int]:
        """The next token and its role, given the target's choice."""
        if not self._forced:
            ended = chosen in self._eos
            if not ended and self._left > 0:
                self._left -= 1
                return chosen, self._turn
            role = self._turn if ended else TEMPLATE
            self._end_turn()
            return self._forced.pop(0)[0], role
        return self._forced.pop(0)

    def _end_turn(self) -> None:
        if self._turn == USER:
            self._force(self._parts.answer, TEMPLATE)
            self._turn, self._left = ANSWER, self._limits[1]
        else:
            self._begin_user(self._parts.again)


def converse(
    model: nn.Module,
    tokenizer: Any,
    *,
    num_rows: int,
    length: int,
    temperatures: Sequence[float],
    seed: str,
    capture_layer_ids: tuple[int, ...] = (),
    user_limit: int = 64,
    answer_limit: int = 224,
) -> Iterator[Shard | int]:
    """Write `num_rows` conversations of `length` tokens; yields the tokens done after each step and the shard at last.

    temperatures: of the answers, row by row in turn; 0 is greedy. The same seed gives the same conversations.
    """
    rng = random.Random(seed)
    key = mx.random.key(rng.getrandbits(63))
    parts = template(tokenizer)
    limits = (user_limit, answer_limit)
    rows = [Row(tokenizer, parts, temperatures[i % len(temperatures)], limits, rng) for i in range(num_rows)]
    ids, role = np.zeros((num_rows, length), np.int32), np.zeros((num_rows, length), np.int8)
    cache = make_prompt_cache(model)
    taps = Taps(model, capture_layer_ids)
    kept: list[mx.array] = []
    logits = mx.zeros((num_rows, 1))
    chosen = np.zeros(num_rows, np.int32)
    for position in range(length):
        heats = [row.temperature for row in rows]
        if position:
            key, now = mx.random.split(key)
            chosen = choose(logits, heats, now)
        for i, row in enumerate(rows):
            ids[i, position], role[i, position] = row.take(int(chosen[i]))
        with swapped(taps.swaps):
            logits = model(mx.array(ids[:, position : position + 1]), cache=cache)[:, -1]
            hidden = taps.take()
        mx.async_eval(logits, [c.state for c in cache])
        if hidden is not None:
            kept.append(hidden.astype(mx.float16))
            mx.async_eval(kept[-1])
        yield num_rows * (position + 1)
    yield Shard(ids, role, mx.concatenate(kept, axis=1) if kept else None)


def choose(logits: mx.array, temperatures: Sequence[float | None], key: mx.array) -> np.ndarray:
    """The rows' next tokens from logits [B, V]: greedy at 0, sampled above, 0 where the token is known anyway."""
    chosen = np.zeros(len(temperatures), np.int32)
    greedy = [i for i, t in enumerate(temperatures) if t == 0]
    warm = [i for i, t in enumerate(temperatures) if t]
    if greedy:
        chosen[greedy] = np.array(mx.argmax(logits[mx.array(greedy)], axis=-1))
    if warm:
        scaled = logits[mx.array(warm)].astype(mx.float32) / mx.array([temperatures[i] for i in warm])[:, None]
        chosen[warm] = np.array(sample(scaled, key))
    return chosen


def sample(logits: mx.array, key: mx.array) -> mx.array:
    """A token [B] from each row of logits [B, V], by one uniform number a row."""
    cumulative = mx.cumsum(mx.softmax(logits, axis=-1, precise=True), axis=-1)
    uniform = mx.random.uniform(shape=(logits.shape[0], 1), key=key) * cumulative[:, -1:]
    return mx.minimum(mx.sum(cumulative <= uniform, axis=-1), logits.shape[-1] - 1)


def answer(
    model: nn.Module,
    prompts: Sequence[list[int]],
    *,
    length: int,
    temperatures: Sequence[float],
    eos_token_ids: Sequence[int],
    seed: int,
) -> Iterator[Shard | int]:
    """Answer prompts in one continuous batch; yields the tokens done so far and the shard at last.

    The greedy answers are mlx-lm's own. Every prompt must leave room for an answer within `length`.
    """
    mx.random.seed(seed)
    heats = [temperatures[i % len(temperatures)] for i in range(len(prompts))]
    generator = BatchGenerator(model, stop_tokens=[[token] for token in eos_token_ids])
    uids = generator.insert(
        [list(prompt) for prompt in prompts],
        [length - len(prompt) for prompt in prompts],
        samplers=[_sampler(heat) for heat in heats],
    )
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    done = 0
    while responses := generator.next_generated():
        for response in responses:
            answers[response.uid].append(response.token)
        done += len(responses)
        yield done
    generator.close()
    ids = np.zeros((len(prompts), length), np.int32)
    role = np.full((len(prompts), length), PADDING, np.int8)
    for i, (prompt, uid) in enumerate(zip(prompts, uids, strict=True)):
        end = len(prompt) + len(answers[uid])
        ids[i, :end] = [*prompt, *answers[uid]]
        role[i, : len(prompt)], role[i, len(prompt) : end] = TEMPLATE, ANSWER
    yield Shard(ids, role)


def captured(model: nn.Module, ids: np.ndarray, capture_layer_ids: tuple[int, ...], rows: int = 4) -> mx.array:
    """What the target's layers give for finished conversations [B, L]: float16 [B, L, n_captured × E]."""
    taps = Taps(model, capture_layer_ids)
    found = []
    for first in range(0, len(ids), rows):
        with swapped(taps.swaps):
            model(mx.array(ids[first : first + rows]))
            hidden = taps.take()
        assert hidden is not None
        found.append(hidden.astype(mx.float16))
        mx.eval(found[-1])
    return mx.concatenate(found)


def _sampler(temperature: float) -> Any:
    if temperature == 0:
        return lambda logprobs: mx.argmax(logprobs, axis=-1)
    return lambda logprobs: mx.random.categorical(logprobs / temperature)
