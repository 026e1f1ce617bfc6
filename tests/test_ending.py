"""The output ends where plain decoding ends it: end-of-sequence, stop strings and max_tokens inside a block."""

import itertools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from reference import fresh_prefill, plain_tokens
from run import STREAM, request, run
from scripted import ScriptedProposer
from test_greedy import assert_same_caches
from tiny import VOCAB, build
from tokens import tiny_tokenizer

from dflash_mlx.generate import respond, stream_generate
from dflash_mlx.targets.target import Target
from dflash_mlx.text import StopFilter, TextStream

PROMPT = [5, 7, 9, 11, 3]


@pytest.fixture(scope="module")
def model():
    return build("llama", seed=5)


@pytest.fixture(scope="module")
def expected(model):
    return plain_tokens(model, PROMPT, 60)


def responses(model, tokenizer, expected, *, num_tokens=60, eos=(), stops=(), corrupt_every=0, block_size=8, take=None):
    """What stream_generate yields, with a scripted proposer in the draft's place; and the cache at the end."""
    cache = make_prompt_cache(model)
    proposer = ScriptedProposer(PROMPT + expected, VOCAB, block_size=block_size, corrupt_every=corrupt_every)
    text = TextStream(tokenizer.detokenizer, tuple(stops))
    wanted = request(PROMPT, num_tokens, eos=eos)
    stream = respond(Target(model, cache), proposer, wanted, text, bool(stops), STREAM, keep_cache=True)
    out = list(itertools.islice(stream, take))
    stream.close()
    return out, cache


@pytest.mark.parametrize("corrupt_every", [0, 1, 3])
@pytest.mark.parametrize("position", [0, 1, 2, 3, 8, 9, 13])
def test_end_of_sequence_inside_a_block(model, expected, position, corrupt_every):
    eos = expected[position]
    first = expected.index(eos)
    out, cache = responses(model, tiny_tokenizer(), expected, eos=(eos,), corrupt_every=corrupt_every)
    assert [r.token for r in out] == expected[: first + 1]
    assert [r.finish_reason for r in out] == [None] * first + ["stop"]
    assert_same_caches(cache, fresh_prefill(model, PROMPT + expected[: first + 1])[0])


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 10, 16, 17])
def test_max_tokens_inside_a_block(model, expected, num_tokens, block_size):
    out, cache = responses(model, tiny_tokenizer(), expected, num_tokens=num_tokens, block_size=block_size)
    assert [r.token for r in out] == expected[:num_tokens]
    assert [r.finish_reason for r in out] == [None] * (num_tokens - 1) + ["length"]
    assert_same_caches(cache, fresh_prefill(model, PROMPT + expected[:num_tokens])[0])


def test_end_of_sequence_before_max_tokens_in_one_block(model, expected):
    """Case 2: tokens 10, 11, STOP, 20, .. with max_tokens 5 are 3 tokens and finish reason "stop"."""
    eos = next(t for t in expected[2:] if t not in expected[:2])
    first = expected.index(eos)
    out, _ = responses(model, tiny_tokenizer(), expected, num_tokens=first + 3, eos=(eos,), block_size=16)
    assert len(out) == first + 1 and out[-1].finish_reason == "stop"


def plain_text(tokenizer, tokens):
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


@pytest.mark.parametrize("corrupt_every", [0, 1, 3])
@pytest.mark.parametrize("cut", range(2, 40, 5))
def test_stop_string_inside_and_across_blocks(model, expected, cut, corrupt_every):
    """Case 1: text, tokens and log-probabilities all end at the stop; nothing behind it is in the cache."""
    tokenizer = tiny_tokenizer()
    whole = plain_text(tokenizer, expected)
    stop = whole[cut : cut + 5]
    end = whole.index(stop)
    out, cache = responses(model, tokenizer, expected, stops=[stop], corrupt_every=corrupt_every)
    tokens = [r.token for r in out]
    assert "".join(r.text for r in out) == whole[:end]
    assert tokens == expected[: len(tokens)] and out[-1].finish_reason == "stop"
    assert stop in plain_text(tokenizer, tokens) and stop not in plain_text(tokenizer, tokens[:-1])
    assert all(r.logprobs.shape == (VOCAB,) for r in out)
    assert_same_caches(cache, fresh_prefill(model, PROMPT + tokens)[0])


