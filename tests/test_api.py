"""The public API is mlx-lm's; bad input gets one sentence that names the value."""

import copy
import inspect
import itertools
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from drafts import CONFIG, random_draft, write_draft
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors
from reference import plain_tokens
from tiny import LLAMA, build
from tokens import tiny_tokenizer

import dflash_mlx
from dflash_mlx import (
    CheckpointError,
    DFlashError,
    PairMismatchError,
    UnsupportedOptionError,
    generate,
    load,
    make_sampler,
    stream_generate,
)
from dflash_mlx.generate import same_kind

PROMPT = [5, 7, 9, 11, 3]


@pytest.fixture(scope="module")
def model():
    return build("llama", seed=5)


@pytest.fixture(scope="module")
def draft():
    return random_draft()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_signatures_begin_as_mlx_lms_do():
    for name in ("generate", "stream_generate"):
        ours = list(inspect.signature(getattr(dflash_mlx, name)).parameters.values())
        theirs = list(inspect.signature(getattr(mlx_lm, name)).parameters.values())
        positional = [p for p in theirs if p.kind is not p.VAR_KEYWORD]
        assert [(p.name, p.default) for p in ours[: len(positional)]] == [(p.name, p.default) for p in positional]


def test_prompt_as_text_tokens_and_array(model, draft, tokenizer):
    text = " w4 w5 w7"
    tokens = tokenizer.encode(text)
    forms = [text, tokens, tuple(tokens), mx.array(tokens), np.array(tokens)]
    outputs = [[r.token for r in stream_generate(model, tokenizer, p, 12, draft)] for p in forms]
    assert all(output == outputs[0] for output in outputs)
    assert generate(model, tokenizer, text, max_tokens=12, draft_model=draft) == mlx_lm.generate(
        model, tokenizer, text, max_tokens=12
    )


@pytest.mark.parametrize("block_size", [None, 1, 2, 5, 8])
def test_draft_yields_plain_tokens_and_honest_statistics(model, draft, tokenizer, block_size):
    responses = list(stream_generate(model, tokenizer, PROMPT, 30, draft, block_size=block_size))
    assert [r.token for r in responses] == plain_tokens(model, PROMPT, 30)
    statistics = responses[-1].statistics
    assert sum(r.committed for r in statistics.rounds) == 30
    assert max(r.width for r in statistics.rounds) == (block_size or 8)
    assert sum(r.from_draft for r in responses) == sum(r.num_accepted for r in statistics.rounds)
    later = statistics.rounds[1:]
    assert statistics.acceptance_length == pytest.approx(sum(r.committed for r in later) / len(later))


def test_num_draft_tokens_is_mlx_lms_word_for_the_block(model, draft, tokenizer):
    responses = list(stream_generate(model, tokenizer, PROMPT, 20, draft, num_draft_tokens=3))
    assert max(r.width for r in responses[-1].statistics.rounds) == 4


@pytest.mark.parametrize("settings", [{}, {"temp": 0.8, "top_p": 0.9}])
def test_seeded_output_is_the_same_every_time(model, draft, tokenizer, settings):
    outputs = []
    for _ in range(2):
        mx.random.seed(7)
        sampler = make_sampler(**settings)
        outputs.append([r.token for r in stream_generate(model, tokenizer, PROMPT, 30, draft, sampler=sampler)])
    assert outputs[0] == outputs[1]


def test_processors_and_progress(model, draft, tokenizer):
    processors = make_logits_processors(repetition_penalty=1.5, logit_bias={3: 2.0})
    seen = []
    responses = stream_generate(
        model,
        tokenizer,
        PROMPT * 4,
        20,
        draft,
        logits_processors=processors,
        prefill_step_size=8,
        prompt_progress_callback=lambda done, total: seen.append((done, total)),
    )
    assert [r.token for r in responses] == plain_tokens(model, PROMPT * 4, 20, processors=processors)
    assert seen == [(0, 20), (8, 20), (16, 20), (19, 20), (20, 20)]


