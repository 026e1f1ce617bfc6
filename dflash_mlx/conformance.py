"""Whether this package rolls a model back exactly: every check compares it with plain mlx-lm on the same weights.

The reference is plain decoding, one token a forward, over mlx-lm's own caches. It knows nothing of blocks, so a row
kept by mistake, a position off by one or a state that saw a rejected token shows as a difference in the logits.
Nothing here depends on the architecture; `check_model` runs on any mlx-lm model.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache
from tqdm import tqdm

from .cache import Block
from .errors import UnsupportedTargetError
from .generate import Request, decode
from .speculative.ending import Ending
from .speculative.proposal import Proposal
from .targets.instrument import swapped
from .targets.taps import TapPoint, tap_point
from .targets.target import Target

# Largest difference of logits that rounding explains, relative to the largest logit: a block sums in another order
# than single rows, and random layers amplify it. What a wrong row does is a hundred times as large.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1e-1}
PREFILL_STEP = 7  # the prompt is longer, so it goes in by chunks
PROMPT_TOKENS = 19
GENERATED_TOKENS = 72
BEFORE_WINDOW = 24  # where a window is longer than the prompt, generation crosses its end so many tokens in
LONGEST_PROMPT = 8192
# Widths of successive rounds, and at which of the text's positions the proposer errs (0 never, 1 always).
SCRIPTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 0),
    ((4,), 1),
    ((4,), 3),
    ((8,), 0),
    ((8,), 5),
    ((8, 1, 4, 1, 1), 4),
)
CHAIN_ROUNDS = ((8, 0), (1, 0), (8, 3), (1, 0), (2, 1), (8, 7), (1, 0), (4, 2), (8, 5), (3, 0), (8, 7), (8, 6), (1, 0))
TREE_SIZES = (6, 1, 12, 5, 9, 1, 7)


@dataclass(frozen=True)
class Check:
    """One comparison. error: the largest relative difference of logits, where that is what was compared."""

    name: str
    passed: bool
    detail: str = ""
    error: float = 0.0


@dataclass
class Conformance:
    """What a model passes. refusal: why it was refused at load; tree_refusal: why its trees are."""

    caches: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)
    refusal: str | None = None
    tree_refusal: str | None = None

    @property
    def conforms(self) -> bool:
        """Chains are exact, and trees are too or are refused."""
        return self.chain == "pass" and self.tree != "FAIL"

    @property
    def chain(self) -> str:
        return "refused" if self.refusal else _verdict(c for c in self.checks if c.name != "tree")

    @property
    def tree(self) -> str:
        return "refused" if self.refusal or self.tree_refusal else _verdict(c for c in self.checks if c.name == "tree")


def _verdict(checks: Iterator[Check]) -> str:
    results = [c.passed for c in checks]
    return "not run" if not results else "pass" if all(results) else "FAIL"


def check_model(
    model: nn.Module, *, quantize: Callable[[nn.Module], bool] | None = None, seed: int = 0, progress: bool = False
) -> Conformance:
    """Run every check on an mlx-lm model. quantize: quantizes the weights in place for the last checks, or says no."""
    report = Conformance(caches=cache_kinds(make_prompt_cache(model)))
    try:
        target = Target(model, make_prompt_cache(model))
    except UnsupportedTargetError as error:
        report.refusal = str(error)
        return report
    report.tree_refusal = target.tree_refusal
    prompt = _prompt(model, seed)
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("greedy", lambda: check_greedy(model, prompt)),
        ("rollback", lambda: check_rounds("rollback", model, prompt, _chains(seed))),
        ("taps", lambda: check_taps(model, prompt[:PROMPT_TOKENS])),
    ]
    if report.tree_refusal is None:
        checks.append(("tree", lambda: check_rounds("tree", model, prompt, _trees(seed))))
    if quantize is not None:
        checks.append(("quantized", lambda: _check_quantized(model, quantize, prompt, seed)))
    report.checks = [_guarded(name, check) for name, check in tqdm(checks, desc="checks", disable=not progress)]
    return report


def _check_quantized(model: nn.Module, quantize: Callable[[nn.Module], bool], prompt: list[int], seed: int) -> Check:
    if not quantize(model):
        return Check("quantized", True, "no weight of a size that can be quantized")
    return check_rounds("quantized", model, prompt, _chains(seed))


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # the report names it; the other checks go on
        return Check(name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def cache_kinds(caches: Sequence[Any]) -> tuple[str, ...]:
    """Names of the cache classes of a model, in order of first use."""
    names: dict[str, None] = {}
    for cache in caches:
        if isinstance(cache, CacheList):
            names[f"CacheList({', '.join(dict.fromkeys(cache_kinds(cache.caches)))})"] = None
        else:
            names[type(cache).__name__] = None
    return tuple(names)


# Plain mlx-lm.


def _prompt(model: nn.Module, seed: int) -> list[int]:
    """Random tokens, so many that generation goes past every window."""
    vocab_size = model(mx.array([[1, 2]])).shape[-1]
    size = max(PROMPT_TOKENS, _largest_window(make_prompt_cache(model)) - BEFORE_WINDOW)
    rng = random.Random(seed)
    return [rng.randrange(1, min(vocab_size, 1 << 15)) for _ in range(min(size, LONGEST_PROMPT))]


def _largest_window(caches: Sequence[Any]) -> int:
    """Of sliding windows and chunks; 0 where there are none."""
    inner = [_largest_window(cache.caches) for cache in caches if isinstance(cache, CacheList)]
    own = [getattr(cache, name) for cache in caches for name in ("max_size", "chunk_size") if hasattr(cache, name)]
    return max([0, *inner, *own])


def _prefill_step(prompt: Sequence[int]) -> int:
    """Several chunks of an odd size."""
    return max(PREFILL_STEP, len(prompt) // 4)


class Plain:
    """Plain decoding: the caches after some tokens, and the logits behind the last of them."""

    def __init__(self, model: nn.Module, cache: list[Any]):
        self.model, self.cache = model, cache
        self.logits = mx.zeros((1,))

    @staticmethod
    def prefilled(model: nn.Module, tokens: Sequence[int], step: int) -> Plain:
        """The caches after all of `tokens` but the last, filled in the chunks that the target uses."""
        plain = Plain(model, make_prompt_cache(model))
        for start in range(0, len(tokens) - 1, step):
            model(mx.array([tokens[start : min(start + step, len(tokens) - 1)]]), cache=plain.cache)
            mx.eval([c.state for c in plain.cache])
        return plain

    def after(self, token: int) -> Plain:
        """One token further; this object stays where it is."""
        return Plain(self.model, copy.deepcopy(self.cache)).advance(token)

    def advance(self, token: int) -> Plain:
        """One token further, in place."""
        self.logits = self.model(mx.array([[token]]), cache=self.cache)[0, -1].astype(mx.float32)
        mx.eval(self.logits, [c.state for c in self.cache])
        return self


def relative(a: mx.array, b: mx.array) -> float:
    """Largest difference, relative to the largest entry of the second; infinite where either is not a number."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    error = float((mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-30)).item())
    return error if error == error else float("inf")


