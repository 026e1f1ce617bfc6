"""However a draft context came to be, it stands for the same committed tokens, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.draft import DFlashDraft, DraftConfig, DraftContext, finite
from dflash_mlx.draft.context import STEP

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 6
CONFIG = DraftConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=24,
    vocab_size=31,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    block_size=BLOCK,
    num_target_layers=4,
    capture_layer_ids=(0, 2),
    mask_token_id=3,
    layer_types=(FULL, SLIDING),
    sliding_window=10,
)
TOKENS = 1200
# The same float32 sums, in matmuls of other heights; hidden states are O(1).
TOLERANCE = 2e-5


def build(config: DraftConfig = CONFIG) -> DFlashDraft:
    mx.random.seed(1)
    draft = DFlashDraft(config)
    mx.eval(draft.parameters())
    return draft


DRAFT = build()
HIDDEN = mx.random.normal((1, TOKENS, 2 * CONFIG.hidden_size))
INPUTS = mx.random.normal((1, BLOCK, CONFIG.hidden_size))


def block_hidden(context: DraftContext, draft: DFlashDraft = DRAFT) -> mx.array:
    return draft(INPUTS, context)


def fresh(num_tokens: int, *, limit: int | None = None, position: int = 0, draft: DFlashDraft = DRAFT) -> mx.array:
    """What the block sees of the first tokens, taken in at once."""
    context = draft.make_context(position, limit=limit)
    draft.extend(context, HIDDEN[:, :num_tokens])
    return block_hidden(context, draft)


def assert_same(a: mx.array, b: mx.array) -> None:
    assert mx.allclose(a, b, rtol=0, atol=TOLERANCE).item(), mx.abs(a - b).max().item()


@settings(max_examples=25, deadline=None)
@given(chunks=st.lists(st.integers(0, 90), min_size=1, max_size=12), position=st.integers(0, 3000))
def test_any_chunking_equals_one_extend(chunks: list[int], position: int) -> None:
    context, seen = DRAFT.make_context(position), 0
    for n in chunks:
        DRAFT.extend(context, HIDDEN[:, seen : seen + n])
        seen += n
    assert context.position == position + seen
    assert_same(block_hidden(context), fresh(seen, position=position))


@settings(max_examples=25, deadline=None)
@given(
    warm=st.integers(0, 100),
    rounds=st.lists(st.tuples(st.integers(1, BLOCK), st.booleans(), st.integers(0, BLOCK)), min_size=1, max_size=30),
    limit=st.sampled_from([1, 7, 40, None]),
)
def test_rounds_with_blocks_and_drops_equal_a_fresh_context(
    warm: int, rounds: list[tuple[int, bool, int]], limit: int | None
) -> None:
    """Drops reach back at most `spare` tokens, which is a block, behind the furthest position."""
    context, seen, furthest = DRAFT.make_context(limit=limit), 0, 0
    for n, proposes, dropped in [(BLOCK, False, 0)] * warm + rounds:
        DRAFT.extend(context, HIDDEN[:, seen : seen + n])
        seen += n
        furthest = max(furthest, seen)
        if proposes:
            block_hidden(context)
        dropped = min(dropped, seen, seen - (furthest - BLOCK))
        context.trim(dropped)
        seen -= dropped
    assert_same(block_hidden(context), fresh(seen, limit=limit))


def test_a_block_leaves_nothing_behind() -> None:
    context = DRAFT.make_context()
    DRAFT.extend(context, HIDDEN[:, :20])
    first = block_hidden(context)
    DRAFT(mx.random.normal((1, 3, CONFIG.hidden_size)), context)
    assert context.position == 20
    assert_same(block_hidden(context), first)


@pytest.mark.parametrize("limit", [5, 300, 700])
def test_moves_of_the_buffer_change_nothing(limit: int) -> None:
    """One row at a time past several moves, with a proposal every few rows, also right before and after a move."""
    context = DRAFT.make_context(limit=limit)
    for seen in range(1, TOKENS + 1):
        DRAFT.extend(context, HIDDEN[:, seen - 1 : seen])
        if seen % 97 == 0 or seen % STEP in (0, 1, STEP - 1):
            assert_same(block_hidden(context), fresh(seen, limit=limit))
        mx.eval(context.arrays())


def test_more_tokens_than_the_bound_are_cut_before_they_are_projected() -> None:
    context = DRAFT.make_context(limit=50)
    seen: list[int] = []
    original = DRAFT.fc

    def spy(x: mx.array) -> mx.array:
        seen.append(x.shape[1])
        return original(x)

    DRAFT.fc = spy
    try:
        DRAFT.extend(context, HIDDEN)
    finally:
        DRAFT.fc = original
    assert seen == [context.bound] == [50 + BLOCK]
    assert context.position == TOKENS
    assert_same(block_hidden(context), fresh(TOKENS, limit=50))


def test_an_old_token_beyond_the_limit_is_not_seen() -> None:
    config = replace(CONFIG, layer_types=(FULL, FULL), sliding_window=None)
    draft, changed = build(config), mx.concatenate([HIDDEN[:, :100] + 1, HIDDEN[:, 100:]], axis=1)
    for hidden, limit, same in ((changed, 20, True), (changed, 21, False)):
        context = draft.make_context(limit=limit)
        draft.extend(context, hidden[:, :120])
        assert mx.allclose(block_hidden(context, draft), fresh(120, limit=limit, draft=draft)).item() == same


def test_the_default_limit() -> None:
    for positions, limit in ((512, 512), (4096, 4096), (131072, 4096)):
        draft = build(replace(CONFIG, max_position_embeddings=positions))
        assert draft.make_context().bound == limit + BLOCK


@pytest.mark.parametrize("layer_types", [(FULL, FULL), (SLIDING, FULL), (SLIDING, SLIDING)])
def test_an_empty_context_works(layer_types: tuple[str, ...]) -> None:
    """The block then attends itself; a single row attends its own value whatever its position."""
    draft = build(replace(CONFIG, layer_types=layer_types))
    context = draft.make_context(17)
    assert finite(draft(INPUTS, context)).item()
    one = INPUTS[:, :1]
    assert_same(draft(one, context), draft(one, draft.make_context(0)))
    draft.extend(context, HIDDEN[:, :0])
    assert context.position == 17 and finite(draft(INPUTS, context)).item()


def test_trim_to_nothing_and_beyond() -> None:
    context = DRAFT.make_context(4)
    DRAFT.extend(context, HIDDEN[:, :9])
    context.trim(9)
    assert_same(block_hidden(context), block_hidden(DRAFT.make_context(4)))
    context.trim(4)
    assert context.position == 0
    with pytest.raises(ValueError, match="1 tokens cannot be dropped; the draft context is at 0"):
        context.trim(1)


def test_memory_is_flat_over_100k_tokens() -> None:
    """100,000 tokens in chunks; what is held and what a write needs at most stay as they were after 2,000."""
    context, chunk = DRAFT.make_context(limit=500), mx.random.normal((1, 250, 2 * CONFIG.hidden_size))
    held, peak = [], []
    for _ in range(400):
        mx.reset_peak_memory()
        DRAFT.extend(context, chunk)
        mx.eval(context.arrays())
        held.append(context.nbytes)
        peak.append(mx.get_peak_memory())
    assert context.position == 100_000
    rows = 2 * CONFIG.head_dim * 4  # bytes of a row's keys and values in a layer
    assert max(held[8:]) == max(held[8:20]) <= 2 * rows * (500 + BLOCK + 2 * STEP + 250)
    # Which temporaries of a chunk are alive together is a matter of thread timing; growth would be tenfold.
    assert max(peak[200:]) <= max(peak[8:200]) * 1.5


def test_a_write_is_in_place() -> None:
    """A row or a block costs a small part of the buffer, however long the context is."""
    config = replace(CONFIG, layer_types=(FULL, FULL), head_dim=64, sliding_window=None, max_position_embeddings=40960)
    draft = build(config)
    context = draft.make_context()
    draft.extend(context, mx.random.normal((1, 4096, 2 * CONFIG.hidden_size)))
    mx.eval(context.arrays())
    for _ in range(3):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        draft.extend(context, HIDDEN[:, :2])
        mx.eval(draft(INPUTS, context), context.arrays())
        assert mx.get_peak_memory() - before < context.nbytes / 4