def test_second_turn_on_a_prompt_cache_equals_a_fresh_run(model, draft, tokenizer):
    cache = make_prompt_cache(model)
    first = [r.token for r in stream_generate(model, tokenizer, PROMPT, 13, draft, prompt_cache=cache)]
    turn = [8, 1, 40]
    second = [r.token for r in stream_generate(model, tokenizer, turn, 13, draft, prompt_cache=cache)]
    assert second == plain_tokens(model, PROMPT + first + turn, 13)


def test_prompt_cache_files_of_mlx_lm_in_both_directions(model, draft, tokenizer, tmp_path):
    """Case 13."""
    cache = make_prompt_cache(model)
    first = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 9, prompt_cache=cache)]
    save_prompt_cache(str(tmp_path / "plain.safetensors"), cache)
    cache = load_prompt_cache(str(tmp_path / "plain.safetensors"))
    second = [r.token for r in stream_generate(model, tokenizer, [8, 1], 9, draft, prompt_cache=cache)]
    assert second == plain_tokens(model, [*PROMPT, *first, 8, 1], 9)
    save_prompt_cache(str(tmp_path / "ours.safetensors"), cache)
    cache = load_prompt_cache(str(tmp_path / "ours.safetensors"))
    third = [r.token for r in mlx_lm.stream_generate(model, tokenizer, [30], 9, prompt_cache=cache)]
    assert third == plain_tokens(model, [*PROMPT, *first, 8, 1, *second, 30], 9)


def test_two_drafts_on_one_model_in_turn(model, tokenizer):
    """Each draft reads its own layers, also while the other's generation is open."""
    expected = plain_tokens(model, PROMPT, 24)
    other = random_draft(CONFIG | {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]}}, seed=3)
    drafts = [random_draft(), other]
    solo = [list(stream_generate(model, tokenizer, PROMPT, 24, d)) for d in drafts]
    mixed = list(zip(*(stream_generate(model, tokenizer, PROMPT, 24, d) for d in drafts), strict=True))
    for alone, column in zip(solo, zip(*mixed, strict=True), strict=True):
        assert [r.token for r in column] == [r.token for r in alone] == expected
        assert [r.from_draft for r in column] == [r.from_draft for r in alone]


def test_draft_acceptance_depends_on_its_own_layers(model, tokenizer):
    """The draft is handed the outputs of exactly the layers that it names, for every committed token."""
    hidden = []

    class Spy(type(random_draft())):
        def extend(self, context, target_hidden):
            hidden.append(target_hidden)
            super().extend(context, target_hidden)

    draft = random_draft()
    draft.__class__ = Spy
    tokens = [r.token for r in stream_generate(model, tokenizer, PROMPT, 10, draft)]
    outputs = layer_outputs(model, PROMPT + tokens, (0, 2))
    seen = mx.concatenate(hidden, axis=1)
    assert mx.allclose(seen, outputs[:, : seen.shape[1]], atol=1e-4)


def layer_outputs(model, tokens, layer_ids):
    """Outputs of the layers in a plain forward, layer by layer."""
    from mlx_lm.models.base import create_attention_mask

    x = model.model.embed_tokens(mx.array([tokens]))
    mask = create_attention_mask(x, None)
    outputs = []
    for layer in model.layers:
        x = layer(x, mask, cache=None)
        outputs.append(x)
    return mx.concatenate([outputs[i] for i in layer_ids], axis=-1)


class Overflowing(type(random_draft())):
    """A draft whose activations overflow in float16."""

    @property
    def dtype(self):
        return self.fake_dtype

    def set_dtype(self, dtype):
        self.fake_dtype = dtype

    def __call__(self, inputs, context):
        hidden = super().__call__(inputs.astype(mx.float32), context)
        return hidden if self.mends and self.fake_dtype == mx.float32 else hidden + mx.array(float("nan"))


