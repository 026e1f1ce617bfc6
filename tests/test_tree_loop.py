"""Trees, copies, hints, widths through the whole loop: plain decoding's tokens, the target's distribution."""

import functools
import random

import mlx.core as mx
import pytest
from drafts import CONFIG, random_draft
from mlx_lm import sample_utils
from mlx_lm.models.cache import make_prompt_cache
from reference import fresh_prefill, plain_tokens
from run import run
from scripted import InertProposer
from test_conformance import tool
from test_greedy import assert_same_caches
from test_sampling import (
    PROCESSORS,
    SETTINGS,
    SMALL,
    chi_square_z,
    exact_probabilities,
)
from tiny import FULL_ATTENTION, VOCAB, build
from tokens import tiny_tokenizer

from dflash_mlx import make_sampler, stream_generate
from dflash_mlx.errors import DFlashError, UnsupportedOptionError
from dflash_mlx.speculative.ngram import HintSource, NgramSource
from dflash_mlx.speculative.proposal import Proposal
from dflash_mlx.speculative.proposers import CopyProposer, DraftProposer, Shape
from dflash_mlx.speculative.sampling import Sampler
from dflash_mlx.speculative.tree import build_tree
from dflash_mlx.speculative.width import SIZES, AutoWidth, Costs, Survival, ThresholdWidth, make_width
from dflash_mlx.targets.target import Target

PROMPT = [5, 7, 9, 11, 3, 2, 8, 60, 44, 31, 2]
NUM_TOKENS = 40


class ScriptedTrees(InertProposer):
    """Random trees that hold the true continuation to a random depth, among branches that leave it."""

    def __init__(self, text, seed=0, vocab_size=VOCAB):
        self._text, self._rng, self._vocab_size, self._committed = text, random.Random(seed), vocab_size, 0

    def extend(self, tokens, hidden):
        self._committed += tokens.size

    def propose(self, anchor, width, depth):
        rng = self._rng
        true = self._text[self._committed + 1 : self._committed + 1 + rng.randrange(6)]
        branches = [true[: rng.randrange(1 + len(true))] + self._noise() for _ in range(3)] + [true]
        rng.shuffle(branches)
        tree = build_tree([], [], min(width - 1, 15), branches=[b[: depth - 1] for b in branches])
        return Proposal(mx.array([[anchor, *tree.tokens]]), tree.block)

    def _noise(self):
        return [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(4))]


