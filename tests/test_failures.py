"""A failure anywhere in a round leaves the caches at the tokens handed out, or using them raises TargetStateError.

Never anything in between, whatever fails: the target's forward, the evaluation, the commit, the proposer, the user's
own code, the consumer, or an interrupt between any two lines.
"""

import contextlib
import copy
import random
import sys
from functools import cache as cached

import mlx.core as mx
import mlx_lm.models.cache
import pytest
from mlx_lm.models.cache import make_prompt_cache
from run import STREAM, request
from scripted import ScriptedProposer
from test_conformance import ROOT, tool
from tiny import LLAMA, build

from dflash_mlx.cache import carry
from dflash_mlx.conformance import Plain, cache_difference
from dflash_mlx.errors import TargetStateError
from dflash_mlx.generate import decode
from dflash_mlx.speculative.ending import Ending
from dflash_mlx.targets.instrument import swapped
from dflash_mlx.targets.target import KVQuantization, Target

PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]
NUM_TOKENS = 24
TURN = [4, 9]
# One model for each kind of cache.
MODELS = {
    "full": "llama",
    "sliding": "llama:sliding",
    "recurrent": "qwen3_5",
    "lists": "falcon_h1",
    "chunked": "llama4",
    "quantized": None,
}
QUANTIZED = LLAMA | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
ERRORS = [ValueError, RuntimeError, KeyboardInterrupt]


@cached
def model_of(kind):
    return build("llama", QUANTIZED) if MODELS[kind] is None else tool.build(MODELS[kind])


def quantization(kind):
    return KVQuantization(8, 32, 0) if kind == "quantized" else None


def fresh(kind, tokens):
    """mlx-lm's own caches after these tokens, and the logits behind them."""
    plain = Plain(model_of(kind), make_prompt_cache(model_of(kind)))
    if kind == "quantized":  # as mlx-lm does it, behind the first chunk
        plain.model(mx.array([tokens[:7]]), cache=plain.cache)
        plain.cache[:] = [cache.to_quantized(group_size=32, bits=8) for cache in plain.cache]
        tokens = tokens[7:]
    for token in tokens:
        plain.advance(token)
    return plain


@cached
def expected_of(kind):
    plain = fresh(kind, PROMPT)
    tokens = []
    for _ in range(NUM_TOKENS):
        tokens.append(int(mx.argmax(plain.logits).item()))
        plain.advance(tokens[-1])
    return tokens


class Faulty:
    """Raises `error` at its `at`-th call, once."""

    def __init__(self, error, at):
        self.error, self.at, self.calls = error, at, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("injected")


def generate(kind, cache, got, *, sampler=None, processors=(), proposer=None, consumer=lambda: None):
    """Decode into `got`, one token at a time."""
    wanted = request(PROMPT, NUM_TOKENS, sampler=sampler, processors=processors)
    target = Target(model_of(kind), cache, kv_quantization=quantization(kind))
    proposer = proposer or ScriptedProposer(PROMPT + expected_of(kind), 97, block_size=5, corrupt_every=4)
    steps = decode(target, proposer, wanted, Ending(frozenset(), NUM_TOKENS), stream=STREAM)
    try:
        for step in steps:
            for i, token in enumerate(step.tokens):
                step.taken = i + 1
                got.append(token)
                consumer()
    finally:
        steps.close()


def assert_intact_or_refused(kind, cache, got):
    """The verdict: which of the two it is."""
    model, expected = model_of(kind), expected_of(kind)
    assert got == expected[: len(got)]
    held = PROMPT + got
    try:
        plain = Plain(model, copy.deepcopy(cache))
    except TargetStateError:
        with pytest.raises(TargetStateError):
            model(mx.array([TURN]), cache=cache)
        with pytest.raises(TargetStateError):
            Target(model, cache)
        return "refused"
    right = fresh(kind, held)
    if kind != "quantized":  # a rounding may fall to another step there
        assert cache_difference(cache, right.cache) < 1e-4
    limit = 1e-2 if kind == "quantized" else 1e-4
    for token in TURN:
        a, b = plain.advance(token).logits, right.advance(token).logits
        assert mx.abs(a - b).max().item() < limit * mx.abs(b).max().item()
    # Speculation goes on from them too.
    following = []
    for _ in range(6):
        following.append(int(mx.argmax(right.logits).item()))
        right.advance(following[-1])
    proposer = ScriptedProposer([*held, *TURN, *following], 97, block_size=4, corrupt_every=3, start=len(held))
    target = Target(model, cache, kv_quantization=quantization(kind))
    steps = decode(target, proposer, request(TURN, 6), Ending(frozenset(), 6), stream=STREAM)
    assert [token for step in steps for token in step.tokens] == following
    return "intact"