@pytest.mark.parametrize("mends", [True, False])
@pytest.mark.parametrize("settings", [{}, {"temp": 1.0}])
def test_overflowing_draft_warns_and_changes_nothing(model, tokenizer, mends, settings):
    """Case 22."""
    draft = random_draft()
    draft.__class__ = Overflowing
    draft.fake_dtype, draft.mends = mx.float16, mends
    with pytest.warns(UserWarning, match="float32"):
        responses = list(stream_generate(model, tokenizer, PROMPT, 30, draft, sampler=make_sampler(**settings)))
    if not settings:
        assert [r.token for r in responses] == plain_tokens(model, PROMPT, 30)
    widths = [r.width for r in responses[-1].statistics.rounds]
    assert (max(widths[4:]) > 1) is mends  # speculation goes on in float32, or parks


# Bad input.


def refused(error, match, model, tokenizer, prompt=PROMPT, **options):
    with pytest.raises(error, match=match) as caught:
        next(iter(stream_generate(model, tokenizer, prompt, **options)))
    message = str(caught.value)
    assert message.count(". ") == 0 and message.endswith(".") and "\n" not in message, "one sentence"


def test_bad_requests(model, draft, tokenizer):
    refused(DFlashError, "max_tokens is 0", model, tokenizer, max_tokens=0, draft_model=draft)
    refused(DFlashError, "max_tokens is -5", model, tokenizer, max_tokens=-5, draft_model=draft)
    refused(DFlashError, "prompt is empty", model, tokenizer, prompt=[], draft_model=draft)
    refused(DFlashError, "prompt is empty", model, tokenizer, prompt="", draft_model=draft)
    refused(DFlashError, r"shape \(1, 2\)", model, tokenizer, prompt=mx.array([[1, 2]]), draft_model=draft)
    refused(DFlashError, r"97.* outside 0\.\.96", model, tokenizer, prompt=[1, 97], draft_model=draft)
    refused(DFlashError, r"-1.* outside 0\.\.96", model, tokenizer, prompt=[-1], draft_model=draft)
    for size in (0, -1, 9):
        refused(
            DFlashError, rf"block_size {size} is outside 1\.\.8", model, tokenizer, draft_model=draft, block_size=size
        )
    refused(DFlashError, "prefill_step_size is 0", model, tokenizer, draft_model=draft, prefill_step_size=0)
    refused(DFlashError, "stop holds ''", model, tokenizer, draft_model=draft, stop=[""])
    refused(DFlashError, "llama.Model, not a DFlash draft", model, tokenizer, draft_model=model)
    refused(
        UnsupportedOptionError,
        "input_embeddings",
        model,
        tokenizer,
        draft_model=draft,
        input_embeddings=mx.zeros((5, 32)),
    )
    refused(UnsupportedOptionError, "block_size needs a draft", model, tokenizer, block_size=4)
    with pytest.raises(TypeError, match="temperature_typo"):
        stream_generate(model, tokenizer, PROMPT, draft_model=draft, temperature_typo=1)


MISFITS = {
    "hidden_size is 64, .* hidden_size is 32": {"hidden_size": 64},
    "num_target_layers is 9, .* layers is 3": {"num_target_layers": 9},
    "vocab_size is 300, .* rows is 97": {"vocab_size": 300},
    "mask_token_id is 97, .* rows is 97": {
        "vocab_size": 98,
        "dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]},
    },
}


@pytest.mark.parametrize("match", MISFITS)
def test_draft_of_another_model_is_refused_with_both_values(model, tokenizer, match):
    draft = random_draft(CONFIG | MISFITS[match])
    refused(PairMismatchError, match, model, tokenizer, draft_model=draft)


def test_quantized_target_keeps_its_true_sizes(draft, tokenizer):
    model = build("llama", seed=5)
    fits = lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0  # noqa: E731
    nn.quantize(model, group_size=32, bits=8, class_predicate=fits)
    tokens = [r.token for r in itertools.islice(stream_generate(model, tokenizer, PROMPT, 8, draft), 8)]
    assert tokens == plain_tokens(model, PROMPT, 8)