@functools.cache
def case(architecture):
    model = build(architecture) if architecture in FULL_ATTENTION else tool.build(architecture)
    return model, plain_tokens(model, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(
    "architecture",
    [*FULL_ATTENTION, "qwen3_5", "mamba2", "lfm2", "recurrent_gemma", "rwkv7", "gemma3_text", "gpt_oss", "olmo3"],
)
def test_greedy_trees_equal_plain_decoding(architecture):
    model, expected = case(architecture)
    accepted = 0
    for seed in range(3):
        result = run(model, PROMPT, ScriptedTrees(PROMPT + expected, seed), NUM_TOKENS, capture=(0, 1))
        assert result.tokens == expected
        accepted += sum(step.num_accepted for step in result.steps)
        assert any(not step.proposal.block.is_chain for step in result.steps)
    assert accepted > NUM_TOKENS


@pytest.mark.parametrize("stop_after", range(1, 14))
def test_stopping_inside_a_tree_leaves_prompt_and_yielded_tokens(stop_after):
    model, expected = case("qwen3")
    result = run(model, PROMPT, ScriptedTrees(PROMPT + expected, stop_after), NUM_TOKENS, stop_after=stop_after)
    assert result.tokens == expected[:stop_after]
    assert_same_caches(result.cache, fresh_prefill(model, PROMPT + expected[:stop_after])[0])


SHAPES = {
    "chain": {},
    "tree of 1": {"tree_budget": 1},
    "tree of 12": {"tree_budget": 12, "tree_top_k": 4},
    "top 1": {"tree_budget": 12, "tree_top_k": 1},
    "wide": {"tree_budget": 40, "tree_top_k": 97},
    "auto chain": {"width": "auto"},
    "auto tree": {"tree_budget": 32, "width": "auto"},
    "threshold chain": {"width": 0.05},
    "threshold tree": {"tree_budget": 16, "width": "0.02"},
    "n-gram": {"ngram": True},
    "n-gram tree": {"tree_budget": 12, "ngram": True},
    "small block": {"block_size": 3, "tree_budget": 9},
}


def generate(model, prompt, num_tokens, **options):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token_ids = ()
    return list(stream_generate(model, tokenizer, list(prompt), max_tokens=num_tokens, **options))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3_text"])
def test_every_shape_gives_plain_decodings_tokens(architecture, name):
    model, expected = case(architecture)
    args = model.args if hasattr(model, "args") else None
    hidden = model.model.embed_tokens.weight.shape[1] if hasattr(model, "model") else args.hidden_size
    draft = random_draft(CONFIG | {"hidden_size": hidden, "num_target_layers": len(model.layers)})
    cache = make_prompt_cache(model)
    responses = generate(model, PROMPT, NUM_TOKENS, draft_model=draft, prompt_cache=cache, **SHAPES[name])
    assert [r.token for r in responses] == expected
    statistics = responses[-1].statistics
    budget = SHAPES[name].get("tree_budget", 0) or SHAPES[name].get("block_size", draft.block_size) - 1
    assert statistics.summary()["max_width"] <= 1 + budget
    assert sum(r.from_draft for r in responses) == sum(r.num_accepted for r in statistics.rounds)
    assert all(offset == len(PROMPT) + NUM_TOKENS for c in cache if (offset := getattr(c, "offset", None)) is not None)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
@pytest.mark.parametrize("remaining", range(1, 6))
def test_the_tokens_that_may_still_come_limit_a_trees_depth_alone(architecture, remaining):
    model, expected = case(architecture)
    draft = random_draft(CONFIG | {"num_target_layers": len(model.layers)})
    cache = make_prompt_cache(model)
    target = Target(model, cache, capture_layer_ids=draft.capture_layer_ids)
    proposer = DraftProposer(draft, target, shape=Shape(8, 12))
    result = run(model, PROMPT, proposer, 1 + remaining, target=target, cache=cache)
    assert result.tokens == expected[: 1 + remaining]
    block = result.steps[1].proposal.block
    assert max(block.depths) <= min(remaining, 8) - 1
    assert block.size == (1 if remaining == 1 else 13)


def test_tree_that_one_token_a_position_allows_is_the_chain():
    model, _ = case("llama")
    draft = random_draft()
    chain = generate(model, PROMPT, NUM_TOKENS, draft_model=draft)[-1].statistics
    tree = generate(model, PROMPT, NUM_TOKENS, draft_model=draft, tree_budget=7, tree_top_k=1)[-1].statistics
    assert [(r.width, r.num_accepted) for r in chain.rounds] == [(r.width, r.num_accepted) for r in tree.rounds]


class NoisyTrees(ScriptedTrees):
    """The same tree every time, whatever the target thinks."""

    BRANCHES = ((5, 1), (5, 5, 2), (1, 4), (0,))

    def __init__(self):
        super().__init__([])

    def propose(self, anchor, width, depth):
        tree = build_tree([], [], min(width - 1, 6), branches=[b[: depth - 1] for b in self.BRANCHES])
        return Proposal(mx.array([[anchor, *tree.tokens]]), tree.block)


def observed_trees(model, sampler, runs, processors=()):
    counts: dict = {}
    for _ in range(runs):
        tokens = tuple(run(model, [1, 5, 2], NoisyTrees(), 3, sampler=sampler, processors=processors).tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    return counts


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_trees_have_the_targets_distribution(name):
    model = build("llama", SMALL, seed=3)
    sampler = make_sampler(**SETTINGS[name])
    mx.random.seed(13)
    assert chi_square_z(observed_trees(model, sampler, 1500), exact_probabilities(model, sampler.probs), 1500) < 3.5


def test_unknown_samplers_keep_their_distribution_on_trees():
    model = build("llama", SMALL, seed=3)
    mx.random.seed(14)
    counts = observed_trees(model, lambda logprobs: mx.random.categorical(logprobs / 0.7), 1500)
    assert chi_square_z(counts, exact_probabilities(model, make_sampler(temp=0.7).probs), 1500) < 3.5


@pytest.mark.parametrize("width", ["full", "auto", 0.2, 0.7])
@pytest.mark.parametrize("budget", [0, 6])
def test_sampled_drafts_keep_the_distribution_at_every_width(width, budget):
    model = build("llama", SMALL, seed=3)
    raw = CONFIG | {"hidden_size": 16, "vocab_size": 7, "num_target_layers": 1, "num_attention_heads": 2}
    raw["dflash_config"] = {"mask_token_id": 4, "target_layer_ids": [0]}
    draft = random_draft(raw)
    sampler = make_sampler(temp=0.9, top_p=0.9)
    assert isinstance(sampler, Sampler)
    mx.random.seed(15)
    counts: dict = {}
    for _ in range(800):
        cache = make_prompt_cache(model)
        target = Target(model, cache, capture_layer_ids=(0,))
        proposer = DraftProposer(
            draft, target, shape=Shape(4, budget), sampler=sampler, width=make_width(width, timed=False)
        )
        tokens = tuple(run(model, [1, 5, 2], proposer, 3, sampler=sampler, cache=cache, target=target).tokens)
        counts[tokens] = counts.get(tokens, 0) + 1
    assert chi_square_z(counts, exact_probabilities(model, sampler.probs), 800) < 3.5


@pytest.mark.parametrize("name", PROCESSORS)
def test_case_5_processors_see_each_nodes_own_prefix(name):
    model = build("llama", SMALL, seed=3)
    prompt = [1, 5, 2]
    expected = plain_tokens(model, prompt, 30, processors=PROCESSORS[name]())
    for seed in range(4):
        processors = PROCESSORS[name]()
        trees = ScriptedTrees(prompt + expected, seed, vocab_size=7)
        assert run(model, prompt, trees, 30, processors=processors).tokens == expected
    if name == "forbidden later":
        assert 5 not in expected[7:]


# Copies and hints.


def copying(model, prompt, num_tokens, sources, budget=0):
    cache = make_prompt_cache(model)
    target = Target(model, cache)
    proposer = CopyProposer(target, sources, shape=Shape(8, budget))
    return run(model, prompt, proposer, num_tokens, cache=cache, target=target)


@pytest.mark.parametrize("budget", [0, 8])
def test_case_17_repeated_text_is_copied_and_counted(budget):
    model = build("llama", SMALL | {"vocab_size": 23}, seed=2)  # its greedy text runs into a cycle of five tokens
    expected = plain_tokens(model, [3, 1, 4], 400)
    result = copying(model, [3, 1, 4], 400, [NgramSource()], budget)
    assert result.tokens == expected
    assert any(expected[-p:] == expected[-2 * p : -p] for p in range(1, 100)), "the text does not repeat itself"
    late = result.steps[len(result.steps) // 2 :]
    assert sum(s.num_accepted for s in late) > 0.5 * sum(len(s.tokens) for s in late)
    assert sum(len(s.tokens) for s in result.steps) == 400


@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 150])
def test_case_17_the_flags_sum_to_the_accepted_count(num_tokens, budget):
    """Over a whole generation, also where it ends inside a block."""
    model = build("llama", SMALL | {"vocab_size": 97}, seed=2)
    for options in ({"ngram": True}, {"hint_tokens": plain_tokens(model, PROMPT, 150)}):
        responses = list(generate(model, PROMPT, num_tokens, tree_budget=budget, **options))
        statistics = responses[-1].statistics
        flags = [r.from_draft for r in responses]
        assert sum(flags) == sum(r.num_accepted for r in statistics.rounds)
        assert sum(r.committed for r in statistics.rounds) == len(flags)
    assert num_tokens < 150 or sum(flags) > 100  # the hint is right to the end


def test_case_16_nothing_is_learned_from_one_run_to_the_next():
    model, _ = case("llama")
    runs = [
        [(r.token, r.from_draft) for r in generate(model, PROMPT, 60, ngram=True)],
        [(r.token, r.from_draft) for r in generate(model, PROMPT, 60, ngram=True)],
        [(r.token, r.from_draft) for r in generate(model, PROMPT, 60, ngram=True)],
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("options", [{}, {"tree_budget": 10}, {"draft": True}, {"draft": True, "tree_budget": 10}])
def test_hints_are_proposed_counted_apart_and_never_trusted(options):
    model, expected = case("llama")
    options = dict(options)
    draft = random_draft() if options.pop("draft", False) else None
    wrong = [t if i % 9 else (t + 1) % VOCAB for i, t in enumerate(expected)]
    for hint, least in ((expected, 30), (wrong, 12), ([1, 2, 3], 0), ([], 0)):
        responses = generate(model, PROMPT, NUM_TOKENS, hint_tokens=hint, draft_model=draft, **options)
        assert [r.token for r in responses] == expected
        summary = responses[-1].statistics.summary()
        assert least <= summary["hint_tokens_accepted"] <= summary["hint_tokens_proposed"]
        assert summary["hint_tokens_accepted"] <= sum(r.from_draft for r in responses)


def test_hint_is_found_again_behind_a_prompt_cache():
    model, expected = case("llama")
    cache = make_prompt_cache(model)
    first = generate(model, PROMPT, 10, prompt_cache=cache, hint_tokens=expected)
    turn = [4, 9]
    context = PROMPT + [r.token for r in first] + turn
    plain = plain_tokens(model, context, 20)
    second = generate(model, turn, 20, prompt_cache=cache, hint_tokens=plain)
    assert [r.token for r in second] == plain
    assert second[-1].statistics.summary()["hint_tokens_accepted"] >= 15


# Widths.


def test_threshold_keeps_probable_nodes_and_fills_up_to_a_size():
    width = ThresholdWidth(0.3)
    assert width.worth(0.3, 1) and not width.worth(0.29, 4) and width.worth(0.29, 5)


def test_costs_find_the_line_that_made_them():
    def seconds(nodes, drafted):
        return 0.05 + 0.002 * nodes + 0.012 * (drafted > 0) + 0.001 * drafted

    costs, rng = Costs(), random.Random(0)
    for _ in range(300):
        nodes, drafted = rng.choice(sorted(SIZES)[:9]), rng.randrange(8)
        costs.observe(nodes, drafted, seconds(nodes, drafted))
        costs.observe(nodes, drafted, 5.0)  # a pause of the consumer
    for nodes, drafted in ((1, 0), (8, 7), (24, 3), (2, 1)):
        ratio = costs(nodes, drafted) / costs(4, 4)
        assert abs(ratio / (seconds(nodes, drafted) / seconds(4, 4)) - 1) < 0.05


def test_survival_is_the_share_that_passed():
    survival, rng = Survival(), random.Random(0)
    for _ in range(2000):
        accepted = 0
        while accepted < 4 and rng.random() < 0.7:
            accepted += 1
        survival.observe(4, accepted)
    expected = survival.expected(6)
    assert abs(expected[4] - sum(0.7**i for i in range(5))) < 0.4
    assert expected == sorted(expected) and len(expected) == 7


def play(confidence: float, right: float, rounds: int = 300, *, row: float = 0.05):
    """A made-up draft that says `confidence` of each token and is right with probability `right`."""
    width, rng, sizes = AutoWidth(timed=False), random.Random(1), []
    for _ in range(rounds):
        positions, nodes, path = width.positions(7), 1, 1.0
        for _ in range(positions):
            path *= confidence
            if not width.worth(path, nodes):
                break
            nodes += 1
        accepted = 0
        while accepted < nodes - 1 and rng.random() < right:
            accepted += 1
        width.observe(nodes, accepted)
        sizes.append(nodes)
    return sizes[rounds // 2 :]


def test_auto_width_follows_what_comes_true():
    sure, unsure = play(0.95, 0.95), play(0.3, 0.3)
    assert min(sure) >= 6 and max(unsure) <= 4
    # A draft that is sure of itself and always wrong is corrected, in the end it is hardly asked.
    wrong = play(0.95, 0.0)
    assert sum(n > 1 for n in wrong) < 0.2 * len(wrong)


@pytest.mark.parametrize("value", ["wide", None, 0, 1.5, -0.1, "nan"])
def test_bad_widths_are_refused_by_name(value):
    with pytest.raises(DFlashError, match="width"):
        generate(case("llama")[0], PROMPT, 3, draft_model=random_draft(), width=value)


@pytest.mark.parametrize(
    "bad",
    [
        {"tree_budget": -1},
        {"tree_budget": 1000},
        {"tree_top_k": 3},
        {"tree_budget": 4, "tree_top_k": 0},
        {"tree_budget": 4, "block_size": 1},
        {"hint_tokens": [5, VOCAB]},
        {"hint_tokens": [-1]},
        {"hint_tokens": [1.5]},
        {"hint_tokens": "abc"},
        {"hint_tokens": [[1, 2], [3, 4]]},
        {"tree_budget": 2.5},
        {"tree_budget": "4"},
        {"tree_budget": 4, "tree_top_k": 2.5},
        {"block_size": "4"},
        {"block_size": 8, "num_draft_tokens": 1},
    ],
)
def test_bad_shapes_are_refused_before_anything_is_computed(bad):
    with pytest.raises(DFlashError):
        generate(case("llama")[0], PROMPT, 3, draft_model=random_draft(), **bad)


@pytest.mark.parametrize("option", [{"tree_budget": 4}, {"tree_top_k": 4}, {"width": "auto"}, {"block_size": 4}])
def test_options_without_anything_to_propose_are_refused(option):
    with pytest.raises(UnsupportedOptionError):
        generate(case("llama")[0], PROMPT, 3, **option)


def test_greedy_sampler_of_temperature_zero_walks_as_greedy():
    model, expected = case("llama")
    draft = random_draft()
    for sampler in (make_sampler(temp=0.0), sample_utils.make_sampler(temp=0.0), None):
        options = {"draft_model": draft, "tree_budget": 12, "sampler": sampler}
        assert [r.token for r in generate(model, PROMPT, NUM_TOKENS, **options)] == expected
    assert HintSource([1], 0).hinted and not NgramSource().hinted