@pytest.mark.parametrize("stop_first", [True, False])
def test_stop_string_and_end_of_sequence_in_one_block(model, expected, stop_first):
    """Case 3: whichever comes first in the text decides."""
    tokenizer = tiny_tokenizer()
    a, b = 4, 7
    assert expected.index(expected[a]) == a and expected.index(expected[b]) == b
    early, late = plain_text(tokenizer, [expected[a]]), plain_text(tokenizer, [expected[b]])
    stop, eos = (early, expected[b]) if stop_first else (late, expected[a])
    out, _ = responses(model, tokenizer, expected, eos=(eos,), stops=[stop], block_size=16)
    assert len(out) == a + 1 and out[-1].finish_reason == "stop"
    assert "".join(r.text for r in out) == plain_text(tokenizer, expected[:a])


def test_responses_equal_mlx_lms(model, expected):
    tokenizer = tiny_tokenizer()
    tokenizer.add_eos_token(str(VOCAB - 1))
    plain = list(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=30))
    ours, _ = responses(model, tokenizer, expected, num_tokens=30, corrupt_every=4)
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        assert (a.text, a.token, a.prompt_tokens, a.generation_tokens, a.finish_reason) == (
            b.text,
            b.token,
            b.prompt_tokens,
            b.generation_tokens,
            b.finish_reason,
        )
        assert mx.allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert not any(r.from_draft for r in plain)
    assert sum(r.from_draft for r in ours) == sum(r.num_accepted for r in ours[-1].statistics.rounds)


@pytest.mark.parametrize("take", range(1, 14))
def test_closing_the_stream_after_any_token(model, expected, take):
    _, cache = responses(model, tiny_tokenizer(), expected, corrupt_every=5, take=take)
    assert_same_caches(cache, fresh_prefill(model, PROMPT + expected[:take])[0])


class Fails:
    """A sampler that fails in the middle of a round."""

    def __init__(self, at: int, error: type[BaseException]):
        self.calls, self.at, self.error = 0, at, error

    def __call__(self, logprobs):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return mx.argmax(logprobs, axis=-1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 5, 9, 10, 11])
def test_failure_in_a_round_leaves_the_rounds_before(model, expected, at, error):
    cache = make_prompt_cache(model)
    got = []
    proposer = ScriptedProposer(PROMPT + expected, VOCAB, block_size=4)
    with pytest.raises(error):
        for step in _steps(model, cache, proposer, Fails(at, error)):
            got += step.tokens
    assert got == expected[: len(got)]
    assert_same_caches(cache, fresh_prefill(model, PROMPT + got)[0])


def _steps(model, cache, proposer, sampler):
    from dflash_mlx.generate import decode
    from dflash_mlx.speculative.ending import Ending

    return decode(
        Target(model, cache), proposer, request(PROMPT, 60, sampler=sampler), Ending(frozenset(), 60), stream=STREAM
    )


def test_two_generations_interleaved_on_one_model(model):
    """Case 14, with other captured layers in each."""
    prompts = [[5, 7, 9], [8, 1, 1, 4, 30, 2]]
    expected = [plain_tokens(model, p, 30) for p in prompts]
    streams = []
    for prompt, tokens, capture in zip(prompts, expected, [(0,), (2, 1)], strict=True):
        proposer = ScriptedProposer(prompt + tokens, VOCAB, corrupt_every=3)
        target = Target(model, make_prompt_cache(model), capture_layer_ids=capture)
        text = TextStream(tiny_tokenizer().detokenizer)
        streams.append(respond(target, proposer, request(prompt, 30), text, False, STREAM, keep_cache=True))
    rounds = list(zip(*streams, strict=True))
    assert [[r.token for r in column] for column in zip(*rounds, strict=True)] == expected


def test_nothing_of_the_model_is_changed(model, expected):
    kinds = [type(m) for m in model.modules()]
    stream = iter(run(model, PROMPT, ScriptedProposer(PROMPT + expected, VOCAB), 20, capture=(0, 1, 2)).tokens)
    next(stream)
    assert [type(m) for m in model.modules()] == kinds


def test_stop_filter_equals_a_search_in_the_whole_text():
    """Every way of cutting a text into pieces shows the same text."""
    text = "aabab cabc abcab"
    for stops in [("abc",), ("bab", "abc"), ("zz",), ("b c", "c a"), ("a",), ("abcab",)]:
        ends = [text.find(s) for s in stops if s in text]
        right = text[: min(ends)] if ends else text
        for size in range(1, 7):
            cut = StopFilter(stops)
            shown = "".join(cut.push(text[i : i + size]) for i in range(0, len(text), size))
            assert shown + cut.flush() == right
            assert cut.stopped == bool(ends)


def test_stop_strings_without_a_draft(model, expected):
    tokenizer = tiny_tokenizer()
    whole = plain_text(tokenizer, expected)
    stop = whole[20:24]
    out = list(stream_generate(model, tokenizer, PROMPT, max_tokens=60, stop=stop))
    assert "".join(r.text for r in out) == whole[: whole.index(stop)] and out[-1].finish_reason == "stop"