def test_unknown_model_path_is_one_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="no/such/model"):
        load("no/such/model")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="mlx-lm can load"):
        load(str(tmp_path))


def test_context_that_rope_scaling_stretches_is_not_guessed():
    from dflash_mlx.generate import context_size

    assert context_size(build("llama")) == 4096
    scaled = LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert context_size(build("llama", scaled)) is None


# Prompt caches that keep the draft context.


def spoken(model, draft, tokenizer, prompt, cache, num_tokens=13):
    responses = list(stream_generate(model, tokenizer, prompt, num_tokens, draft, prompt_cache=cache))
    return [r.token for r in responses], [r.from_draft for r in responses], responses[-1].statistics


@pytest.mark.parametrize("stop_after", [1, 4, 9, 13])
@pytest.mark.parametrize("through_file", [False, True])
def test_draft_context_stays_with_our_prompt_cache(model, draft, tokenizer, tmp_path, stop_after, through_file):
    """The second turn drafts exactly as a run over the whole text does; a plain list says what the draft misses."""
    cache = dflash_mlx.make_prompt_cache(model)
    stream = stream_generate(model, tokenizer, PROMPT, 13, draft, prompt_cache=cache)
    first = [r.token for r in itertools.islice(stream, stop_after)]
    stream.close()
    if through_file:
        file = str(tmp_path / "cache.safetensors")
        dflash_mlx.save_prompt_cache(file, cache, {"model": "x"})
        assert len(load_prompt_cache(file)) == len(cache)  # mlx-lm reads it as its own
        cache, metadata = dflash_mlx.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"model": "x"}
    turn = [8, 1, 40]
    tokens, from_draft, statistics = spoken(model, draft, tokenizer, turn, cache)
    whole = spoken(model, draft, tokenizer, PROMPT + first + turn, None)
    assert (tokens, from_draft) == whole[:2] and statistics.unseen_tokens == 0
    again = make_prompt_cache(model)
    spoken(model, draft, tokenizer, PROMPT, again)
    assert spoken(model, draft, tokenizer, turn, again)[2].unseen_tokens == len(PROMPT) + 13


def test_context_of_another_draft_or_another_place_is_not_used(model, draft, tokenizer):
    cache = dflash_mlx.make_prompt_cache(model)
    first, _, _ = spoken(model, draft, tokenizer, PROMPT, cache)
    other = random_draft(seed=9)
    second, _, statistics = spoken(model, other, tokenizer, [8], cache)
    assert statistics.unseen_tokens == len(PROMPT) + 13
    list(mlx_lm.stream_generate(model, tokenizer, [30], 5, prompt_cache=cache))  # moves on without the draft
    assert spoken(model, other, tokenizer, [8], cache)[2].unseen_tokens == len(PROMPT) + 13 + 1 + 13 + 1 + 5
    assert second == plain_tokens(model, [*PROMPT, *first, 8], 13)


def test_no_context_is_kept_behind_a_failure(model, draft, tokenizer):
    """Some layers of the draft may hold more than others: the next turn starts without."""
    cache = dflash_mlx.make_prompt_cache(model)
    first, _, _ = spoken(model, draft, tokenizer, PROMPT, cache)

    def fails(tokens, logits):
        raise ValueError("processor")

    with pytest.raises(ValueError, match="processor"):
        list(stream_generate(model, tokenizer, [8], 5, draft, prompt_cache=cache, logits_processors=[fails]))
    second, _, statistics = spoken(model, draft, tokenizer, [30], cache)
    assert statistics.unseen_tokens == len(PROMPT) + 13 + 1
    assert second == plain_tokens(model, [*PROMPT, *first, 8, 30], 13)


