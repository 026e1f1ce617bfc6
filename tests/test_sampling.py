"""Sampling through the whole loop keeps the target's distribution, whatever the draft proposes."""

import functools
import math

import mlx.core as mx
import pytest
from mlx_lm import sample_utils
from reference import plain_tokens
from run import run
from scripted import InertProposer
from tiny import LLAMA, build

from dflash_mlx.errors import DFlashError
from dflash_mlx.speculative.accept import StepwiseRule, make_rule, ratio_accept
from dflash_mlx.speculative.proposal import Proposal
from dflash_mlx.speculative.sampling import is_stateless, make_sampler

VOCAB = 7
PROMPT = [1, 5, 2]
NUM_TOKENS = 3
SMALL = LLAMA | {
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


class NoisyProposer(InertProposer):
    """Draws its tokens from a fixed distribution that is far from the target's, and says so."""

    def __init__(self, *, samples: bool):
        self._probs = mx.softmax(mx.array([0.0, 1.5, 0.3, -1.0, 0.8, 2.0, 0.1]))
        self._samples = samples

    def propose(self, anchor, width, depth):
        size = min(width, depth, 3) - 1
        if not size:
            return Proposal.single(anchor)
        drafted = mx.random.categorical(mx.log(self._probs), shape=(size,)).astype(mx.int32)
        tokens = mx.concatenate([mx.array([anchor]), drafted])[None]
        # Told to the rule, they are samples of draft_probs; untold, they are just tokens.
        return Proposal.chain(tokens, mx.broadcast_to(self._probs, (size, VOCAB)) if self._samples else None)


def exact_probabilities(model, probs) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of NUM_TOKENS tokens under plain sampling."""
    exact = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for tokens, probability in exact.items():
            logits = model(mx.array([PROMPT + list(tokens)]))[0, -1]
            row = probs((logits - mx.logsumexp(logits))[None])[0].tolist()
            longer |= {(*tokens, t): probability * p for t, p in enumerate(row)}
        exact = longer
    return exact


def chi_square_z(observed: dict, expected: dict, runs: int) -> float:
    """How many standard deviations the chi-square statistic is above its mean (Wilson-Hilferty)."""
    assert all(expected[tokens] > 0 for tokens in observed), "a token of probability zero was drawn"
    cells = [(observed.get(t, 0), runs * p) for t, p in expected.items() if runs * p >= 5]
    rest = (runs - sum(o for o, _ in cells), runs - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    freedom = len(cells) - 1
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def observed(model, sampler, samples: bool, runs: int) -> dict:
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        tokens = tuple(run(model, PROMPT, NoisyProposer(samples=samples), NUM_TOKENS, sampler=sampler).tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


SETTINGS = {
    "temperature 1": {"temp": 1.0},
    "temperature 0.6": {"temp": 0.6},
    "top-p": {"temp": 0.9, "top_p": 0.8},
    "top-k": {"temp": 1.2, "top_k": 3},
    "min-p": {"temp": 1.0, "min_p": 0.2},
    "all": {"temp": 0.8, "top_p": 0.9, "top_k": 4, "min_p": 0.05},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("samples", [True, False], ids=["ratio rule", "walk"])
def test_sampled_sequences_have_the_targets_distribution(name, samples):
    model = build("llama", SMALL, seed=3)
    sampler = make_sampler(**SETTINGS[name])
    mx.random.seed(11)
    runs = 2000
    counts = observed(model, sampler, samples, runs)
    assert chi_square_z(counts, exact_probabilities(model, sampler.probs), runs) < 3.5


@pytest.mark.parametrize(
    "sampler",
    [
        sample_utils.make_sampler(temp=0.7, top_p=0.9),
        lambda logprobs: mx.random.categorical(logprobs / 0.7),
    ],
    ids=["mlx-lm's", "unknown code"],
)
def test_samplers_handed_in_keep_their_distribution(sampler):
    model = build("llama", SMALL, seed=3)
    known = make_sampler(temp=0.7, top_p=0.9) if is_stateless(sampler) else make_sampler(temp=0.7)
    mx.random.seed(5)
    runs = 2000
    assert chi_square_z(observed(model, sampler, True, runs), exact_probabilities(model, known.probs), runs) < 3.5


def test_chi_square_notices_a_wrong_distribution():
    model = build("llama", SMALL, seed=3)
    exact = exact_probabilities(model, make_sampler(temp=1.0).probs)
    mx.random.seed(5)
    assert chi_square_z(observed(model, make_sampler(temp=0.8), True, 1500), exact, 1500) > 6


def test_sampler_knows_the_distribution_it_draws_from():
    logprobs = mx.random.normal((1, 50))
    logprobs = logprobs - mx.logsumexp(logprobs)
    for settings in SETTINGS.values():
        ours, theirs = make_sampler(**settings), sample_utils.make_sampler(**settings)
        mx.random.seed(1)
        a = [ours(logprobs).item() for _ in range(20)]
        mx.random.seed(1)
        assert a == [theirs(logprobs).item() for _ in range(20)]
        probs = ours.probs(logprobs)[0]
        assert abs(probs.sum().item() - 1) < 1e-5 and all(probs[t].item() > 0 for t in a)


def test_ratio_accept_takes_everything_when_draft_and_target_agree():
    probs = mx.softmax(mx.random.normal((5, VOCAB)), axis=-1)
    for _ in range(50):
        drafted = mx.random.categorical(mx.log(probs[:4])).astype(mx.int32)
        num_accepted, bonus = ratio_accept(drafted, probs, probs[:4])
        assert num_accepted.item() == 4 and 0 <= bonus.item() < VOCAB


def test_seed_gives_the_same_tokens_every_time():
    model = build("llama", SMALL, seed=3)
    for sampler in (make_sampler(temp=1.0), sample_utils.make_sampler(temp=1.0, top_p=0.9)):
        runs = []
        for _ in range(2):
            mx.random.seed(42)
            runs.append(run(model, PROMPT, NoisyProposer(samples=True), 30, sampler=sampler).tokens)
        assert runs[0] == runs[1]


# Logits processors: each sees the exact prefix of the token it is asked about.


class Countdown:
    """A user's processor with a state of its own: it forbids the token it saw last, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens, logits):
        self.calls += 1
        logits[:, tokens[-1]] = -1e9
        logits[:, self.calls % VOCAB] += 1.0
        return logits


def forbid_from_position_7(tokens, logits):
    return logits + mx.where((mx.arange(VOCAB) == 5) & (tokens.size - len(PROMPT) >= 7), -1e9, 0)


PROCESSORS = {
    "penalties": lambda: sample_utils.make_logits_processors(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, logit_bias={3: 1.0}
    ),
    "own state": lambda: [Countdown()],
    "forbidden later": lambda: [forbid_from_position_7],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("corrupt_every", [0, 1, 3])
def test_processors_change_speculation_as_they_change_plain_decoding(name, block_size, corrupt_every):
    from scripted import ScriptedProposer

    model = build("llama", SMALL, seed=3)
    expected = plain_tokens(model, PROMPT, 30, processors=PROCESSORS[name]())
    processors = PROCESSORS[name]()
    text = PROMPT + expected
    proposer = ScriptedProposer(text, VOCAB, block_size=block_size, corrupt_every=corrupt_every)
    assert run(model, PROMPT, proposer, 30, processors=processors).tokens == expected
    if name == "own state":
        assert processors[0].calls == 30
    if name == "forbidden later":
        assert 5 not in expected[7:]


def test_ratio_rule_with_penalties_keeps_the_distribution():
    model = build("llama", SMALL, seed=3)
    processors = sample_utils.make_logits_processors(frequency_penalty=1.5)
    sampler = make_sampler(temp=1.0)
    exact = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer = {}
        for tokens, probability in exact.items():
            context = mx.array(PROMPT + list(tokens))
            logits = processors[0](context, model(context[None])[:, -1])
            row = mx.softmax(logits[0]).tolist()
            longer |= {(*tokens, t): probability * p for t, p in enumerate(row)}
        exact = longer
    mx.random.seed(2)
    counts: dict = {}
    for _ in range(2000):
        proposer = NoisyProposer(samples=True)
        tokens = tuple(run(model, PROMPT, proposer, NUM_TOKENS, sampler=sampler, processors=processors).tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    assert chi_square_z(counts, exact, 2000) < 3.5


@pytest.mark.parametrize(
    "bad",
    [
        {"temp": -0.1},
        {"temp": math.nan},
        {"top_p": 1.5},
        {"top_p": -0.1},
        {"min_p": 2},
        {"top_k": -1},
        {"xtc_probability": 2},
        {"xtc_threshold": 0.9},
        {"min_tokens_to_keep": 0},
    ],
)
def test_sampler_values_out_of_range_are_refused_by_name(bad):
    ((name, value),) = bad.items()
    with pytest.raises(DFlashError, match=f"{'temperature' if name == 'temp' else name} {value}"):
        make_sampler(**bad)


def test_code_that_wraps_mlx_lms_is_unknown_code():
    plain = sample_utils.make_logits_processors(repetition_penalty=1.3)[0]

    @functools.wraps(plain)
    def counting(tokens, logits):
        return plain(tokens, logits)

    @functools.wraps(sample_utils.greedy_sampler)
    def sampling(logprobs):
        return sample_utils.greedy_sampler(logprobs)

    assert is_stateless(plain) and not is_stateless(counting) and not is_stateless(sampling)
    assert all(is_stateless(sample_utils.make_sampler(temp=t, top_p=0.9)) for t in (0, 1))
    assert is_stateless(make_sampler(temp=1.0)) and not is_stateless(lambda logprobs: logprobs)


def test_unknown_code_is_walked_on_the_host():
    prompt = mx.array(PROMPT)
    assert isinstance(make_rule(lambda x: mx.argmax(x, axis=-1), (), prompt, lambda token: False), StepwiseRule)
    assert isinstance(make_rule(None, [Countdown()], prompt, lambda token: False), StepwiseRule)
    assert not isinstance(make_rule(None, PROCESSORS["penalties"](), prompt, lambda token: False), StepwiseRule)
