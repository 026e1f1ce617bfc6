"""Compare with the official `dflash` package's MLX backend: same pair, same prompts, run in turn in one process.

It is not a dependency of this project. In a virtual environment of its own outside the repository:

    python -m venv official && official/bin/pip install 'mlx[cpu]' mlx-lm
    official/bin/pip install --no-deps dflash==0.1.0
    PYTHONPATH=. official/bin/python tools/compare_official.py --block-sizes 4,8,16

Block sizes above the draft's own are measured with a copy of the draft whose config says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import dflash.model_mlx as official
import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx import machine, stream_generate
from dflash_mlx.bench.measure import RoundBench
from dflash_mlx.bench.prompts import PROMPTS
from dflash_mlx.default_pair import default_draft_path, default_target_path
from dflash_mlx.load import load_draft

official.snapshot_download = lambda path, **_: path  # its loader asks the hub; the pair is local


def default_draft(directory: Path, block_size: int = 0) -> None:
    """Write the default draft as the official package reads it: with logits of the whole vocabulary."""
    config = json.loads((default_draft_path() / "config.json").read_text())
    config.pop("draft_vocab_size", None)
    config["block_size"] = max(block_size, config["block_size"])
    weights = mx.load(str(default_draft_path() / "model.safetensors"))
    weights.pop("d2t", None)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)


def official_run(model, draft, tokenizer, prompt, block_size, max_tokens):
    """Tokens, seconds from the first to the last, tokens of each round."""
    tokens, rounds, first = [], [], None
    for response in official.stream_generate(
        model, draft, tokenizer, prompt, block_size=block_size, max_tokens=max_tokens
    ):
        if first is None:
            first = time.perf_counter()
        elif response.tokens:
            rounds.append(len(response.tokens))
        tokens += response.tokens
    return tokens, time.perf_counter() - first, rounds


def our_run(model, draft, tokenizer, prompt, block_size, max_tokens):
    tokens, first, last = [], None, None
    for last in stream_generate(model, tokenizer, prompt, max_tokens, draft, block_size=block_size):
        first = first or time.perf_counter()
        tokens.append(last.token)
    return tokens, time.perf_counter() - first, [r.committed for r in last.statistics.drafted_rounds]


def official_host_s(model, draft, prompt, block_size):
    """Seconds that building the graphs of one of its rounds takes."""
    cache, draft_cache = make_prompt_cache(model), draft.make_cache()
    with mx.stream(generation_stream):
        model(mx.array([prompt]), cache)
        hidden = mx.concatenate(model._hidden_states, axis=-1)
        mx.eval([c.state for c in cache], hidden)
        started = time.perf_counter()
        block = mx.array([[prompt[-1]] + [draft.config.mask_token_id] * (block_size - 1)])
        draft_tokens = mx.argmax(draft(block, hidden, draft_cache, logits_start=1), axis=-1)
        verify_input = mx.concatenate([block[:, :1], draft_tokens], axis=1)
        logits = model(verify_input, cache)
        hidden = mx.concatenate(model._hidden_states, axis=-1)
        target_tokens = mx.argmax(logits, axis=-1)
        built = time.perf_counter()
        mx.eval(target_tokens, hidden)
    return built - started


def compare(block_size, draft_path, models, tokenizer, prompts, max_tokens):
    ours_model, official_model = models
    ours, theirs = load_draft(draft_path, target=ours_model), official.load_draft(str(draft_path))
    theirs.set_dtype(mx.float32)
    pairs = []
    for number, prompt in enumerate(prompts):
        b = official_run(official_model, theirs, tokenizer, prompt, block_size, max_tokens)
        a = our_run(ours_model, ours, tokenizer, prompt, block_size, max_tokens)
        if number:  # the first compiles kernels
            pairs.append((a, b))
    parts = RoundBench(ours_model, ours, block_size, prompts[0])
    mean = lambda rounds: sum(map(sum, rounds)) / sum(map(len, rounds))  # noqa: E731
    return {
        "block_size": block_size,
        "ratio": statistics.median((len(a[0]) / a[1]) / (len(b[0]) / b[1]) for a, b in pairs),
        "ratio_of_sums": sum(b[1] for _, b in pairs) / sum(a[1] for a, _ in pairs),
        "identical": sum(a[0] == b[0] for a, b in pairs),
        "prompts": len(pairs),
        "acceptance_length": mean([a[2] for a, _ in pairs]),
        "official_acceptance_length": mean([b[2] for _, b in pairs]),
        "host_s": statistics.median(parts.host_s() for _ in range(15)),
        "official_host_s": statistics.median(
            official_host_s(official_model, theirs, prompts[0], block_size) for _ in range(15)
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-sizes", default="4,8,16")
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    ours_model, tokenizer = mlx_lm.load(str(default_target_path()))
    official_model, _ = mlx_lm.load(str(default_target_path()))
    step = max(1, len(PROMPTS) // args.num_prompts)
    chats = [[{"role": "user", "content": p.text}] for p in PROMPTS[::step][: args.num_prompts]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in map(int, args.block_sizes.split(",")):
            path = Path(scratch) / str(size)
            default_draft(path, size)
            rows.append(compare(size, path, (ours_model, official_model), tokenizer, prompts, args.max_tokens))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows, "machine": machine.device_facts(), "versions": machine.versions()}))


if __name__ == "__main__":
    main()