def test_kv_bits_on_sliding_windows_is_refused_before_anything_runs(tokenizer):
    windowed = build(
        "llama",
        LLAMA
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "num_hidden_layers": 4},
    )
    four = random_draft(CONFIG | {"num_target_layers": 4})
    refused(UnsupportedOptionError, "kv_bits cannot quantize", windowed, tokenizer, draft_model=four, kv_bits=8)
    tokens = [r.token for r in stream_generate(windowed, tokenizer, PROMPT, 30, four)]
    assert tokens == plain_tokens(windowed, PROMPT, 30)[: len(tokens)]  # it may end earlier, at end-of-sequence


@pytest.mark.parametrize("max_kv_size", [5, 8, 16, 64])
def test_max_kv_size_means_what_it_means_in_mlx_lm(draft, tokenizer, max_kv_size):
    model = build("qwen3")  # it makes no caches of its own
    plain = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 40, max_kv_size=max_kv_size)]
    ours = [r.token for r in stream_generate(model, tokenizer, PROMPT, 40, draft, max_kv_size=max_kv_size)]
    assert ours == plain


def test_max_kv_size_that_mlx_lm_ignores_is_not_ignored_in_silence(model, draft, tokenizer):
    with pytest.warns(UserWarning, match="max_kv_size 8 has no effect"):
        list(stream_generate(model, tokenizer, PROMPT, 3, draft, max_kv_size=8))


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("max_tokens is 2.5", {"max_tokens": 2.5}),
        ("max_tokens is None", {"max_tokens": None}),
        ("stop holds 3", {"stop": [3]}),
        ("stop holds", {"stop": b"a"}),
        ("prompt holds .* values such as 1.5", {"prompt": [1.5, 2.7]}),
        ("prompt is no sequence", {"prompt": [[1], [2, 3]]}),
        ("sampler holds 'x'", {"sampler": "x"}),
        ("logits_processors holds 3", {"logits_processors": [3]}),
        ("wants a list of 3 caches", {"prompt_cache": []}),
        ("wants a list of 3 caches", {"prompt_cache": [None] * 3}),
        ("wants a list of 3 caches", {"prompt_cache": make_prompt_cache(build("llama")) * 2}),
        ("wants a list of 3 caches", {"prompt_cache": tuple(make_prompt_cache(build("llama")))}),
        ("max_kv_size is 0", {"max_kv_size": 0}),
        ("kv_bits 7", {"kv_bits": 7}),
        ("tree_budget is None", {"tree_budget": None}),
        ("holds a ArraysCache of 2 at 0, .* wants a KVCache", {"prompt_cache": [ArraysCache(2) for _ in range(3)]}),
        ("holds a CacheList of 1 at 2", {"prompt_cache": [KVCache(), KVCache(), CacheList(KVCache())]}),
        ("groups of 48", {"kv_bits": 4, "kv_group_size": 48}),
        ("num_draft_tokens 1 means a block_size of 2", {"num_draft_tokens": 1, "block_size": 8}),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(model, draft, tokenizer, match, options):
    prompt = options.pop("prompt", PROMPT)
    refused(DFlashError, match, model, tokenizer, prompt=prompt, draft_model=draft, **options)


def test_a_copied_prompt_cache_keeps_the_context_and_shares_the_draft(model, draft, tokenizer):
    """What mlx-lm's server does with a prefix that two requests share."""
    cache = dflash_mlx.make_prompt_cache(model)
    first, _, _ = spoken(model, draft, tokenizer, PROMPT, cache)
    twin = copy.deepcopy(cache)
    assert twin._draft is draft and twin._context is not cache._context
    for each in (cache, twin):
        tokens, _, statistics = spoken(model, draft, tokenizer, [8, 1], each)
        assert statistics.unseen_tokens == 0 and tokens == plain_tokens(model, [*PROMPT, *first, 8, 1], 13)


class Counting:
    """A processor, or a sampler, of the caller's own that counts its calls."""

    calls = 0

    def __call__(self, *args):
        self.calls += 1
        return args[-1] if len(args) == 2 else mx.argmax(args[0], axis=-1)


