"""Every cache kind shows each node exactly what one-row decoding shows at its position, whatever happened before."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from cache_model import (
    FULL,
    HEADS,
    KEYS_ONLY,
    LATENT,
    QUANTIZED,
    Driver,
    Release,
    Restore,
    Round,
    Snapshot,
    chunks,
    histories,
    prefills,
    rotating,
    rows,
    seen,
    slack,
    tokens_in,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
)

from dflash_mlx.cache import Block, carry
from dflash_mlx.errors import UnsupportedTargetError

KINDS = {kind.name: kind for kind in [FULL, QUANTIZED, LATENT, KEYS_ONLY]}
steps = st.sampled_from([1, 2, 5, 256])
windows = st.sampled_from([1, 2, 3, 4, 6, 8, 13])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None)
@given(prefill=prefills, history=histories)
def test_full_attention(name, prefill, history):
    Driver(KINDS[name]).run(prefill, history)


@settings(max_examples=120, deadline=None)
@given(size=windows, step=steps, prefill=prefills, history=histories)
def test_sliding_window(size, step, prefill, history):
    with slack(step):
        Driver(rotating(size)).run(prefill, history)


@settings(max_examples=80, deadline=None)
@given(size=windows, keep=st.integers(1, 5), step=steps, prefill=prefills, history=histories)
def test_sliding_window_that_keeps_its_first_tokens(size, keep, step, prefill, history):
    with slack(step):
        Driver(rotating(size + keep, keep)).run(prefill, history)


@settings(max_examples=60, deadline=None)
@given(size=windows, step=steps, prefill=prefills, history=histories)
def test_chunked_attention(size, step, prefill, history):
    with slack(step):
        Driver(chunks(size)).run(prefill, history)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6), st.booleans()), min_size=1, max_size=12), steps)
def test_members_of_a_list_keep_their_meaning(history, step):
    kinds = [FULL, rotating(4), KEYS_ONLY]
    stock = CacheList(FULL.make(), CacheList(kinds[1].make()), KEYS_ONLY.make())
    inner = stock[1]
    tokens, used = [], 0
    with slack(step):
        for width, kept, releases in history:
            carried = carry(stock)
            proposed = list(range(used, used + width))
            used += width
            before = carried.snapshot()
            carried.open(Block.chain(width))
            for kind, member in zip(kinds, (carried[0], carried[1][0], carried[2]), strict=True):
                assert member.offset == len(tokens)
                mask = member.make_mask(width)
                got = tokens_in(member, member.update_and_fetch(*rows(kind, proposed)))
                for row in range(width):
                    sequence = tokens + proposed[: row + 1]
                    visible = kind.sees(len(sequence) - 1, None)
                    assert seen(got, mask, row, width) == [t for p, t in enumerate(sequence) if p in visible]
            carried.commit(tuple(range(width)))
            if releases:
                carried.restore(before)
            else:
                carried.rewind(min(kept, width))
                tokens += proposed[: min(kept, width)]
            assert carried.release() is stock and stock[1] is inner
            assert [stock[0].offset, inner[0].offset, stock[2].offset] == [len(tokens)] * 3


@pytest.mark.parametrize("ahead", range(1, 17))
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("width", [1, 4, 16])
def test_the_window_is_crossed_at_any_row_of_a_block(size, ahead, width):
    """Case 10: prompt and generation cross the window at a block's first, middle and last row, or not yet."""
    driver = Driver(rotating(size))
    round = Round((0,) * (width - 1), node=width - 1, kept=None, window=1, return_array=False)
    with slack(2):
        driver.run([max(1, size - ahead)], [round, round, round])


@pytest.mark.parametrize("kind", [rotating(8), rotating(12, 4)], ids=lambda kind: kind.name)
def test_two_hundred_tokens_in_fours_keep_the_buffer_bounded(kind):
    """Case 8."""
    driver = Driver(kind)
    round = Round((0, 0, 0), node=3, kept=None, window=0, return_array=False)
    with slack(4):
        driver.run([3], [round] * 50)
        assert driver.carried.arrays()[0].shape[2] <= 12  # released and carried again
        driver.carried.open(Block.chain(4))
        assert driver.carried.arrays()[0].shape[2] <= 12 + 4


@pytest.mark.parametrize("kept", range(5))
def test_rejection_long_after_the_wrap(kept):
    """Case 9: the window filled in mid-generation; every later round loses rows."""
    round = Round((0, 0, 0, 0), node=4, kept=kept, window=0, return_array=False)
    one_row = Round((), node=0, kept=None, window=0, return_array=False)
    with slack(3):
        Driver(rotating(6)).run([4], [round, one_row] * 12)


