"""Greedy speculation yields plain decoding's tokens, and the caches hold what a fresh prefill would."""

import functools

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from reference import fresh_prefill, margin, plain_tokens
from run import run
from scripted import ScriptedProposer
from tiny import FULL_ATTENTION, LLAMA, VOCAB, build
from tokens import tiny_tokenizer

from dflash_mlx import stream_generate
from dflash_mlx.targets.target import KVQuantization

PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]
NUM_TOKENS = 40
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# MLX's CPU backend gathers expert matrices in float32 only.
FLOAT32_ONLY = {"qwen3_moe", "mixtral", "deepseek_v3"}
PATTERNS = {"none": 1, "all": 0, "every second": 2, "every third": 3, "every fifth": 5}


@functools.cache
def case(architecture: str, dtype: mx.Dtype):
    model = build(architecture, dtype=dtype)
    return model, plain_tokens(model, PROMPT, NUM_TOKENS)


def pairs():
    for architecture in FULL_ATTENTION:
        for dtype in DTYPES:
            if dtype == mx.float32 or architecture not in FLOAT32_ONLY:
                yield pytest.param(architecture, dtype, id=f"{architecture}-{str(dtype).rpartition('.')[2]}")


def assert_same_tokens(model, prompt, tokens, expected, tolerance):
    """Equal, or apart at a tie: rows of a block and single rows may round differently on some devices."""
    for i, (a, b) in enumerate(zip(tokens, expected, strict=True)):
        if a != b:
            apart = margin(model, [*prompt, *expected[:i]], a, b)
            assert apart <= tolerance, f"token {i} is {a}, plain decoding has {b}, logits {apart:.1e} apart"
            return


TIE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}  # two units of the last place


@pytest.mark.parametrize(("architecture", "dtype"), list(pairs()))
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_greedy_equals_plain_decoding(architecture, dtype, block_size):
    model, expected = case(architecture, dtype)
    for corrupt_every in PATTERNS.values():
        proposer = ScriptedProposer(PROMPT + expected, VOCAB, block_size=block_size, corrupt_every=corrupt_every)
        result = run(model, PROMPT, proposer, NUM_TOKENS, capture=(0, 2))
        assert_same_tokens(model, PROMPT, result.tokens, expected, TIE[dtype])
        assert max(step.width for step in result.steps) <= block_size


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
def test_reference_is_mlx_lms_own_decoding(architecture):
    model, expected = case(architecture, mx.float32)
    tokens = [token for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS)]
    assert tokens == expected


def test_acceptance_is_what_the_script_says():
    model, expected = case("llama", mx.float32)
    proposer = ScriptedProposer(PROMPT + expected, VOCAB, block_size=8)
    result = run(model, PROMPT, proposer, NUM_TOKENS)
    widths = [step.width for step in result.steps]
    assert widths == [1, 8, 8, 8, 8, 7]  # 1 + 4 · 8 + 7 = 40 tokens
    assert [step.num_accepted for step in result.steps] == [w - 1 for w in widths]
    rejected = run(model, PROMPT, ScriptedProposer(PROMPT + expected, VOCAB, corrupt_every=1), NUM_TOKENS)
    assert [step.num_accepted for step in rejected.steps] == [0] * NUM_TOKENS


@pytest.mark.parametrize("architecture", FULL_ATTENTION)
@pytest.mark.parametrize("corrupt_every", [0, 1, 3])
def test_cache_after_commit_equals_fresh_prefill(architecture, corrupt_every):
    model, expected = case(architecture, mx.float32)
    for num_tokens in (1, 2, 9, 17):
        proposer = ScriptedProposer(PROMPT + expected, VOCAB, corrupt_every=corrupt_every)
        result = run(model, PROMPT, proposer, num_tokens)
        cache, _ = fresh_prefill(model, PROMPT + expected[:num_tokens])
        assert_same_caches(result.cache, cache)
        after = model(mx.array([[7]]), cache=result.cache)[0, -1]
        assert mx.allclose(after, model(mx.array([[7]]), cache=cache)[0, -1], atol=1e-4)


def assert_same_caches(ours, theirs, atol=1e-4):
    """Same classes, offsets and rows; float32 attention over blocks and single rows differs in rounding only."""
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b) and a.offset == b.offset
        for x, y in zip(a.keys_and_values(), b.keys_and_values(), strict=True):
            assert mx.allclose(x, y, atol=atol)


