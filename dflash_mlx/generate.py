"""Prompt to text, as mlx-lm does it; with a DFlash draft the same tokens come in fewer target forwards."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.generate import GenerationResponse as PlainResponse
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .draft import DFlashDraft
from .errors import DFlashError, UnsupportedOptionError, UnsupportedTargetError
from .load import check_pair
from .prompt_cache import PromptCache
from .speculative.accept import make_rule
from .speculative.ending import Ending
from .speculative.loop import Step, speculate
from .speculative.ngram import HintSource, NgramSource, Source
from .speculative.proposers import CopyProposer, DraftProposer, Proposer, Shape
from .speculative.sampling import LogitsProcessor, SamplerFunction, is_greedy
from .speculative.statistics import Round, Statistics
from .speculative.width import make_width
from .targets.anatomy import vocab_size
from .targets.target import KVQuantization, LentCache, Target
from .text import StopFilter, TextStream

COPY_BLOCK_SIZE = 16  # nodes of a proposal without a draft
MAX_TREE_BUDGET = 256
KV_BITS, KV_GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@dataclass
class GenerationResponse(PlainResponse):
    """mlx-lm's response, one per token, with the statistics of the rounds so far.

    from_draft is true for accepted draft tokens, false for bonus tokens. statistics is None without a draft.
    """

    statistics: Statistics | None = field(default=None, repr=False)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int] | mx.array,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole text at once; arguments as `stream_generate`'s, `verbose` prints as mlx-lm does."""
    text, response = "", None
    responses = stream_generate(model, tokenizer, prompt, **kwargs)
    if verbose:
        print("=" * 10)
    for response in responses:
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose and response is not None:
        print("\n" + "=" * 10)
        print(summary(response) if text else "No text generated for this prompt")
    return text


def summary(response: PlainResponse) -> str:
    """The lines that mlx-lm prints behind a text, and how the speculation did."""
    lines = [
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {response.peak_memory:.3f} GB",
    ]
    statistics = getattr(response, "statistics", None)
    if statistics is not None:
        length = f"{statistics.acceptance_length:.2f} tokens committed per target forward"
        lines.append(
            f"Speculation: {length if statistics.drafted_rounds else 'nothing drafted'}, "
            f"{len(statistics.rounds)} target forwards"
        )
    return "\n".join(lines)


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int] | mx.array,
    max_tokens: int = 256,
    draft_model: DFlashDraft | None = None,
    stream: mx.Stream = generation_stream,
    *,
    stop: str | Sequence[str] = (),
    **kwargs: Any,
) -> Iterator[PlainResponse]:
    """mlx_lm.stream_generate, one response per token, decoded speculatively with a draft, n-grams or a hint.

    Beside mlx-lm's own arguments:
    stop: strings that end the output (they and what follows are not part of it).
    draft_model: a DFlash draft. block_size: nodes of its block with the anchor, its own by default; mlx-lm's
        num_draft_tokens + 1 means the same.
    tree_budget: nodes of a tree besides the anchor; 0 proposes a chain. tree_top_k: tokens of every position of the
        draft that the tree may hold, 16 by default.
    width: how much of the block and the budget is used every round: "full"; "auto", what commits the most tokens per
        second; or a probability, which leaves out what the draft finds less probable. The output is the same.
    ngram: propose what followed the context's longest repeated suffix; with or without a draft.
    hint_tokens: the continuation that you expect (a template, the text being edited), proposed while the output
        follows it; counted apart in the statistics.

    A `prompt_cache` handed in holds, whenever the iterator ends or is closed, the prompt and exactly the tokens
    yielded. Raises DFlashError for bad input before anything is computed.
    """
    if whole("max_tokens", max_tokens) == 0 or max_tokens < -1:
        raise DFlashError(f"max_tokens is {max_tokens}; use 1 or more, or -1 for no limit.")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise DFlashError(f"stop holds {text!r}; give strings of one character or more, or leave it out.")
    if draft_model is None and not kwargs.get("ngram") and kwargs.get("hint_tokens") is None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("ngram", "hint_tokens")}
        for name, default in (("block_size", None), ("tree_budget", 0), ("tree_top_k", None), ("width", "full")):
            flag = name.replace("_", "-")
            if kwargs.pop(name, default) != default:
                raise UnsupportedOptionError(
                    f"{name} needs a draft or n-grams; give draft_model (--draft) or leave {name} (--{flag}) out."
                )
        return _plain(model, tokenizer, prompt, max_tokens, stream, stops, kwargs)
    if draft_model is not None and not isinstance(draft_model, DFlashDraft):
        raise DFlashError(
            f"draft_model is a {type(draft_model).__module__}.{type(draft_model).__name__}, not a DFlash draft; "
            "load one with dflash_mlx.load_draft."
        )
    return _speculative(model, tokenizer, prompt, max_tokens, draft_model, stream, stops, **kwargs)