def test_several_updates_in_one_round():
    """Case 15: an autoregressive proposer runs row by row inside one block."""
    with slack(2):
        cache = carry(RotatingKVCache(5))
        tokens = []
        for first in range(0, 40, 4):
            cache.open(Block.chain(4))
            for token in range(first, first + 4):
                mask = cache.make_mask(1)
                tokens.append(token)
                got = tokens_in(cache, cache.update_and_fetch(*rows(rotating(5), [token])))
                assert seen(got, mask, 0, 1) == tokens[-5:]
            cache.commit((0, 1, 2))
            tokens.pop()
            assert cache.offset == len(tokens)


def test_masks_name_the_fast_kernels():
    """One row needs no mask and a chain inside the window is causal; dead rows are not fetched."""
    cache = carry(RotatingKVCache(16))
    for width, expected in [(8, "causal"), (8, "causal"), (1, None), (4, "array"), (1, None)]:
        cache.open(Block.chain(width))
        mask = cache.make_mask(width, window_size=16)
        columns = cache.update_and_fetch(*rows(rotating(16), list(range(width))))[0].shape[2]
        assert mask is None or mask == expected or (expected == "array" and mask.shape == (width, columns))
        assert columns == min(15, cache.offset - width) + width
        cache.commit(tuple(range(width)))


def test_rows_of_earlier_chunks_are_not_fetched():
    cache = carry(ChunkedKVCache(8))
    for expected in (5, 10, 7, 12, 9, 6, 11, 8, 5):
        cache.open(Block.chain(5))
        cache.maybe_trim_front()
        assert cache.update_and_fetch(*rows(chunks(8), list(range(5))))[0].shape[2] == expected
        cache.commit(tuple(range(5)))


def test_no_write_copies_the_cache():
    """Appending and committing touch a few rows of arrays of megabytes; only a living snapshot costs one copy."""
    rng = random.Random(0)
    for kind in [replace(k, key_width=64, value_width=64) for k in (FULL, rotating(8192), rotating(8192, 4))]:
        stock = kind.make()
        stock.update_and_fetch(*(mx.zeros((1, HEADS, 8200, 64)) for _ in range(2)))
        cache = carry(stock)
        del stock
        block = Block((-1, *(max(0, i - 2) for i in range(1, 8))))

        def round(cache=cache, block=block) -> int:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            cache.open(block)
            fetched = cache.update_and_fetch(*(mx.ones((1, HEADS, 8, 64)) for _ in range(2)))
            mx.eval([x.sum() for x in fetched])
            del fetched
            cache.commit(block.path_to(rng.randrange(8)))
            mx.eval(cache.arrays())
            return mx.get_peak_memory() - before

        round()
        array = cache.arrays()[0].nbytes
        assert max(round() for _ in range(20)) < array / 2
        if kind.name != FULL.name:
            snapshot = cache.snapshot()
            assert round() > 2 * array * 0.9
            assert max(round() for _ in range(5)) < array / 2
            del snapshot


@pytest.mark.parametrize("keep", [0, 4])
def test_memory_is_flat_over_twenty_thousand_tokens(keep):
    cache = carry(RotatingKVCache(128, keep))
    rng = random.Random(keep)
    x = mx.zeros((1, HEADS, 16, 64))
    peaks = []
    while cache.offset < 20_000:
        if len(peaks) * 1000 <= cache.offset:
            mx.reset_peak_memory()
            peaks.append(0)
        cache.open(Block.chain(16))
        cache.make_mask(16)
        mx.eval(cache.update_and_fetch(x, x))
        cache.commit(tuple(range(rng.randrange(1, 17))))
        peaks[-1] = mx.get_peak_memory()
        assert cache.keys.shape[2] <= 128 + 256
    assert max(peaks[2:]) <= 1.01 * max(peaks[:2])


@pytest.mark.parametrize("kind", [rotating(6), rotating(9, 4), chunks(8)], ids=lambda kind: kind.name)
def test_younger_snapshots_survive_a_return_to_older_ones(kind):
    driver = Driver(kind)
    round = Round((0, 0, 0), node=3, kept=3, window=0, return_array=False)
    with slack(4):
        driver.run([7], [Snapshot(), round, Snapshot(), Restore(0), round, Snapshot(), Restore(1), round])
        driver.run([7], [round, Snapshot(), Restore(0), round, Restore(0), round, round, round, Restore(0), round])