@pytest.mark.parametrize("shape", [{}, {"tree_budget": 12}])
@pytest.mark.parametrize("role", ["sampler", "logits_processors"])
@pytest.mark.parametrize("num_tokens", [2, 5, 11])
def test_the_callers_code_is_not_called_behind_the_end(model, draft, tokenizer, num_tokens, role, shape):
    """Also where a whole block of the true continuation is proposed and the output ends within it."""
    expected = plain_tokens(model, PROMPT, 20)
    for options in ({"max_tokens": num_tokens}, {"stop": tokenizer.decode(expected[num_tokens - 1 : num_tokens])}):
        counting = Counting()
        options |= {role: counting if role == "sampler" else [counting], "hint_tokens": expected} | shape
        tokens = [r.token for r in stream_generate(model, tokenizer, PROMPT, draft_model=draft, **options)]
        assert tokens == expected[: len(tokens)] and counting.calls == len(tokens) <= num_tokens


def test_a_prompt_beyond_the_targets_context_decodes_as_plainly_with_a_warning(tokenizer, draft):
    """mlx-lm runs there, so speculation does; positions beyond the training are the user's to judge."""
    model = build("llama", LLAMA | {"max_position_embeddings": 16}, seed=5)
    prompt = [5, 7, 9, 11] * 5
    with pytest.warns(UserWarning, match="20 tokens but the target was made for 16"):
        responses = stream_generate(model, tokenizer, prompt, 12, draft)
    assert [r.token for r in responses] == plain_tokens(model, prompt, 12)


def test_caches_of_another_kind_are_refused_layer_by_layer():
    """Kinds and lengths are the model's own; how keys and values are kept is the caller's choice, as in mlx-lm."""
    own = [KVCache(), ArraysCache(2), CacheList(ArraysCache(1), KVCache())]
    fitting = [
        [QuantizedKVCache(), ArraysCache(2), CacheList(ArraysCache(1), RotatingKVCache(8))],
        [RotatingKVCache(8), ArraysCache(2), CacheList(ArraysCache(1), KVCache())],
    ]
    for caches in [own, *fitting]:
        assert all(map(same_kind, caches, own))
    wrong = (ArraysCache(2), CacheList(KVCache())), (KVCache(), ArraysCache(3), CacheList(ArraysCache(2)))
    for given in wrong[0]:
        assert not same_kind(given, own[0])
    for given in wrong[1]:
        assert not same_kind(given, own[1])
    for given in (
        KVCache(),
        ArraysCache(2),
        CacheList(ArraysCache(1)),
        CacheList(KVCache(), ArraysCache(1)),
        CacheList(ArraysCache(2), KVCache()),
    ):
        assert not same_kind(given, own[2])


def test_a_draft_given_as_the_target_says_so(tmp_path, monkeypatch):
    """Case 18, through the API; a repository is known once its config is on this machine."""
    write_draft(tmp_path / "draft")
    with pytest.raises(CheckpointError, match=r"draft holds a DFlash draft; give it with --draft \(load_draft\)"):
        dflash_mlx.load(str(tmp_path / "draft"))
    found = iter([None, str(tmp_path / "draft" / "config.json")])
    module = sys.modules["dflash_mlx.load"]
    monkeypatch.setattr(module, "try_to_load_from_cache", lambda repo, file: next(found))
    monkeypatch.setattr(mlx_lm, "load", lambda *args, **kwargs: (_ for _ in ()).throw(ValueError("missing tensors")))
    with pytest.raises(CheckpointError, match="someone/a-draft holds a DFlash draft"):
        dflash_mlx.load("someone/a-draft")


def test_one_token_says_that_nothing_was_drafted(model, draft, tokenizer, capsys):
    dflash_mlx.generate(model, tokenizer, PROMPT, verbose=True, max_tokens=1, draft_model=draft)
    assert "Speculation: nothing drafted, 1 target forwards" in capsys.readouterr().out
    dflash_mlx.generate(model, tokenizer, PROMPT, verbose=True, max_tokens=9, draft_model=draft)
    assert " tokens committed per target forward, " in capsys.readouterr().out
