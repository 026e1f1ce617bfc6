"""Cases from public bug reports that concern drafts, with their right values."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from drafts import CONFIG, dflash2, random_draft, write_draft
from reference import plain_tokens
from tiny import LLAMA, build
from tokens import tiny_tokenizer

import dflash_mlx
from dflash_mlx.draft import load_draft

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_case_18_selector_codebooks_load_under_bare_and_full_names(tmp_path: Path, suffix: str) -> None:
    weights = write_draft(tmp_path, dflash2())
    renamed = {
        next((book + suffix for book in CODEBOOKS if name.startswith(book)), name): x for name, x in weights.items()
    }
    assert {book + suffix for book in CODEBOOKS} <= set(renamed)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    selector = load_draft(tmp_path).candidate_selector
    for book, table in zip(CODEBOOKS, (selector.predecessor_codebook, selector.successor_codebook), strict=True):
        assert mx.array_equal(table.weight, renamed[book + suffix])


def test_case_21_a_pruned_head_is_never_tied(tmp_path: Path) -> None:
    """`tie_word_embeddings` true, copied from the target, beside a head of the draft's own."""
    tokens = [3, 4, 9, 17, 40, 60, 96]
    weights = write_draft(tmp_path)
    head = mx.random.normal((len(tokens), CONFIG["hidden_size"]), key=mx.random.key(3))
    weights |= {"lm_head.weight": head, "d2t": mx.array(np.array(tokens) - np.arange(len(tokens)))}
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"tie_word_embeddings": True, "draft_vocab_size": len(tokens)})
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    draft = load_draft(tmp_path)
    hidden = mx.random.normal((1, 5, CONFIG["hidden_size"]), key=mx.random.key(4))
    assert mx.allclose(draft.logits(hidden, lambda x: pytest.fail("the target's head was asked")), hidden @ head.T)


@pytest.mark.parametrize("options", [{}, {"tree_budget": 12}])
def test_case_23_a_prompt_longer_than_the_draft_was_made_for(options: dict) -> None:
    model = build("llama", LLAMA | {"max_position_embeddings": 8192}, seed=5)
    draft = random_draft(CONFIG | {"max_position_embeddings": 2048})
    prompt = mx.random.randint(5, 97, (5000,), key=mx.random.key(0)).tolist()
    cache = dflash_mlx.make_prompt_cache(model)
    responses = list(
        dflash_mlx.stream_generate(model, tiny_tokenizer(), prompt, 24, draft, prompt_cache=cache, **options)
    )
    assert [r.token for r in responses] == plain_tokens(model, prompt, 24)
    statistics = responses[-1].statistics
    assert sum(r.committed for r in statistics.rounds) == 24
    assert sum(r.from_draft for r in responses) == sum(r.num_accepted for r in statistics.rounds)
    context = cache._context
    assert context.position == 5024 and context.length(0) == 2048


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tree_budget": 12}, {"width": "auto"}, {"tree_budget": 12, "width": "auto"}])
def test_case_24_sampled_rounds_of_a_draft_leave_memory_flat(options: dict) -> None:
    model, tokenizer, draft = build("llama", seed=5), tiny_tokenizer(), random_draft()
    sampler = dflash_mlx.make_sampler(temp=1.0)
    rounds, memory = 0, []
    while rounds < 1500:
        responses = dflash_mlx.stream_generate(model, tokenizer, [5, 7, 9], 150, draft, sampler=sampler, **options)
        rounds += len(list(responses)[-1].statistics.rounds)
        del responses
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert max(memory) < memory[0] + 20_000  # a row of log-probabilities kept per round would be 0.6 MB
