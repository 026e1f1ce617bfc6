"""Cases from public bug reports that concern caches and targets, through whole generations, with their right values.

The same cases on single caches stand in test_cache_kinds.py (8, 9, 10, 15), files of mlx-lm in test_api.py (13), one
generation beside another in test_ending.py (14).
"""

import random

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, make_prompt_cache
from reference import plain_tokens
from run import STREAM, request, run
from scripted import ScriptedProposer
from test_conformance import tool
from tiny import build
from tokens import tiny_tokenizer

import dflash_mlx
from dflash_mlx.conformance import Plain, cache_difference
from dflash_mlx.generate import decode
from dflash_mlx.speculative.ending import Ending
from dflash_mlx.speculative.proposal import Proposal
from dflash_mlx.targets.target import Target

WINDOW = tool.WINDOW
PROMPT = [5, 7, 9, 11, 3]


def text_of(model, prompt, num_tokens):
    return [*prompt, *plain_tokens(model, prompt, num_tokens)]


def assert_same_state(model, cache, tokens):
    fresh = Plain(model, make_prompt_cache(model))
    for token in tokens:
        fresh.advance(token)
    assert cache_difference(cache, fresh.cache) < 1e-4


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_case_6_first_draft_token_rejected_beside_short_convolutions(block_size):
    model = tool.build("lfm2")
    text = text_of(model, PROMPT, 40)
    result = run(model, PROMPT, ScriptedProposer(text, 97, block_size=block_size, corrupt_every=1), 40)
    assert result.tokens == text[len(PROMPT) :] and not any(step.num_accepted for step in result.steps)
    assert_same_state(model, result.cache, text)  # the convolutions' history too


@pytest.mark.parametrize("case", ["qwen3_5", "mamba2", "lfm2", "recurrent_gemma", "rwkv7"])
def test_case_7_rounds_of_eight_one_and_eight_rows(case):
    model = tool.build(case)
    rng = random.Random(7)
    committed = [rng.randrange(97) for _ in range(12)]
    cache = make_prompt_cache(model)
    target = Target(model, cache)
    for _ in target.prefill(mx.array(committed), 7):
        pass
    for width, accepted in [(8, 3), (1, 0), (8, 7), (1, 0), (1, 0), (8, 0), (8, 5)]:
        tokens = [committed[-1], *(rng.randrange(97) for _ in range(width - 1))]
        target.verify(Proposal.chain(mx.array([tokens])))
        target.commit(tuple(range(accepted + 1)))
        target.seal()
        committed += [*tokens[1 : accepted + 1], rng.randrange(97)]
        target.finish()  # hands the caches back after every round, to look at them
        assert_same_state(model, cache, committed[:-1])


@pytest.mark.parametrize("corrupt_every", [1, 2, 3, 5])
@pytest.mark.parametrize("case", ["llama:sliding", "gemma3_text", "gpt_oss"])
def test_case_9_tokens_rejected_after_the_window_filled_in_mid_generation(case, corrupt_every):
    model = tool.build(case)
    text = text_of(model, PROMPT, 60)
    proposer = ScriptedProposer(text, 97, block_size=6, corrupt_every=corrupt_every)
    assert run(model, PROMPT, proposer, 60).tokens == text[len(PROMPT) :]