def _tolerance(model: nn.Module) -> float:
    floats = [p.dtype for _, p in tree_flatten(model.parameters()) if mx.issubdtype(p.dtype, mx.floating)]
    return max((TOLERANCE[d] for d in set(floats) if d in TOLERANCE), default=TOLERANCE[mx.float32])


# The whole loop, greedy.


class Scripted:
    """Proposes the text itself, wrong at every `errs_every`-th position, so that acceptance is known exactly."""

    def __init__(self, text: list[int], vocab_size: int, widths: tuple[int, ...], errs_every: int):
        self._text, self._vocab_size, self._widths, self._errs_every = text, vocab_size, widths, errs_every
        self._committed = self._rounds = 0

    def extend(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self._committed += tokens.size

    def propose(self, anchor: int, width: int, depth: int) -> Proposal:
        wanted = min(width, depth, self._widths[self._rounds % len(self._widths)])
        self._rounds += 1
        drafted = [self._drafted(p) for p in range(self._committed + 1, self._committed + wanted)]
        return Proposal.chain(mx.array([[anchor, *drafted]]))

    def _drafted(self, position: int) -> int:
        token = self._text[position] if position < len(self._text) else 0
        return (token + 1) % self._vocab_size if self._errs_every and position % self._errs_every == 0 else token

    def rewind(self, position: int) -> None:
        pass

    def arrays(self) -> list[mx.array]:
        return []

    def mend(self) -> None:
        pass


def check_greedy(model: nn.Module, prompt: list[int]) -> Check:
    """Tokens of the loop equal plain decoding's, for every script; where they part, the target's margin decides."""
    plain = Plain.prefilled(model, prompt, _prefill_step(prompt))
    expected, rows, token = [], [], prompt[-1]
    for _ in range(GENERATED_TOKENS):
        plain.advance(token)
        token = int(mx.argmax(plain.logits).item())
        expected.append(token)
        rows.append(plain.logits)
    ties, worst = 0, 0.0
    for widths, errs_every in SCRIPTS:
        scripted = Scripted(prompt + expected, rows[0].size, widths, errs_every)
        tokens = _decoded(model, prompt, scripted)
        apart = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)
        if apart is not None:
            row = rows[apart]
            margin = float((mx.abs(row[tokens[apart]] - row[expected[apart]]) / mx.abs(row).max()).item())
            if margin > _tolerance(model):
                detail = f"token {apart} of widths {widths}, errors at every {errs_every}: logits {margin:.1e} apart"
                return Check("greedy", False, detail, margin)
            ties, worst = ties + 1, max(worst, margin)
    return Check("greedy", True, f"{ties} ties" if ties else "", worst)