@pytest.mark.parametrize("kind", [FULL, rotating(16), rotating(16, 4), chunks(16)], ids=lambda kind: kind.name)
def test_a_released_cache_can_be_trimmed_as_long_as_mlx_lm_trims_it(kind):
    round = Round((0, 1, 0, 2), node=3, kept=None, window=0, return_array=False)
    for widths in ([1], [5], [1, 2, 1, 3]):
        driver = Driver(kind)
        driver.run([3], [round, round])
        assert driver.stock.is_trimmable() and driver.stock.trim(4) == 4
        del driver.tokens[-4:]
        driver.fed = [1] * len(driver.tokens)
        driver.carried = carry(driver.stock)
        driver.round(round)
        driver.release(Release(tuple(widths)))


# What models read and write on a cache object.


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (FULL, ["offset", "make_mask", "update_and_fetch", "keys_and_values", "keys", "values", "state"]),
        (QUANTIZED, ["offset", "make_mask", "update_and_fetch", "keys", "values", "bits", "group_size"]),
        (rotating(4), ["offset", "make_mask", "update_and_fetch", "keys_and_values", "keys", "values"]),
        (chunks(4), ["offset", "start_position", "maybe_trim_front", "update_and_fetch", "keys", "values"]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_wrappers_answer_what_models_ask(kind, names):
    cache = carry(kind.make())
    for name in names:
        assert hasattr(cache, name), name
    assert hasattr(cache, "bits") == (kind is QUANTIZED), "selects the quantized kernel"
    assert hasattr(cache, "make_mask") == hasattr(kind.make(), "make_mask"), "selects who makes the mask"
    assert not hasattr(cache, "__len__") and cache, "models test a cache's truth"
    # Models chain dependencies through the arrays; the next forward must build on them.
    cache.open(Block.chain(1))
    cache.update_and_fetch(*rows(kind, [1]))
    for name in ("keys", "values"):
        if kind is not QUANTIZED:
            setattr(cache, name, mx.depends(getattr(cache, name), mx.zeros(1)))
    cache.commit((0,))
    cache.open(Block.chain(1))
    assert tokens_in(cache, cache.update_and_fetch(*rows(kind, [2]))) == [1, 2]
    cache.commit((0,))
    assert cache.release().offset == 2


def test_what_cannot_be_carried_is_refused_with_its_reason():
    class Custom(KVCache):
        pass

    with pytest.raises(UnsupportedTargetError, match="Custom, which cannot be rolled back"):
        carry(Custom())
    with pytest.raises(UnsupportedTargetError, match="Custom"):
        carry(CacheList(KVCache(), Custom()))
    with pytest.raises(UnsupportedTargetError, match="raise max_kv_size"):
        carry(RotatingKVCache(4, keep=4))
    with pytest.raises(UnsupportedTargetError, match="without max_kv_size"):
        carry(RotatingKVCache(8, keep=4)).make_mask(1, window_size=6)
    with pytest.raises(UnsupportedTargetError, match="chains only"):
        carry(ChunkedKVCache(8)).open(Block((-1, 0, 0)))


def test_a_refused_list_leaves_mlx_lms_caches_as_they_were():
    stock = RotatingKVCache(4)
    stock.update_and_fetch(*rows(rotating(4), [1, 2]))
    with pytest.raises(UnsupportedTargetError):
        carry(CacheList(stock, object()))
    assert tokens_in(stock, stock.update_and_fetch(*rows(rotating(4), [3]))) == [1, 2, 3]


def test_a_cache_that_no_layer_uses_stays_empty():
    for kind in (FULL, rotating(4), chunks(4)):
        cache = carry(kind.make())
        for _ in range(3):
            cache.open(Block.chain(4))
            cache.commit((0, 1))
            cache.rewind(1)
        stock = cache.release()
        assert stock.offset == 0 and stock.keys is None


@pytest.mark.parametrize("kind", [FULL, QUANTIZED, rotating(6), rotating(9, 4)], ids=lambda kind: kind.name)
def test_saved_caches_load_in_mlx_lm(kind, tmp_path):
    driver = Driver(kind)
    round = Round((0, 1, 0, 2), node=3, kept=None, window=0, return_array=False)
    driver.run([9], [round, round])
    stock = driver.carried.release()
    save_prompt_cache(str(tmp_path / "cache.safetensors"), [stock])
    [loaded] = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    driver.stock, driver.carried = loaded, carry(loaded)
    driver.round(round)
    driver.release(Release((1, 2)))