@pytest.mark.parametrize("row", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("accepts", [True, False])
def test_case_10_the_window_is_crossed_at_any_row_of_a_block(row, accepts):
    model = tool.build("llama:sliding")
    # The first round has one row, so the second begins one behind the prompt.
    prompt = [(3 * i + 1) % 97 for i in range(2 * WINDOW)][: WINDOW + 1 - row]
    text = text_of(model, prompt, 20)
    proposer = ScriptedProposer(text, 97, block_size=6, corrupt_every=0 if accepts else 1)
    result = run(model, prompt, proposer, 20)
    assert result.tokens == text[len(prompt) :]
    assert_same_state(model, result.cache, text)


@pytest.mark.parametrize("prompt_length", [1, 2, 3, 2049])
@pytest.mark.parametrize("case", ["llama", "llama:sliding", "qwen3_5"])
def test_case_11_the_first_token_is_plain_decodings(case, prompt_length):
    """With its log-probabilities: prefill leaves one token for a one-row step, as mlx-lm does."""
    model, tokenizer = tool.build(case), tiny_tokenizer()
    prompt = [(7 * i + i // 97) % 97 for i in range(prompt_length)]
    plain = next(mlx_lm.stream_generate(model, tokenizer, prompt, 4))
    ours = next(dflash_mlx.stream_generate(model, tokenizer, prompt, 4, ngram=True))
    assert ours.token == plain.token
    if case == "llama:sliding":  # mlx-lm's ring has other rows first, so its sums have another order
        assert mx.allclose(ours.logprobs, plain.logprobs, atol=1e-5)
    else:
        assert mx.array_equal(ours.logprobs, plain.logprobs)


@pytest.mark.parametrize("make", [make_prompt_cache, dflash_mlx.make_prompt_cache])
@pytest.mark.parametrize("case", ["llama:sliding", "gemma3_text", "qwen3_5", "llama"])
@pytest.mark.parametrize("shared", ["four", "nearly all", "all"])
def test_case_12_second_turn_on_a_kept_cache(case, make, shared):
    """Found as mlx_lm.server finds it: what cannot be trimmed is not used, and every second text is a cold run's."""
    model = tool.build(case)
    first = text_of(model, PROMPT, 30)
    cache = make(model)
    proposer = ScriptedProposer(first, 97, block_size=6, corrupt_every=4)
    run(model, PROMPT, proposer, 30, cache=cache)
    assert can_trim_prompt_cache(cache) == (case == "llama")
    kept = LRUPromptCache()
    kept.insert_cache("model", list(first), cache)
    second = {"four": first[:4], "nearly all": first[:-3], "all": first}[shared] + [50, 61, 8]
    found, rest = kept.fetch_nearest_cache("model", second)
    if shared == "all":
        assert found is not None and rest == second[len(first) :]
    elif case != "llama":
        assert found is None and rest == second
    cold = plain_tokens(model, second, 20)
    proposer = ScriptedProposer(second + cold, 97, block_size=6, corrupt_every=3, start=len(second) - len(rest))
    assert run(model, rest, proposer, 20, cache=found or make(model)).tokens == cold
    assert run(model, second, ScriptedProposer(second + cold, 97, corrupt_every=3), 20).tokens == cold


def test_case_12_a_wrapped_window_is_trimmed_exactly_or_not_at_all():
    """mlx-lm's own trimming of a cache that we handed back, one token at a time."""
    model = tool.build("llama:sliding")
    text = text_of(model, PROMPT, 12)
    for num_tokens in (1, 2, 3, 12):
        held = text[: len(PROMPT) + num_tokens]
        cache = run(model, PROMPT, ScriptedProposer(text, 97), num_tokens).cache
        if can_trim_prompt_cache(cache):
            for member in cache:
                member.trim(2)
            assert_same_state(model, cache, held[:-2])
        else:
            assert len(held) >= WINDOW


@pytest.mark.parametrize("case", ["llama:sliding", "qwen3_5", "falcon_h1", "llama4"])
def test_case_14_two_generations_in_turn_on_one_model(case):

    model = tool.build(case)
    texts = [text_of(model, prompt, 30) for prompt in (PROMPT, [8, 1, 1, 4, 30, 2, 77])]
    generations = []
    for text, size in zip(texts, (5, 7), strict=True):
        proposer = ScriptedProposer(text, 97, corrupt_every=3)
        target = Target(model, make_prompt_cache(model), capture_layer_ids=(size % 3,))
        generations.append(decode(target, proposer, request(text[:size], 30), Ending(frozenset(), 30), stream=STREAM))
    tokens = [[], []]
    live = [0, 1]
    while live:
        for i in list(live):
            step = next(generations[i], None)
            tokens[i] += step.tokens if step else ()
            if step is None:
                live.remove(i)
    assert tokens == [text[size:] for text, size in zip(texts, (5, 7), strict=True)]


@pytest.mark.slow
def test_case_24_twelve_thousand_sampled_rounds_in_one_process():
    """Memory is flat behind the first thousand tokens; a cache of fixed size, so that nothing has to grow."""
    model, tokenizer = build("qwen3"), tiny_tokenizer()
    cache = dflash_mlx.make_prompt_cache(model, max_kv_size=64)
    sampler = dflash_mlx.make_sampler(temp=1.0)
    rounds, memory = 0, []
    while rounds < 12_000:
        prompt = PROMPT if not rounds else [7]
        responses = dflash_mlx.stream_generate(
            model, tokenizer, prompt, 1000, ngram=True, sampler=sampler, prompt_cache=cache
        )
        rounds += len(list(responses)[-1].statistics.rounds)
        del responses
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert max(memory) < memory[0] + 100_000  # a row of log-probabilities kept per round would be 4.6 MB