def _plain(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int,
    stream: mx.Stream,
    stops: tuple[str, ...],
    kwargs: dict,
) -> Iterator[PlainResponse]:
    """mlx-lm's own decoding, cut at stop strings."""
    responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens, None, stream, **kwargs)
    if not stops:
        yield from responses
        return
    text = StopFilter(stops)
    for response in responses:
        response.text = text.push(response.text)
        if response.finish_reason is not None:
            response.text += text.flush()
        if text.stopped:
            response.finish_reason = "stop"
        yield response
        if text.stopped:
            return


@dataclass(frozen=True)
class Request:
    """One generation's parameters after checking; `tokens` is the prompt, int [n]."""

    tokens: mx.array
    max_tokens: int
    sampler: SamplerFunction | None
    processors: Sequence[LogitsProcessor]
    eos_token_ids: frozenset[int]
    prefill_step_size: int
    progress: Callable[[int, int], None]


def _speculative(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int,
    draft: DFlashDraft | None,
    stream: mx.Stream,
    stops: tuple[str, ...],
    *,
    block_size: int | None = None,
    num_draft_tokens: int | None = None,
    tree_budget: int = 0,
    tree_top_k: int | None = None,
    width: str | float = "full",
    ngram: bool = False,
    hint_tokens: Sequence[int] | None = None,
    sampler: SamplerFunction | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
) -> Iterator[GenerationResponse]:
    """Check everything, then decode; a function of its own so that errors come at the call, not at the first token."""
    if input_embeddings is not None:
        raise UnsupportedOptionError(
            "input_embeddings cannot be combined with speculation; leave out draft_model, ngram and hint_tokens."
        )
    if whole("prefill_step_size", prefill_step_size) < 1:
        raise DFlashError(f"prefill_step_size is {prefill_step_size}; use 1 or more.")
    for name, function in (("sampler", sampler), *(("logits_processors", f) for f in logits_processors or ())):
        if function is not None and not callable(function):
            raise DFlashError(f"{name} holds {function!r}, which cannot be called; give a function.")
    if draft is not None:
        check_pair(model, draft)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    request = Request(
        tokens=encode(model, tokenizer, prompt),
        max_tokens=max_tokens,
        sampler=sampler,
        processors=tuple(logits_processors or ()),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        prefill_step_size=prefill_step_size,
        progress=prompt_progress_callback or (lambda done, total: None),
    )
    shape = checked_shape(draft, checked_block_size(block_size, num_draft_tokens), tree_budget, tree_top_k)
    sources = make_sources(model, request.tokens.size, ngram, hint_tokens)
    keep_cache = prompt_cache is not None
    caches = checked_caches(model, prompt_cache, max_kv_size)
    quantization = None if kv_bits is None else checked_quantization(caches, kv_bits, kv_group_size, quantized_kv_start)
    target = Target(
        model,
        caches,
        capture_layer_ids=() if draft is None else draft.capture_layer_ids,
        eos_token_ids=request.eos_token_ids,
        kv_quantization=quantization,
    )
    if tree_budget and target.tree_refusal is not None:
        raise UnsupportedTargetError(f"{target.tree_refusal.removesuffix('.')} (tree_budget 0).")
    text = TextStream(tokenizer.detokenizer, stops)

    def responses(proposer: Proposer, statistics: Statistics) -> Iterator[GenerationResponse]:
        return respond(target, proposer, request, text, bool(stops), stream, keep_cache, statistics)

    if draft is None:
        if width != "full":
            raise UnsupportedOptionError(
                f"width {width!r} needs a draft's probabilities; give draft_model (--draft) or leave it out."
            )
        return responses(CopyProposer(target, sources, shape=shape), Statistics())
    greedy = sampler is None or is_greedy(sampler)
    adaptive = make_width(width, timed=greedy)
    context = caches.draft_context(draft, target.position) if isinstance(caches, PromptCache) else None
    statistics = Statistics(unseen_tokens=target.position if context is None else 0)
    proposer = DraftProposer(
        draft, target, shape=shape, sampler=sampler, context=context, sources=sources, width=adaptive
    )
    drafted = responses(proposer, statistics)
    return _remembering(caches, draft, proposer, drafted) if isinstance(caches, PromptCache) else drafted