@contextlib.contextmanager
def failing_forward(kind, fault):
    """The model's second layer fails while the graph is built."""
    expected_of(kind)  # decoded before anything fails
    layer = model_of(kind).layers[1]

    def call(module, *args, **kwargs):
        fault()
        return base.__call__(module, *args, **kwargs)

    base = type(layer)
    with swapped([(layer, type(base.__name__, (base,), {"__call__": call}))]):
        yield


@contextlib.contextmanager
def failing_evaluation(kind, at, tmp_path):
    """The model's second layer cannot be evaluated at its `at`-th call: it reads a file that is cut short."""
    expected_of(kind)  # decoded before anything fails
    layer = model_of(kind).layers[1]
    calls = []

    def call(module, x, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            path = str(tmp_path / "zeros.safetensors")
            mx.save_safetensors(path, {"zeros": mx.zeros((1, 1, x.shape[-1]))})
            x = x + mx.load(path)["zeros"]
            with open(path, "r+b") as file:
                file.truncate(80)
        return base.__call__(module, x, *args, **kwargs)

    base = type(layer)
    with swapped([(layer, type(base.__name__, (base,), {"__call__": call}))]):
        yield


def parameters():
    for kind in MODELS:
        for error in ERRORS:
            yield pytest.param(kind, error, id=f"{kind}-{error.__name__}")


def outcome(kind, fails, error, **options):
    """Run into the failure, then judge the caches."""
    cache, got = make_prompt_cache(model_of(kind)), []
    with pytest.raises(error):
        generate(kind, cache, got, **options)
    verdict = assert_intact_or_refused(kind, cache, got)
    # MLX reports what it could not evaluate as RuntimeError: then nothing can be known of the caches.
    if fails != "consumer":
        assert verdict == ("refused" if error is RuntimeError else "intact")
    return verdict


# Prefill calls a layer twice (11 tokens by 7); the third call is the first round's.
@pytest.mark.parametrize(("kind", "error"), list(parameters()))
@pytest.mark.parametrize("at", [3, 4, 6])
def test_forward(kind, error, at):
    with failing_forward(kind, Faulty(error, at)):
        outcome(kind, "forward", error)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("at", [3, 5])
def test_evaluation(kind, at, tmp_path):
    cache, got = make_prompt_cache(model_of(kind)), []
    with failing_evaluation(kind, at, tmp_path), pytest.raises(RuntimeError, match="read"):
        generate(kind, cache, got)
    assert assert_intact_or_refused(kind, cache, got) == "refused"


@pytest.mark.parametrize(("kind", "error"), list(parameters()))
@pytest.mark.parametrize("at", [2, 7])
def test_commit(kind, error, at, monkeypatch):
    """In one of the caches, after others have committed."""
    fault = Faulty(error, at)
    for block_cache in {type(carry(cache)) for cache in make_prompt_cache(model_of(kind))}:
        commit = block_cache.commit
        monkeypatch.setattr(block_cache, "commit", lambda self, path, c=commit: (c(self, path), fault()))
    outcome(kind, "commit", error)


@pytest.mark.parametrize(("kind", "error"), list(parameters()))
@pytest.mark.parametrize("method", ["extend", "propose", "arrays"])
def test_proposer(kind, error, method):
    fault = Faulty(error, 4)

    class Proposer(ScriptedProposer):
        pass

    def failing(self, *args):
        fault()
        return getattr(ScriptedProposer, method)(self, *args)

    setattr(Proposer, method, failing)
    proposer = Proposer(PROMPT + expected_of(kind), 97, block_size=5, corrupt_every=4)
    outcome(kind, method, error, proposer=proposer)


@pytest.mark.parametrize(("kind", "error"), list(parameters()))
@pytest.mark.parametrize("at", [1, 2, 6])
def test_sampler_and_logits_processor(kind, error, at):
    fault = Faulty(error, at)
    outcome(kind, "sampler", error, sampler=lambda logprobs: (fault(), mx.argmax(logprobs, axis=-1))[1])
    fault = Faulty(error, at)
    outcome(kind, "processor", error, processors=[lambda tokens, logits: (fault(), logits)[1]])


@pytest.mark.parametrize(("kind", "error"), list(parameters()))
@pytest.mark.parametrize("at", [1, 2, 3, 7, NUM_TOKENS])
def test_consumer(kind, error, at):
    assert outcome(kind, "consumer", error, consumer=Faulty(error, at)) == "intact"


@pytest.mark.parametrize("kind", MODELS)
def test_forward_that_never_works_again(kind):
    """The token handed out last cannot be put into the caches: they are refused rather than one token short."""
    cache, got = make_prompt_cache(model_of(kind)), []

    def broken(calls=iter(range(1000))):
        if next(calls) >= 5:
            raise ValueError("injected")

    with failing_forward(kind, broken), pytest.raises(ValueError):
        generate(kind, cache, got)
    assert assert_intact_or_refused(kind, cache, got) == "refused"


@pytest.mark.parametrize("kind", MODELS)
def test_caches_in_use_are_refused(kind):
    cache = make_prompt_cache(model_of(kind))
    own = list(cache)
    target = Target(model_of(kind), cache, kv_quantization=quantization(kind))
    proposer = ScriptedProposer(PROMPT + expected_of(kind), 97)
    steps = decode(target, proposer, request(PROMPT, 8), Ending(frozenset(), 8), stream=STREAM)
    got = next(steps).tokens
    with pytest.raises(TargetStateError):
        Target(model_of(kind), cache)
    steps.close()
    assert kind == "quantized" or all(a is b for a, b in zip(cache, own, strict=True))
    assert assert_intact_or_refused(kind, cache, list(got)) == "intact"


# An interrupt between any two lines.

# Where an interrupt can hit: our caches, target and loop, and mlx-lm's caches.
TRACED = (
    str(ROOT / "dflash_mlx" / "cache"),
    str(ROOT / "dflash_mlx" / "targets"),
    str(ROOT / "dflash_mlx" / "speculative" / "loop.py"),
    mlx_lm.models.cache.__file__,
)


@contextlib.contextmanager
def interrupted(at):
    """KeyboardInterrupt before the `at`-th line executed of caches, target and loop; counts them where `at` is None."""
    count = [0]

    def line(frame, event, argument):
        if event == "line":
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt
        return line

    def call(frame, event, argument):
        return line if frame.f_code.co_filename.startswith(TRACED) else None

    sys.settrace(call)
    try:
        yield count
    finally:
        sys.settrace(None)


@cached
def lines_of(kind):
    """Lines executed in prefill, and in all."""
    generate(kind, make_prompt_cache(model_of(kind)), [])  # fills what is made once
    with interrupted(None) as prefill:
        target = Target(model_of(kind), make_prompt_cache(model_of(kind)), kv_quantization=quantization(kind))
        for _ in target.prefill(mx.array(PROMPT), 7):
            pass
    with interrupted(None) as whole:
        generate(kind, make_prompt_cache(model_of(kind)), [])
    return prefill[0], whole[0]


def interrupt_anywhere(kind, at):
    expected = expected_of(kind)
    cache, got = make_prompt_cache(model_of(kind)), []
    with contextlib.suppress(KeyboardInterrupt), interrupted(at):
        generate(kind, cache, got)
    with contextlib.suppress(TargetStateError):
        # A round can be committed and not be handed out yet; Python cannot make one step of the two.
        held = max(cache.offset for cache in flat(cache) if hasattr(cache, "offset")) - len(PROMPT)
        assert held == len(got) or len(got) < held <= len(got) + 5
        got = expected[:held]
    return assert_intact_or_refused(kind, cache, got)


def flat(caches):
    return [member for cache in caches for member in (flat(cache.caches) if hasattr(cache, "caches") else [cache])]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(12))
def test_interrupt_between_any_two_lines(kind, seed):
    prefill, whole = lines_of(kind)
    # Behind prefill, of which a part is in the caches when it is interrupted, as in mlx-lm.
    interrupt_anywhere(kind, random.Random(f"{kind} {seed}").randint(prefill + 1, whole))
