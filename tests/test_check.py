"""The proof of losslessness notices what is not lossless."""

import mlx.core as mx
import numpy as np
import pytest
from drafts import random_draft
from tiny import build
from tokens import tiny_tokenizer

from dflash_mlx import check, make_sampler
from dflash_mlx.speculative.sampling import Sampler

PROMPTS = [[5, 7, 9, 11, 3], [8, 1], [60, 2, 5]]


@pytest.fixture(scope="module")
def pair():
    return build("llama", seed=5), tiny_tokenizer(), random_draft()


def test_greedy_is_lossless(pair):
    result = check.check_greedy(*pair, PROMPTS, max_tokens=30, progress=False)
    assert result["lossless"] and result["identical"] == 3 and not result["divergences"]
    assert "LOSSLESS: 3 of 3" in check.render(result)


def test_outputs_of_one_round_have_no_acceptance_length(pair):
    """The first forward has no draft, so a mean over later ones does not exist."""
    result = check.check_greedy(*pair, [[5, 7, 9]], max_tokens=1, progress=False)
    assert result["lossless"] and result["acceptance_length"] is None
    assert "nothing drafted" in check.render(result)


def test_divergence_shows_the_targets_margin(pair):
    model = pair[0]
    prompt = PROMPTS[0]
    logits = model(mx.array([prompt]))[0, -1]
    order = mx.argsort(-logits).tolist()
    plain, wrong = [order[0]], [order[1]]
    result = check.compare(model, prompt, plain, wrong)
    assert not result["identical"] and not result["tie"] and result["at"] == 0
    assert result["margin"] == pytest.approx((logits[order[0]] - logits[order[1]]).item(), rel=1e-5)
    assert check.compare(model, prompt, [1, 2], [1]) == {"identical": False, "at": 1, "tie": False, "lengths": [2, 1]}


def test_near_tie_is_told_from_a_fault():
    class Flat:
        def make_cache(self):
            return []

        def __call__(self, tokens, cache=None):
            return mx.array([[[10.0, 10.0 + 2e-6, 3.0]]])

    assert check.compare(Flat(), [0], [0], [1])["tie"]
    assert not check.compare(Flat(), [0], [0], [2])["tie"]


@pytest.mark.parametrize(
    "settings", [{"temp": 1.0}, {"temp": 0.7, "top_p": 0.8}, {"temp": 1.3, "top_k": 5, "min_p": 0.05}]
)
def test_sampling_is_lossless(pair, settings):
    mx.random.seed(1)
    result = check.check_sampling(*pair, PROMPTS * 5, make_sampler(**settings), max_tokens=60, progress=False)
    assert result["tokens"] > 500 and result["lossless"], result


def test_sampling_check_notices_another_temperature(pair):
    model, tokenizer, _ = pair
    import mlx_lm

    mx.random.seed(1)
    uniforms = []
    for prompt in PROMPTS * 5:
        hot = mlx_lm.stream_generate(model, tokenizer, prompt, 60, sampler=make_sampler(temp=1.3))
        uniforms += check.transformed(model, prompt, [r.token for r in hot], Sampler(1.0))
    assert check.uniformity(np.array(uniforms))[1] < check.SIGNIFICANCE


def test_chi_square_tail_has_the_textbook_values():
    # Quantiles of the chi-square distribution with 19 degrees of freedom.
    for statistic, p in ((30.144, 0.05), (36.191, 0.01), (43.820, 0.001), (18.338, 0.5)):
        assert check.chi_square_tail(statistic, 19) == pytest.approx(p, rel=2e-3)