def _remembering(
    cache: PromptCache, draft: DFlashDraft, proposer: DraftProposer, responses: Iterator[GenerationResponse]
) -> Iterator[GenerationResponse]:
    """Leave the draft context with the cache when the generation ends or the caller stops it.

    Behind a failure some of the draft's layers may hold more than others: nothing is remembered then.
    """
    ended = False
    try:
        yield from responses
        ended = True
    except GeneratorExit:
        ended = True
        raise
    finally:
        cache.remember(draft, proposer.context if ended else None)


def respond(
    target: Target,
    proposer: Proposer,
    request: Request,
    text: TextStream,
    has_stops: bool,
    stream: mx.Stream,
    keep_cache: bool,
    statistics: Statistics | None = None,
) -> Iterator[GenerationResponse]:
    """Steps to responses, one per token."""
    statistics = Statistics() if statistics is None else statistics
    ending = Ending(request.eos_token_ids, request.max_tokens, text.push if has_stops else None)
    with wired_limit(target.model, [stream]):
        started = time.perf_counter()
        steps = decode(target, proposer, request, ending, stream=stream, keep_cache=keep_cache)
        try:
            num_tokens, prompt_tps, round_started = 0, 0.0, started
            for step in steps:
                now = time.perf_counter()
                if not statistics.rounds:
                    prompt_tps, started = request.tokens.size / (now - started), now
                statistics.rounds.append(Round.of(step, now - round_started))
                for i, token in enumerate(step.tokens):
                    step.taken = i + 1
                    num_tokens += 1
                    last = step.finish_reason is not None and step.taken == len(step.tokens)
                    if not has_stops and token not in request.eos_token_ids:
                        text.push(token)
                    yield GenerationResponse(
                        text=text.take() + (text.finish() if last else ""),
                        token=token,
                        logprobs=step.logprobs[i],
                        from_draft=i < step.num_accepted,
                        prompt_tokens=request.tokens.size,
                        prompt_tps=prompt_tps,
                        generation_tokens=num_tokens,
                        generation_tps=num_tokens / (time.perf_counter() - started),
                        peak_memory=mx.get_peak_memory() / 1e9,
                        finish_reason=step.finish_reason if last else None,
                        statistics=statistics,
                    )
                round_started = time.perf_counter()
        finally:
            steps.close()


def decode(
    target: Target,
    proposer: Proposer,
    request: Request,
    ending: Ending,
    *,
    stream: mx.Stream,
    keep_cache: bool = True,
) -> Iterator[Step]:
    """Prefill, then the loop."""
    total = request.tokens.size
    request.progress(0, total)
    with mx.stream(stream):
        chunks = target.prefill(request.tokens, request.prefill_step_size)
        done = 0
        for upto, hidden in chunks:
            proposer.extend(request.tokens[done:upto], hidden)
            mx.async_eval(proposer.arrays())
            done = upto
            request.progress(done, total)
        rule = make_rule(request.sampler, request.processors, request.tokens, ending.ends)
        anchor = request.tokens[-1].item()
    steps = speculate(target, proposer, rule, ending, anchor, stream=stream, keep_cache=keep_cache)
    try:
        for number, step in enumerate(steps):
            if number == 0:
                request.progress(total, total)
            if number % 64 == 63:
                mx.clear_cache()
            yield step
    finally:
        steps.close()