def _decoded(model: nn.Module, prompt: list[int], proposer: Scripted) -> list[int]:
    cache = make_prompt_cache(model)
    step = _prefill_step(prompt)
    request = Request(mx.array(prompt), GENERATED_TOKENS, None, (), frozenset(), step, lambda done, total: None)
    stream = mx.default_stream(mx.default_device())
    ending = Ending(frozenset(), GENERATED_TOKENS, None)
    steps = decode(Target(model, cache), proposer, request, ending, stream=stream)  # type: ignore[arg-type]
    return [token for step in steps for token in step.tokens]


# Rounds at the level of the target: every node of every round, then the state left behind.


@dataclass(frozen=True)
class Round:
    """A block, the path to commit, and to how many of its rows to rewind after that (all of them: not at all)."""

    block: Block
    path: tuple[int, ...]
    rows: int


def _chains(seed: int) -> list[Round]:
    rng = random.Random(seed)
    rounds = []
    for i, (width, accepted) in enumerate(CHAIN_ROUNDS):
        rows = rng.randint(1, accepted + 1) if i % 4 == 3 or accepted == 7 else accepted + 1
        rounds.append(Round(Block.chain(width), tuple(range(accepted + 1)), rows))
    return rounds


def _trees(seed: int) -> list[Round]:
    rng = random.Random(seed)
    rounds = []
    for size in TREE_SIZES:
        block = Block((-1, *(rng.randrange(max(0, i - 5), i) for i in range(1, size))))
        path = block.path_to(rng.randrange(size // 2, size))
        rows = rng.randint(1, len(path)) if rng.random() < 0.3 else len(path)
        rounds.append(Round(block, path, rows))
    return rounds


def _sibling_tokens(rng: random.Random, block: Block, anchor: int, vocab_size: int) -> list[int]:
    """A token for each node; siblings hold different ones."""
    taken: set[tuple[int, int]] = set()
    tokens = [anchor]
    for parent in block.parents[1:]:
        token = rng.randrange(1, vocab_size)
        while (parent, token) in taken:
            token = rng.randrange(1, vocab_size)
        taken.add((parent, token))
        tokens.append(token)
    return tokens


def check_rounds(name: str, model: nn.Module, prompt: list[int], rounds: Sequence[Round]) -> Check:
    """Logits of every node equal plain decoding's of its path, and so do the caches at the end."""
    rng = random.Random(name)
    cache = make_prompt_cache(model)
    target = Target(model, cache)
    step = _prefill_step(prompt)
    for _ in target.prefill(mx.array(prompt), step):
        pass
    plain, committed, worst, limit = Plain.prefilled(model, prompt, step), list(prompt), 0.0, _tolerance(model)
    for i, this in enumerate(rounds):
        vocab_size = max(prompt) + 1
        tokens = _sibling_tokens(rng, this.block, committed[-1], vocab_size)
        verification = target.verify(Proposal(mx.array([tokens]), this.block))
        nodes = _plain_nodes(plain, this.block, tokens)
        for node, reference in enumerate(nodes):
            error = relative(verification.row(node), reference.logits)
            if error > limit:
                return Check(name, False, f"round {i}, node {node} of {this.block.size}: off by {error:.1e}", error)
            worst = max(worst, error)
        target.commit(this.path)
        if this.rows < len(this.path):
            target.rewind(this.rows)
        target.seal()
        path = this.path[: this.rows]
        plain = nodes[path[-1]]
        committed = committed[:-1] + [tokens[node] for node in path] + [rng.randrange(1, vocab_size)]
    return _check_final(name, target, cache, plain, committed, worst)


def _plain_nodes(plain: Plain, block: Block, tokens: Sequence[int]) -> list[Plain]:
    nodes: list[Plain] = []
    for parent, token in zip(block.parents, tokens, strict=True):
        nodes.append((nodes[parent] if parent >= 0 else plain).after(token))
    return nodes


def _check_final(
    name: str, target: Target, cache: list[Any], plain: Plain, committed: list[int], worst: float
) -> Check:
    """The caches handed back equal plain decoding's, and mlx-lm goes on from them; so would a fresh prefill."""
    target.finish()
    limit = _tolerance(plain.model)
    error = cache_difference(cache, plain.cache)
    if error > limit:
        return Check(name, False, f"the caches handed back are off by {error:.1e}", error)
    ours = Plain(plain.model, cache).after(committed[-1]).logits
    theirs = plain.after(committed[-1]).logits
    if (error := relative(ours, theirs)) > limit:
        return Check(name, False, f"plain decoding from the caches handed back is off by {error:.1e}", error)
    fresh = Plain.prefilled(plain.model, committed, len(committed)).after(committed[-1]).logits
    own = relative(fresh, theirs)
    if own > limit:
        return Check(name, True, f"mlx-lm's own prefill is {own:.1e} from its one-row decoding", worst)
    return Check(name, True, "", max(worst, error, relative(ours, fresh)))


def cache_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Largest relative difference of what two lists of mlx-lm caches hold."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if type(a) is not type(b):
            return float("inf")
        if isinstance(a, CacheList):
            worst = max(worst, cache_difference(a.caches, b.caches))
            continue
        if getattr(a, "offset", None) != getattr(b, "offset", None):
            return float("inf")
        for x, y in zip(_held(a), _held(b), strict=True):
            if not mx.any(y).item():
                continue  # a placeholder that the model fills with zeros and never reads
            rows = min(x.shape[-2], y.shape[-2]) if x.ndim == 4 and not isinstance(a, ArraysCache) else None
            if rows is not None:  # rows behind a window are dead: how many are kept is a matter of layout
                x, y = x[..., x.shape[-2] - rows :, :], y[..., y.shape[-2] - rows :, :]
            worst = max(worst, relative(x, y)) if x.size else worst
    return worst


def _held(cache: Any) -> list[mx.array]:
    if isinstance(cache, ArraysCache):
        return [state for state in cache.cache if state is not None]
    if getattr(cache, "keys", None) is None:
        return []
    if hasattr(cache, "_temporal_order"):
        size = min(cache.offset, cache.max_size - 1)  # what the next position can see
        return [cache._temporal_order(x)[..., -size:, :] for x in (cache.keys, cache.values)]
    stored = cache.offset - getattr(cache, "start_position", 0)
    arrays = [x for _, x in tree_flatten([cache.keys, cache.values])]
    return [x[..., :stored, :] for x in arrays]


# Taps.


def check_taps(model: nn.Module, prompt: list[int]) -> Check:
    """The target hidden of prefill and of a verify equal what the layers put out in one plain forward."""
    last = len(list(model.layers)) - 1
    capture = tuple(sorted({0, (last + 1) // 2, last}))
    target = Target(model, make_prompt_cache(model), capture_layer_ids=capture)
    parts = [hidden for _, hidden in target.prefill(mx.array(prompt[:12]), PREFILL_STEP)]
    block = mx.array([prompt[11:]])
    parts.append(target.verify(Proposal.chain(block)).hidden)
    target.abort()
    rows: list[mx.array] = []
    with _recorded([tap_point(model, i) for i in capture]) as outputs:
        plain = Plain(model, make_prompt_cache(model))
        step = PREFILL_STEP  # the same chunks: what a layer makes of a chunk border is its own affair
        for start, end in [(0, step), (step, 11), *((i, i + 1) for i in range(11, len(prompt)))]:
            model(mx.array([prompt[start:end]]), cache=plain.cache)
            rows.append(mx.concatenate([outputs[i] for i in range(len(capture))], axis=-1))
            mx.eval(rows, [c.state for c in plain.cache])
    ours = mx.concatenate([p for p in parts if p is not None], axis=1)
    theirs = mx.concatenate(rows, axis=1)
    if ours.shape != theirs.shape:
        return Check("taps", False, f"shape {ours.shape}, plain {theirs.shape}")
    error = relative(ours, theirs)
    return Check("taps", error <= _tolerance(model), "", error)


@contextmanager
def _recorded(points: Sequence[TapPoint]) -> Iterator[dict[int, mx.array]]:
    """What each point showed last, by its place: another recorder than the target's own taps."""
    outputs: dict[int, mx.array] = {}

    def recording(point: TapPoint, place: int) -> type:
        base = type(point.module)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = base.__call__(module, *args, **kwargs)
            outputs[place] = point.read(args[0] if args else None, result)
            return result

        return type(base.__name__, (base,), {"__call__": call})

    with swapped([(point.module, recording(point, i)) for i, point in enumerate(points)]):
        yield outputs


# Reports.


def as_dict(report: Conformance) -> dict[str, Any]:
    return {
        "caches": list(report.caches),
        "chain": report.chain,
        "tree": report.tree,
        "refusal": report.refusal,
        "tree_refusal": report.tree_refusal,
        "checks": [
            {"name": c.name, "passed": c.passed, "detail": c.detail, "error": float(f"{c.error:.1e}")}
            for c in report.checks
        ],
    }


def render(report: Conformance) -> str:
    """The verdict for a terminal."""
    caches = f"caches: {', '.join(report.caches)}"
    if report.refusal:
        return f"REFUSED: {report.refusal}\n  {caches}"
    verdict = "CONFORMS" if report.conforms else "DOES NOT CONFORM"
    lines = [f"{verdict}: chains {report.chain}, trees {report.tree}", f"  {caches}"]
    for check in report.checks:
        detail = f"; {check.detail}" if check.detail else ""
        result = "pass" if check.passed else "FAIL"
        lines.append(f"  {check.name}: {result}, largest difference {check.error:.0e} of the largest logit{detail}")
    if report.tree_refusal:
        lines.append(f"  tree: refused. {report.tree_refusal}")
    return "\n".join(lines)


__all__ = ["Check", "Conformance", "as_dict", "cache_difference", "cache_kinds", "check_model", "render"]
