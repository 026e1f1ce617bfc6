"""docs/DRAFTS.md: every draft family and variant against the official `dflash` package, in one process.

In the virtual environment of tools/compare_official.py (OpenBLAS preloaded on Linux without a GPU):

    PYTHONPATH=. official/bin/python tools/draft_table.py --json docs/drafts.json --markdown docs/DRAFTS.md

- parity: hidden states, logits and proposed tokens on random weights of the published names and shapes, for every case
  of tools/draft_reference.py; Domino, which the package has not, against tests/domino.py.
- loops: whole generations of both packages with the same target and draft.
- times: a draft's part of a round at block 16, ours and the official module's in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflash.model_mlx as official
import mlx.core as mx
import mlx_lm
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import domino
import tiny
from compare_official import default_draft
from draft_reference import BASE, CASES, FULL, SLIDING, caches, draw, official_draft, start_late
from draft_reference import Target as Parts
from drafts import along
from tokens import tiny_tokenizer

from dflash_mlx import __version__, load_draft, machine, stream_generate
from dflash_mlx.bench.prompts import PROMPTS
from dflash_mlx.default_pair import default_target_path
from dflash_mlx.draft import DFlashDraft, convert_draft
from dflash_mlx.speculative.causal import followed

official.snapshot_download = lambda path, **_: path  # its loader asks the hub; everything here is local
SMALL_VOCAB = 11  # so that drafts of random weights are right now and then
# Per family: what a loop's draft differs in from BASE, and its target.
LOOPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DFlash 1, full": ("qwen3", {}, {}),
    "DFlash 1, sliding and full": ("qwen3", {"layer_types": [SLIDING, FULL], "sliding_window": 512}, {}),
    "DFlash 1, tied target": ("qwen2", {}, {}),
    "DFlash 2": (
        "qwen3",
        {"architectures": ["DFlash2DraftModel"]},
        {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 5},
    ),
}
# Draft structures that are timed: layers, width, MLP, vocabulary, and what differs.
TIMED: dict[str, tuple[int, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "DFlash 1, 3 × 576, vocabulary 49,152": (3, 576, 1536, 49152, {}, {}),
    "DFlash 1, 5 × 1,024, vocabulary 32,768": (5, 1024, 3072, 32768, {}, {}),
    "DFlash 1, 5 × 1,024, 4 sliding": (
        5,
        1024,
        3072,
        32768,
        {"layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 256},
        {},
    ),
    "DFlash 2, 5 × 1,024": (
        5,
        1024,
        3072,
        32768,
        {"architectures": ["DFlash2DraftModel"]},
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 256, "selector_top_k": 16},
    ),
}


def raw_config(changes: dict[str, Any], dflash: dict[str, Any]) -> dict[str, Any]:
    raw = {**BASE, **changes, "dflash_config": {**BASE["dflash_config"], **dflash}}
    return {key: value for key, value in raw.items() if value is not None}


def pair(raw: dict[str, Any], seed: int, directory: Path) -> tuple[DFlashDraft, Any]:
    """The same random draft as ours, read from a published directory, and as the official module."""
    theirs, tensors = official_draft(raw, seed)
    (directory / "config.json").write_text(json.dumps(raw))
    weights = {name: draw(seed, name, tuple(shape)) for name, shape in tensors.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return load_draft(directory, dtype=mx.float32), theirs


def saved(draft: Path) -> Any:
    """The draft as the official loader reads it from what `convert_draft` writes."""
    with tempfile.TemporaryDirectory() as scratch:
        convert_draft(draft, Path(scratch) / "draft")
        return official.load_draft(f"{scratch}/draft")


def relative(a: mx.array, b: mx.array) -> float:
    return (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1)).item()


# --- parity ----------------------------------------------------------------------------------------------------------


def parity(name: str) -> dict[str, Any]:
    """The largest errors over the rounds of a reference case, and how many proposed tokens are the same."""
    changes, dflash, rounds, options = CASES[name]
    raw, seed = raw_config(changes, dflash), zlib.crc32(name.encode()) % 10000
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = pair(raw, seed, Path(scratch))
    position, offset = options.get("position", 0), start_late(theirs, options.get("position", 0))
    parts = Parts(seed, raw["vocab_size"], raw["hidden_size"], options.get("embed_scale", 1.0))
    theirs.bind(parts)
    width = len(raw["dflash_config"]["target_layer_ids"]) * raw["hidden_size"]
    features = draw(seed, "target_hidden", (1, sum(n for n, _ in rounds), width))
    context, seen, errors, same, proposed = ours.make_context(position), 0, [0.0, 0.0], 0, 0
    for i, (n, length) in enumerate(rounds):
        anchor = int(np.random.RandomState(seed + i).randint(raw["vocab_size"]))
        block = mx.array([[anchor] + [raw["dflash_config"]["mask_token_id"]] * (length - 1)])
        ours.extend(context, features[:, seen : seen + n])
        seen += n
        hidden = theirs.hidden_states(block, features[:, :seen], caches(theirs, offset))
        logits = theirs.compute_logits(hidden)
        embed = lambda tokens: parts.embed_tokens(tokens) * parts.embed_scale  # noqa: E731
        mine = ours(ours.embed(block, embed), context)
        errors = [
            max(errors[0], relative(mine, hidden)),
            max(errors[1], relative(ours.logits(mine, parts.lm_head), logits)),
        ]
        tokens = mx.argmax(logits[0, 1:], axis=-1)
        drafted = ours.draft(anchor, length - 1, context, embed, parts.lm_head)
        if isinstance(theirs, official.DFlash2DraftModel):
            path = theirs.candidate_selector.select(hidden[:, 1:], logits[:, 1:], mx.array([anchor]), 0.0)
            tokens = path[0][0]
            chosen = mx.argmax(along(drafted, tokens.tolist()), axis=-1)
        else:
            chosen = mx.argmax(drafted.logits, axis=-1)
        same += (drafted.tokens(chosen[:, None])[:, 0] == tokens).sum().item()
        proposed += length - 1
    family = "DFlash 2" if ours.config.selector else "DFlash 1"
    return row(family, name.replace("_", " "), "official module", errors, same, proposed)


def domino_parity(name: str) -> dict[str, Any]:
    export = domino.EXPORTS[name]
    with tempfile.TemporaryDirectory() as scratch:
        meant = domino.write(Path(scratch), export)
        draft = load_draft(Path(scratch), dtype=mx.float32)
    drafted, hidden = domino.said(draft)
    own, error, same, proposed = list(export.tokens or range(domino.CONFIG["vocab_size"])), 0.0, 0, 0
    for seed in range(8):
        tokens = [own[i] for i in np.random.RandomState(seed).randint(len(own), size=drafted.num_positions)]
        theirs, ours = domino.expected(export, meant, hidden, tokens), np.array(along(drafted, tokens))
        error = max(error, float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1)))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        proposed += drafted.num_positions
    return row("Domino", name, "float64 transcription", [0.0, error], same, proposed)


def row(family: str, variant: str, against: str, errors: list[float], same: int, proposed: int) -> dict[str, Any]:
    return {
        "family": family,
        "variant": variant,
        "against": against,
        "hidden_error": errors[0],
        "logits_error": errors[1],
        "same_tokens": same,
        "proposed_tokens": proposed,
    }


# --- whole loops -----------------------------------------------------------------------------------------------------


def official_rounds(model: Any, draft: Any, tokenizer: Any, prompt: list[int], block: int, n: int) -> Any:
    responses = official.stream_generate(model, draft, tokenizer, prompt, block_size=block, max_tokens=n)
    parts = [r.tokens for r in responses if r.tokens]
    return [t for part in parts for t in part], whole_rounds([len(part) for part in parts], block, n)


def our_rounds(model: Any, draft: Any, tokenizer: Any, prompt: list[int], block: int, n: int) -> Any:
    responses = list(stream_generate(model, tokenizer, prompt, n, draft, block_size=block))
    committed = [r.committed for r in responses[-1].statistics.rounds]
    return [r.token for r in responses], whole_rounds(committed, block, n)


def whole_rounds(committed: list[int], block: int, n: int) -> list[int]:
    """Rounds that have the whole block, which the packages shorten differently where fewer tokens are left.

    The first token comes before them, in a round of its own or in the prefill.
    """
    starts = np.cumsum([0, *committed])
    return [tokens for tokens, start in zip(committed[1:], starts[1:-1], strict=True) if start + block <= n]


def loop_row(name: str, runs: list[tuple[Any, Any]]) -> dict[str, Any]:
    mean = lambda side: sum(sum(r[side][1]) for r in runs) / max(1, sum(len(r[side][1]) for r in runs))  # noqa: E731
    return {
        "pair": name,
        "generations": len(runs),
        "same_tokens": sum(a[0] == b[0] for a, b in runs),
        "same_rounds": sum(a[1] == b[1] for a, b in runs),
        "acceptance_length": mean(0),
        "official_acceptance_length": mean(1),
    }


def loop(name: str) -> dict[str, Any]:
    architecture, changes, dflash = LOOPS[name]
    sizes = {"vocab_size": SMALL_VOCAB, "num_target_layers": 3}
    raw = raw_config(changes | sizes, dflash | {"target_layer_ids": [0, 2]})
    config = tiny.FULL_ATTENTION[architecture] | {"vocab_size": SMALL_VOCAB}
    model, other = (tiny.build(architecture, config) for _ in range(2))
    tokenizer = tiny_tokenizer(SMALL_VOCAB)
    with tempfile.TemporaryDirectory() as scratch:
        ours, _ = pair(raw, 5, Path(scratch))
        theirs = saved(Path(scratch))
    runs = []
    for i in range(12):
        prompt = np.random.RandomState(i).randint(3, SMALL_VOCAB, size=5 + i).tolist()
        runs.append(
            (
                our_rounds(model, ours, tokenizer, prompt, 8, 48),
                official_rounds(other, theirs, tokenizer, prompt, 8, 48),
            )
        )
    return loop_row(name, runs)


def default_loop(num_prompts: int) -> dict[str, Any]:
    """The default pair."""
    model, tokenizer = mlx_lm.load(str(default_target_path()))
    other, _ = mlx_lm.load(str(default_target_path()))
    with tempfile.TemporaryDirectory() as scratch:
        default_draft(path := Path(scratch) / "draft")
        ours, theirs = load_draft(path, target=model), saved(path)
    theirs.set_dtype(mx.float32)
    runs = []
    for prompt in PROMPTS[:: max(1, len(PROMPTS) // num_prompts)][:num_prompts]:
        chat = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        block = ours.block_size
        runs.append(
            (
                our_rounds(model, ours, tokenizer, ids, block, 48),
                official_rounds(other, theirs, tokenizer, ids, block, 48),
            )
        )
    return loop_row("DFlash 1, the default pair", runs)


# --- times -----------------------------------------------------------------------------------------------------------


def timed(name: str, rounds: int) -> dict[str, Any]:
    """Seconds of a draft's part of a round: 4 more committed tokens, a block of 16, head and greedy choice."""
    layers, width, mlp, vocab, changes, dflash = TIMED[name]
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp, "vocab_size": vocab}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 192 if width % 192 == 0 else 4}
    more = {"head_dim": 64, "block_size": 16, "max_position_embeddings": 4096}
    raw = raw_config(sizes | heads | more | changes, dflash)
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = pair(raw, 7, Path(scratch))
    parts = Parts(7, vocab, width, 1.0)
    theirs.bind(parts)
    captured = len(raw["dflash_config"]["target_layer_ids"]) * width
    context, grown = ours.make_context(), theirs.make_cache()
    before, more_tokens = (draw(7, "target_hidden", (1, n, captured)) for n in (512, 4))
    block = mx.array([[5] + [raw["dflash_config"]["mask_token_id"]] * 15])

    def our_round(features: mx.array) -> mx.array:
        ours.extend(context, features)
        drafted = ours.draft(5, 15, context, parts.embed_tokens, parts.lm_head)
        if drafted.correction is None:
            return mx.argmax(drafted.logits, axis=-1)
        return followed(drafted, lambda logits: mx.argmax(logits, axis=-1))[1]

    def official_round(features: mx.array) -> mx.array:
        if isinstance(theirs, official.DFlash2DraftModel):
            return theirs.propose(block, features, grown, 0.0, logits_start=1)[0]
        return mx.argmax(theirs(block, features, grown, logits_start=1), axis=-1)

    def seconds(call: Callable[[mx.array], mx.array], features: mx.array) -> float:
        started = time.perf_counter()
        mx.eval(call(features))
        return time.perf_counter() - started

    for call in (our_round, official_round):
        seconds(call, before)
    pairs = []
    for i in range(rounds + 3):
        order = (our_round, official_round) if i % 2 else (official_round, our_round)
        took = {call: seconds(call, more_tokens) for call in order}
        if i >= 3:  # the first ones fill caches
            pairs.append((took[our_round], took[official_round]))
    return {
        "draft": name,
        "rounds": len(pairs),
        "draft_s": statistics.median(a for a, _ in pairs),
        "official_draft_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


# --- the table -------------------------------------------------------------------------------------------------------


HEAD = """# Drafts

Every draft family and variant against the official `dflash` package, on random weights of the published tensor names
and shapes at small widths. Made by `tools/draft_table.py`, which says how, with
{environment}.

## Parity

The largest error over all rounds of a case, relative to the largest entry where that is above 1 (float32; sums may run
in another order), and the proposed tokens that are the same. The package has no Domino: there the reference is a
float64 transcription of the formula (`tests/domino.py`), given our hidden states.

| family | variant | against | hidden states | logits | same tokens |
|---|---|---|---|---|---|
"""
ACCEPTANCE = f"""
Packagings (one file or shards, bfloat16, 8 bits, own embedding and head, pruned vocabularies, the speculators
packaging) of each published structure decode as plain decoding does in `tests/test_draft_published.py`.

## Acceptance

Whole greedy generations of both packages with the same target and draft, theirs read by their loader from what our
`convert_draft` writes: the same tokens, and the same number committed in every round that has a whole block. Random
drafts are right by chance, so their targets have {SMALL_VOCAB} tokens.

| pair | same tokens | same rounds | acceptance length | official |
|---|---|---|---|---|
"""
TIME = """
## Time

A draft's part of a round at block 16 behind 512 committed tokens, 4 more of them each time: context, block, head and
greedy choice; float32, ours and the official module's in turn, medians. The ratio is the median of the rounds' own.

| draft | ours | official | ratio |
|---|---|---|---|
"""


def markdown(result: dict[str, Any]) -> str:
    environment = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    environment += f", {result['machine']['chip']}, {result['machine']['device']}, BLAS {result['blas']}"
    text = HEAD.format(environment=environment)
    for r in result["parity"]:
        hidden = "" if r["family"] == "Domino" else f"{r['hidden_error']:.0e}"
        text += f"| {r['family']} | {r['variant']} | {r['against']} | {hidden} | {r['logits_error']:.0e} "
        text += f"| {r['same_tokens']} of {r['proposed_tokens']} |\n"
    text += ACCEPTANCE
    for r in result["loops"]:
        same = [f"{r[key]} of {r['generations']}" for key in ("same_tokens", "same_rounds")]
        text += f"| {r['pair']} | {' | '.join(same)} | {r['acceptance_length']:.3f} "
        text += f"| {r['official_acceptance_length']:.3f} |\n"
    text += TIME
    for r in result["times"]:
        text += f"| {r['draft']} | {1e3 * r['draft_s']:.1f} ms | {1e3 * r['official_draft_s']:.1f} ms "
        text += f"| {r['ratio']:.2f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("parity", "loops", "times"), action="append")
    parser.add_argument("--rounds", type=int, default=40, help="of each timed draft")
    parser.add_argument("--num-prompts", type=int, default=6, help="of the default pair")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    only = args.only or ("parity", "loops", "times")
    result: dict[str, Any] = {"parity": [], "loops": [], "times": []}
    if args.json and args.json.exists():
        result |= {key: json.loads(args.json.read_text())[key] for key in result}
    if "parity" in only:
        result["parity"] = [*map(parity, CASES), *map(domino_parity, domino.EXPORTS)]
    if "loops" in only:
        result["loops"] = [*map(loop, LOOPS), default_loop(args.num_prompts)]
    if "times" in only:
        result["times"] = [timed(name, args.rounds) for name in TIMED]
    result["versions"] = machine.versions() | {"dflash_mlx": __version__, "dflash": version("dflash")}
    result |= {"machine": machine.device_facts(), "blas": machine.blas()}
    if args.json:
        lists = ("parity", "loops", "times")
        facts = {key: value for key, value in result.items() if key not in lists}
        body = [f'"{key}": [\n' + ",\n".join(map(json.dumps, result[key])) + "\n]" for key in lists]
        args.json.write_text(
            "{\n" + ",\n".join([*body, *(f'"{k}": {json.dumps(v)}' for k, v in facts.items())]) + "\n}\n"
        )
    text = markdown(result)
    if args.markdown:
        args.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