def encode(model: nn.Module, tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array) -> mx.array:
    """The prompt as tokens, int [n], by mlx-lm's rule for special tokens; DFlashError when it cannot be decoded."""
    if isinstance(prompt, str):
        add_special_tokens = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    tokens = checked_tokens("The prompt", prompt, model)
    if tokens.size == 0:
        raise DFlashError("The prompt is empty; give at least one token.")
    limit = context_size(model)
    if limit is not None and tokens.size >= limit:
        warnings.warn(
            f"The prompt has {tokens.size} tokens but the target was made for {limit}; expect poor text, as from plain "
            "decoding, or shorten the prompt.",
            stacklevel=4,
        )
    return tokens


def checked_tokens(name: str, tokens: Any, model: nn.Module) -> mx.array:
    """Tokens of a list or an array, int32 [n]; DFlashError when they are no row of tokens of the target."""
    try:
        array = tokens if isinstance(tokens, mx.array) else mx.array(np.array(list(tokens)))
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal lengths, strings
        raise DFlashError(f"{name} is no sequence of tokens; encode it with the target's tokenizer.") from error
    if array.size == 0:
        return mx.zeros((0,), dtype=mx.int32)
    if array.ndim != 1:
        raise DFlashError(f"{name} has shape {tuple(array.shape)}; give one sequence of tokens.")
    if not mx.issubdtype(array.dtype, mx.integer):
        raise DFlashError(f"{name} holds {array.dtype} values such as {array[0].item()}; tokens are integers.")
    lowest, highest, rows = array.min().item(), array.max().item(), vocab_size(model)
    if lowest < 0 or (rows is not None and highest >= rows):
        wrong = lowest if lowest < 0 else highest
        end = "" if rows is None else f"..{rows - 1}"
        raise DFlashError(f"{name} holds token {wrong}, outside 0{end}; encode it with the target's tokenizer.")
    return array.astype(mx.int32)


