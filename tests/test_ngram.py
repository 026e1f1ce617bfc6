"""Copied continuations come from the longest repeated suffix or the hint, and from nothing outside the call."""

import random
import time

import pytest

from dflash_mlx.speculative.ngram import TRUST, HintSource, NgramSource, SuffixIndex


def longest_repeated(text: list[int]) -> tuple[int, set[int]]:
    """Length of the longest suffix that occurs earlier, and all positions behind its earlier occurrences."""
    for n in range(len(text) - 1, 0, -1):
        ends = {e for e in range(n, len(text)) if text[e - n : e] == text[-n:]}
        if ends:
            return n, ends
    return 0, {0}


@pytest.mark.parametrize("alphabet", [1, 2, 3, 10])
def test_index_finds_the_longest_repeated_suffix(alphabet):
    rng = random.Random(alphabet)
    for _ in range(30):
        index = SuffixIndex()
        for _ in range(60):
            index.append(rng.randrange(alphabet))
            length, end = index.repeated()
            expected, ends = longest_repeated(index.text)
            assert length == expected and end in ends


def test_recent_occurrences_are_preferred():
    index = SuffixIndex([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3])
    assert index.repeated() == (3, 11)


def test_index_takes_the_same_time_per_token_however_long_the_text():
    rng = random.Random(0)
    for text in ([rng.randrange(50) for _ in range(60_000)], [7] * 60_000, [1, 2] * 30_000):
        started = time.perf_counter()
        SuffixIndex(text)
        assert time.perf_counter() - started < 60_000 * 100e-6


def test_runs_copy_on_into_themselves():
    source = NgramSource()
    assert source.continuation([5, 1, 2, 1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert source.continuation([5, 1, 2, 1, 2, 1, 2, 9], 6) == []
    source.reset()
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert source.continuation(text, 100) == [4, 5, 6, 7, 8, 9][: TRUST * 3]
    assert source.continuation(text, 2) == source.continuation(text, 2) == [4, 5]


def test_hint_is_followed_left_and_found_again():
    source = HintSource([10, 11, 12, 13, 14, 15], start=2)
    text = [1, 2]
    assert source.continuation(text, 3) == [10, 11, 12]
    text += [10, 11]
    assert source.continuation(text, 9) == [12, 13, 14, 15]
    text += [99]
    assert source.continuation(text, 9) == []
    text += [13]
    assert source.continuation(text, 9) == []
    text += [14]
    assert source.continuation(text, 9) == [15]
    text += [15]
    assert source.continuation(text, 9) == []
    source.reset()
    assert source.continuation(text[:3], 2) == [11, 12]


def test_hint_that_repeats_itself_is_found_again_behind_the_place_it_was_left():
    hint = [7, 1, 2, 7, 1, 3, 7, 1, 4, 7, 1, 5]
    source = HintSource(hint, start=0)
    text = [7, 1, 2, 7, 9]
    assert source.continuation(text, 3) == []
    assert source.continuation([*text, 7, 1], 3) == [3, 7, 1]
    same = HintSource([6, 5, 5, 5, 5, 5], start=1)
    assert same.continuation([9, 5, 5], 2) == [5, 5]