@pytest.mark.parametrize("corrupt_every", [0, 2, 3])
@pytest.mark.parametrize("stop_after", range(1, 20))
def test_stopping_anywhere_leaves_prompt_and_yielded_tokens(stop_after, corrupt_every):
    model, expected = case("qwen3", mx.float32)
    proposer = ScriptedProposer(PROMPT + expected, VOCAB, block_size=6, corrupt_every=corrupt_every)
    result = run(model, PROMPT, proposer, NUM_TOKENS, stop_after=stop_after)
    assert result.tokens == expected[:stop_after]
    cache, _ = fresh_prefill(model, PROMPT + expected[:stop_after])
    assert_same_caches(result.cache, cache)
    # Continuing from it gives what a fresh run gives.
    turn = [4, 9]
    fresh = plain_tokens(model, PROMPT + result.tokens + turn, 10)
    text = PROMPT + result.tokens + turn + fresh
    second = ScriptedProposer(text, VOCAB, corrupt_every=3, start=len(PROMPT) + stop_after)
    assert run(model, turn, second, 10, cache=result.cache).tokens == fresh


@pytest.mark.parametrize("prompt_length", [1, 2, 3, 29])
@pytest.mark.parametrize("prefill_step_size", [1, 7, 64])
def test_prompts_of_any_length_in_any_chunks(prompt_length, prefill_step_size):
    model, _ = case("llama", mx.float32)
    prompt = (PROMPT * 3)[:prompt_length]
    expected = plain_tokens(model, prompt, 12)
    proposer = ScriptedProposer(prompt + expected, VOCAB, corrupt_every=4)
    result = run(model, prompt, proposer, 12, prefill_step_size=prefill_step_size, capture=(1,))
    assert result.tokens == expected
    committed = prompt + expected
    assert proposer.seen == committed[: len(proposer.seen)]
    assert proposer.hidden_rows == len(proposer.seen)


@pytest.mark.parametrize("start", [0, 14, 23, 1000])
@pytest.mark.parametrize("corrupt_every", [0, 1, 3])
def test_quantized_kv_starts_where_plain_decoding_starts_it(start, corrupt_every):
    # Head size 64, since mlx quantizes groups of at least 32.
    model = build("llama", LLAMA | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1})
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    expected = [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=24, prefill_step_size=7, **options)]
    proposer = ScriptedProposer(PROMPT + expected, VOCAB, corrupt_every=corrupt_every)
    result = run(model, PROMPT, proposer, 24, kv_quantization=KVQuantization(8, 32, start))
    assert result.tokens == expected
    kinds = {type(c).__name__ for c in result.cache}
    assert kinds == ({"KVCache"} if start == 1000 else {"QuantizedKVCache"})
    assert {c.offset for c in result.cache} == {len(PROMPT) + 24}


@pytest.mark.parametrize("start", [0, 1, 2, 4, 5, 12, 13, 14, 17])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_quantized_kv_starts_at_the_same_row_in_every_turn(length, start):
    """mlx-lm quantizes behind a chunk or a step: a prompt of one token still meets the cache as it was."""
    model = build("llama", LLAMA | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}, seed=3)
    tokenizer, kv = tiny_tokenizer(), {"kv_bits": 2, "kv_group_size": 32, "quantized_kv_start": start}

    def turns(stream, **options):
        cache = make_prompt_cache(model)
        for prompt, kinds in ((PROMPT[:length], kv), (PROMPT[-length:], {}), (PROMPT[1 : 1 + length], kv)):
            responses = list(stream(model, tokenizer, prompt, max_tokens=12, prompt_cache=cache, **kinds, **options))
            yield [r.token for r in responses], [r.logprobs for r in responses], [type(c) for c in cache]

    def late(stream, **options):
        """The first turn unquantized, so that a later one begins at or behind the start."""
        cache = make_prompt_cache(model)
        for prompt, kinds in ((PROMPT[:7], {}), (PROMPT[:length], kv)):
            responses = list(stream(model, tokenizer, prompt, max_tokens=6, prompt_cache=cache, **kinds, **options))
            yield [r.token for r in responses], [r.logprobs for r in responses], [type(c) for c in cache]

    for conversation in (turns, late):
        for ours, plain in zip(
            conversation(stream_generate, ngram=True), conversation(mlx_lm.stream_generate), strict=True
        ):
            assert ours[0] == plain[0] and ours[2] == plain[2]
            for mine, theirs in zip(ours[1], plain[1], strict=True):
                assert mx.allclose(mine, theirs, atol=1e-3)  # a row quantized too soon or too late is far beyond


def test_rows_of_logits_and_top_n():
    from dflash_mlx.targets.verification import Verification

    logits = mx.random.normal((1, 5, VOCAB)).astype(mx.bfloat16)
    verification = Verification(logits, None)
    assert verification.row(3).dtype == mx.float32 and mx.array_equal(
        verification.row(3), logits[0, 3].astype(mx.float32)
    )
    values, ids = verification.top(4)
    assert mx.array_equal(values, mx.sort(logits.astype(mx.float32), axis=-1)[..., ::-1][..., :4])
    assert mx.array_equal(mx.take_along_axis(logits.astype(mx.float32), ids, axis=-1), values)