def context_size(model: nn.Module) -> int | None:
    """Positions the target was made for; None where its config does not say or stretches them."""
    args = getattr(model, "args", None)
    if getattr(args, "rope_scaling", None) or getattr(args, "rope_parameters", None):
        return None
    limit = getattr(args, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def whole(name: str, value: Any) -> int:
    """The value of a parameter that counts something; DFlashError for anything but an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DFlashError(f"{name} is {value!r}; give a whole number.")
    return int(value)


def checked_block_size(block_size: int | None, num_draft_tokens: int | None) -> int | None:
    """mlx-lm's num_draft_tokens leaves the anchor out; DFlashError when both are given and differ."""
    if num_draft_tokens is None:
        return block_size
    if block_size not in (None, whole("num_draft_tokens", num_draft_tokens) + 1):
        raise DFlashError(
            f"num_draft_tokens {num_draft_tokens} means a block_size of {num_draft_tokens + 1}, but block_size is "
            f"{block_size}; leave one of them out."
        )
    return num_draft_tokens + 1


def checked_shape(draft: DFlashDraft | None, block_size: int | None, tree_budget: int, tree_top_k: int | None) -> Shape:
    """DFlashError names a value outside its range or options that mean nothing together."""
    whole("tree_budget", tree_budget)
    for name, value in (("block_size", block_size), ("tree_top_k", tree_top_k)):
        if value is not None:
            whole(name, value)
    largest = COPY_BLOCK_SIZE if draft is None else draft.block_size
    size = largest if block_size is None else block_size
    if draft is None and size < 1:
        raise DFlashError(f"block_size {size} is below 1; leave it out for {largest}.")
    if draft is not None and not 1 <= size <= largest:
        raise DFlashError(
            f"block_size {size} is outside 1..{largest}, the block this draft was trained for; "
            "choose a smaller one or leave it out."
        )
    if not 0 <= tree_budget <= MAX_TREE_BUDGET:
        raise DFlashError(f"tree_budget {tree_budget} is outside 0..{MAX_TREE_BUDGET}; 0 proposes a chain.")
    if tree_budget and size == 1:
        raise DFlashError("A block_size of 1 leaves no position for a tree; use 2 or more, or tree_budget 0.")
    if tree_top_k is not None and not tree_budget:
        raise DFlashError("tree_top_k needs a tree; give tree_budget or leave tree_top_k out.")
    if tree_top_k is not None and tree_top_k < 1:
        raise DFlashError(f"tree_top_k {tree_top_k} is below 1; 16 is usual.")
    return Shape(size, tree_budget, tree_top_k or Shape.tree_top_k)


def checked_caches(model: nn.Module, prompt_cache: list[Any] | None, max_kv_size: int | None) -> list[Any]:
    """The caller's caches, or new ones; DFlashError when they are not as many as the model's layers want."""
    if max_kv_size is not None and whole("max_kv_size", max_kv_size) < 1:
        raise DFlashError(f"max_kv_size is {max_kv_size}; use 1 or more, or leave it out.")
    if prompt_cache is None:
        if max_kv_size is not None and hasattr(model, "make_cache"):
            warnings.warn(
                f"max_kv_size {max_kv_size} has no effect, as in mlx-lm: this model makes its own caches.", stacklevel=4
            )
        return make_prompt_cache(model, max_kv_size)
    own = make_prompt_cache(model)
    if not isinstance(prompt_cache, list) or len(prompt_cache) != len(own) or None in prompt_cache:
        size = f" of {len(prompt_cache)}" if isinstance(prompt_cache, (list, tuple)) else ""
        raise DFlashError(
            f"prompt_cache is a {type(prompt_cache).__name__}{size}, but this model wants a list of {len(own)} caches; "
            "make one with make_prompt_cache(model)."
        )
    for layer, (given, wanted) in enumerate(zip(prompt_cache, own, strict=True)):
        if not same_kind(given, wanted):
            raise DFlashError(
                f"prompt_cache holds a {_kind(given)} at {layer}, but this model wants a {_kind(wanted)} there; give a "
                "cache that this model filled, or make one with make_prompt_cache(model)."
            )
    return prompt_cache


def same_kind(given: Any, wanted: Any) -> bool:
    """Whether a cache can stand where the model itself makes `wanted`; one that is lent says so when it is used."""
    if isinstance(given, LentCache):
        return True
    if isinstance(wanted, CacheList):
        parts = given.caches if isinstance(given, CacheList) else ()
        return len(parts) == len(wanted.caches) and all(map(same_kind, parts, wanted.caches))
    if isinstance(wanted, ArraysCache):
        return isinstance(given, ArraysCache) and len(given.cache) == len(wanted.cache)
    # Any cache of keys and values can stand for another, as in mlx-lm: quantized, or with max_kv_size.
    return not isinstance(given, (ArraysCache, CacheList))


def _kind(cache: Any) -> str:
    parts = cache.caches if isinstance(cache, CacheList) else cache.cache if isinstance(cache, ArraysCache) else None
    return type(cache).__name__ + ("" if parts is None else f" of {len(parts)}")


def checked_quantization(caches: list[Any], kv_bits: int, kv_group_size: int, start: int) -> KVQuantization:
    if kv_bits not in KV_BITS or kv_group_size not in KV_GROUP_SIZES:
        raise DFlashError(
            f"kv_bits {kv_bits} in groups of {kv_group_size} is nothing that MLX quantizes; use {KV_BITS} bits and "
            f"groups of {KV_GROUP_SIZES}."
        )
    if any(isinstance(cache, RotatingKVCache) for cache in caches):
        raise UnsupportedOptionError(
            "kv_bits cannot quantize sliding-window caches, which max_kv_size makes too; leave one of them out."
        )
    return KVQuantization(kv_bits, kv_group_size, start)


def make_sources(
    model: nn.Module, prompt_size: int, ngram: bool, hint_tokens: Sequence[int] | mx.array | None
) -> list[Source]:
    """The sources of copied continuations, the surer first; DFlashError for a hint that is no list of tokens."""
    sources: list[Source] = []
    if hint_tokens is not None:
        sources.append(HintSource(checked_tokens("hint_tokens", hint_tokens, model).tolist(), prompt_size))
    return [*sources, NgramSource()] if ngram else sources
