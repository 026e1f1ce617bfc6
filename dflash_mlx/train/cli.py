"""`dflash-mlx train data|fit|eval`: flags to one call each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from ..bench.prompts import PROMPTS
from ..draft import DFlashDraft
from ..errors import DFlashError
from ..load import load_draft
from ..text import chat_prompt
from .data import DataDirectory, Shard, StoredHidden, data_files, digest, join, read_shard, without
from .evaluation import decode_all
from .fit import Settings, Trainer, vocabulary_of
from .prompts import read_prompts
from .run import Run
from .start import draft_config, from_target, spread, with_domino, with_vocabulary
from .writer import answer, captured, converse

LoadPair = Callable[[argparse.Namespace], tuple[nn.Module, Any, dict[str, Any], DFlashDraft | None]]


def add_train(commands: Any, load_pair: LoadPair) -> None:
    """The `train` subcommand; `load_pair` turns --model and --draft into a target and a draft."""
    parts = commands.add_parser("train", help="train a draft for your own target").add_subparsers(
        required=True, metavar="PART"
    )
    _add_data(parts.add_parser("data", help="let the target write training data"), load_pair)
    _add_fit(parts.add_parser("fit", help="train a draft on such data"), load_pair)
    _add_eval(parts.add_parser("eval", help="a draft's acceptance, by really decoding"), load_pair)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default=None, help="Directory or repository of the target; the default pair's.")


# data


def _add_data(command: argparse.ArgumentParser, load_pair: LoadPair) -> None:
    _add_model(command)
    command.add_argument("--out", type=Path, required=True, help="Directory of shards; run again to go on.")
    command.add_argument(
        "--prompts",
        type=Path,
        default=None,
        help="A text file, one prompt a line, or .jsonl of prompts or chats; without it the target writes both sides.",
    )
    command.add_argument(
        "--num-shards", type=int, default=None, help="Stop at so many; all prompts, or 16, by default."
    )
    command.add_argument("--rows", type=int, default=64, help="Conversations of a shard, written together (64).")
    command.add_argument("--length", type=int, default=512, help="Tokens of a conversation at most (512).")
    command.add_argument(
        "--temperatures", default="0,0,0,0.6", help="Of the answers, row by row in turn; 0 is greedy (0,0,0,0.6)."
    )
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--hidden", action="store_true", help="Keep captured hidden states, float16, beside the shards."
    )
    command.add_argument("--capture-layers", default=None, help="For --hidden: such as 1,8,14,21,27.")
    command.add_argument("--hidden-limit-gb", type=float, default=20.0, help="Keep no more of them than this (20).")
    command.add_argument("--json", action="store_true", help="Print one JSON line.")
    command.set_defaults(run=lambda args: run_data(args, load_pair))


def run_data(args: argparse.Namespace, load_pair: LoadPair) -> int:
    for name in ("rows", "length"):
        if getattr(args, name) < 1:
            raise DFlashError(f"--{name} is {getattr(args, name)}; use 1 or more.")
    temperatures = _numbers("--temperatures", args.temperatures, float)
    if min(temperatures) < 0:
        raise DFlashError(f"--temperatures {args.temperatures} holds one below 0; use 0 or more.")
    args.draft = "none"
    model, tokenizer, _, _ = load_pair(args)
    layers = capture_layers(args, model) if args.hidden else ()
    prompts = None if args.prompts is None else fitting(read_prompts(args.prompts, tokenizer), args.length)
    settings = {
        "model": str(args.model or "default"),
        "prompts": None if args.prompts is None else digest([args.prompts]),
        **{name: getattr(args, name) for name in ("rows", "length", "temperatures", "seed")},
        "capture_layers": list(layers),
    }
    directory = DataDirectory(args.out, settings)
    num_shards = 16 if args.num_shards is None else args.num_shards
    if prompts is not None:
        whole = -(-len(prompts) // args.rows)
        num_shards = whole if args.num_shards is None else min(whole, args.num_shards)
    total, index = 0, directory.next_index()
    while index < num_shards:
        kept = sum(file.stat().st_size for file in args.out.glob("hidden-*.safetensors")) / 1e9
        taken = layers if kept < args.hidden_limit_gb else ()
        if prompts is None:
            writing = converse(
                model,
                tokenizer,
                num_rows=args.rows,
                length=args.length,
                temperatures=temperatures,
                seed=f"{args.seed}-{index}",
                capture_layer_ids=taken,
            )
        else:
            writing = answer(
                model,
                prompts[index * args.rows : (index + 1) * args.rows],
                length=args.length,
                temperatures=temperatures,
                eos_token_ids=list(tokenizer.eos_token_ids),
                seed=args.seed + index,
            )
        shard = _written(writing, f"shard {index + 1} of {num_shards}", args.rows * args.length, not args.json)
        if prompts is not None and taken:
            shard = Shard(shard.ids, shard.role, captured(model, shard.ids, taken))
        directory.write(index, shard)
        total += int((shard.role >= 0).sum())
        index = directory.next_index()
    result = {"shards": len(directory.shards()), "new_tokens": total, "directory": str(args.out)}
    print(json.dumps(result) if args.json else f"{result['shards']} shards in {args.out}, {total} tokens of them new.")
    return 0


def _written(writing: Any, title: str, total: int, progress: bool) -> Shard:
    bar = tqdm(total=total, unit="token", desc=title, disable=not progress)
    for part in writing:
        if isinstance(part, Shard):
            bar.close()
            return part
        bar.update(part - bar.n)
    raise AssertionError("a writer ends with its shard")


def fitting(prompts: list[list[int]], length: int) -> list[list[int]]:
    """Prompts that leave room for an answer; what does not is said, once."""
    kept = [prompt for prompt in prompts if len(prompt) < length]
    if not kept:
        raise DFlashError(f"Every prompt has {length} tokens or more; use a larger --length.")
    if len(kept) < len(prompts):
        print(f"Note: {len(prompts) - len(kept)} prompts of {length} tokens or more are left out.", file=sys.stderr)
    return kept


def capture_layers(args: argparse.Namespace, model: nn.Module) -> tuple[int, ...]:
    depth = len(model.layers)
    if args.capture_layers is None:
        return tuple(spread(max(0, depth - 3)))
    layers = _numbers("--capture-layers", args.capture_layers, int)
    if wrong := [layer for layer in layers if not 0 <= layer < depth]:
        raise DFlashError(f"--capture-layers has {wrong[0]}, but the target has {depth} layers; use 0 to {depth - 1}.")
    return tuple(layers)


# fit


def _add_fit(command: argparse.ArgumentParser, load_pair: LoadPair) -> None:
    defaults = Settings()
    _add_model(command)
    command.add_argument("--data", type=Path, nargs="+", required=True, help="Shards, packs and directories of them.")
    command.add_argument("--out", type=Path, required=True, help="Directory of the run; run again to go on.")
    command.add_argument(
        "--draft",
        default=None,
        help="A draft to go on from; without it, or with 'none', the draft starts from the target's last layers.",
    )
    command.add_argument("--layers", type=int, default=2, help="Of a new draft (2).")
    command.add_argument("--block-size", type=int, default=8, help="Of a new draft (8).")
    command.add_argument(
        "--prune-head",
        action="store_true",
        help="The draft has logits for the --vocabulary alone, so that it is faster.",
    )
    command.add_argument(
        "--domino", action="store_true", help="Add a Domino head, over the same tokens, where the draft has none."
    )
    command.add_argument("--mask-token", type=int, default=None, help="Of a new draft: a token that texts never hold.")
    command.add_argument(
        "--held-out", type=Path, default=None, help="Data to evaluate on; the first of --data if left out."
    )
    command.add_argument("--num-held-out", type=int, default=64, help="Its first conversations, never trained on (64).")
    command.add_argument("--evaluate-every", type=int, default=100, help="Steps between checkpoints (100).")
    command.add_argument("--num-steps", type=int, default=defaults.num_steps)
    command.add_argument("--batch-size", type=int, default=defaults.batch_size, help="Conversations of a step.")
    command.add_argument("--num-anchors", type=int, default=defaults.num_anchors, help="Blocks of a conversation.")
    command.add_argument("--decay", type=float, default=defaults.decay, help="Slot k weighs exp(-(k - 1) / DECAY).")
    command.add_argument(
        "--distillation", type=float, default=defaults.distillation, help="Share of the target's distribution, 0 to 1."
    )
    command.add_argument("--vocabulary", type=int, default=defaults.vocabulary, help="Most frequent tokens trained on.")
    command.add_argument("--muon-rate", type=float, default=defaults.muon_rate, help="For matrices.")
    command.add_argument("--adamw-rate", type=float, default=defaults.adamw_rate, help="For the rest.")
    command.add_argument("--warmup-steps", type=int, default=defaults.warmup_steps)
    command.add_argument(
        "--cooldown", type=float, default=defaults.cooldown, help="Share of the run in which the rates fall to 0 (1)."
    )
    command.add_argument("--clip-norm", type=float, default=defaults.clip_norm)
    command.add_argument("--seed", type=int, default=defaults.seed)
    command.add_argument("--json", action="store_true", help="Print one JSON line.")
    command.set_defaults(run=lambda args: run_fit(args, load_pair))


def run_fit(args: argparse.Namespace, load_pair: LoadPair) -> int:
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    files = data_files(args.data)
    everything = join([read_shard(file) for file in files])
    held_out = first_rows(everything if args.held_out is None else join_files([args.held_out]), args.num_held_out)
    rows = without(everything, held_out)
    if not rows.size:
        raise DFlashError(f"All {len(everything.ids)} conversations are held out; write more or lower --num-held-out.")
    shard = Shard(everything.ids[rows], everything.role[rows])
    start, args.draft = args.draft, "none"
    model, tokenizer, config, _ = load_pair(args)
    draft, raw = starting_draft(args, start, model, tokenizer, config)
    if (args.prune_head or args.domino) and draft.token_ids is None:
        draft, raw = with_vocabulary(draft, raw, vocabulary_of(shard, settings.vocabulary))
    if args.domino and draft.config.domino is None:
        draft, raw = with_domino(draft, raw)
    whole = StoredHidden.of(files)
    stored = None if whole is None else lambda chosen: whole(rows[list(chosen)].tolist())
    run = Run(Trainer(model, draft, shard, settings, stored), raw, held_out, args.out, digest(files))
    if run.resume() and not args.json:
        print(f"Going on at step {run.trainer.step} of {settings.num_steps}.", file=sys.stderr)
    last = run.fit(evaluate_every=args.evaluate_every, progress=not args.json)
    result = {"draft": str(args.out / "draft"), **last}
    line = f"{result['draft']}: acceptance length {last['acceptance_length']:.2f} on held-out conversations."
    print(json.dumps(result) if args.json else line)
    return 0


def join_files(paths: Sequence[Path]) -> Shard:
    return join([read_shard(file) for file in data_files(paths)])


def first_rows(shard: Shard, num_rows: int) -> Shard:
    if num_rows < 1:
        raise DFlashError(f"--num-held-out is {num_rows}; use 1 or more.")
    return Shard(shard.ids[:num_rows], shard.role[:num_rows])


def starting_draft(
    args: argparse.Namespace, start: str | None, model: nn.Module, tokenizer: Any, config: dict[str, Any]
) -> tuple[DFlashDraft, dict[str, Any]]:
    """The draft to train and its published config."""
    if start not in (None, "none"):
        if not Path(start).is_dir():
            raise DFlashError(f"--draft {start} is no local directory; download the draft and name its directory.")
        draft = load_draft(start, target=model, dtype=mx.float32)
        return draft, json.loads((Path(start) / "config.json").read_text())
    mask = unused_token(tokenizer) if args.mask_token is None else args.mask_token
    raw = draft_config(model, config, num_layers=args.layers, block_size=args.block_size, mask_token_id=mask)
    return from_target(model, raw), raw


def unused_token(tokenizer: Any) -> int:
    """A special token that no text and no template holds."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used = {*tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = getattr(tokenizer, "added_tokens_decoder", {})
    for token, added in sorted(special.items()):
        if token not in used and str(added) not in template:
            return token
    raise DFlashError("The target's tokenizer has no special token to spare; name a token with --mask-token.")


# eval


def _add_eval(command: argparse.ArgumentParser, load_pair: LoadPair) -> None:
    _add_model(command)
    command.add_argument("--draft", default=None, help="The draft; the default pair's if left out.")
    command.add_argument("--prompts", type=Path, default=None, help="As for `train data`; built-in ones if left out.")
    command.add_argument("--held-out", type=Path, default=None, help="Use the first turns of these conversations.")
    command.add_argument("--num-prompts", type=int, default=40)
    command.add_argument("--max-tokens", "-m", type=int, default=128)
    command.add_argument("--block-size", type=int, default=None)
    command.add_argument("--tree-budget", type=int, default=0)
    command.add_argument("--json", action="store_true", help="Print one JSON line.")
    command.set_defaults(run=lambda args: run_eval(args, load_pair))


def run_eval(args: argparse.Namespace, load_pair: LoadPair) -> int:
    for name in ("num_prompts", "max_tokens"):
        if getattr(args, name) < 1:
            raise DFlashError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use 1 or more.")
    args.ngram = False
    model, tokenizer, _, draft = load_pair(args)
    if draft is None:
        raise DFlashError("`train eval` measures a draft; name one with --draft.")
    if args.held_out is not None:
        prompts = opening_turns(join_files([args.held_out]))
    elif args.prompts is not None:
        prompts = read_prompts(args.prompts, tokenizer)
    else:
        prompts = [chat_prompt(tokenizer, prompt.text) for prompt in PROMPTS]
    result = decode_all(
        model,
        tokenizer,
        draft,
        prompts[: args.num_prompts],
        max_tokens=args.max_tokens,
        progress=not args.json,
        block_size=args.block_size,
        tree_budget=args.tree_budget,
    )
    shares = " ".join(f"{share:.2f}" for share in result["acceptance_by_position"])
    line = f"acceptance length {result['acceptance_length']:.3f} over {result['prompts']} prompts; by position {shares}"
    print(json.dumps(result) if args.json else line)
    return 0


def opening_turns(shard: Shard) -> list[list[int]]:
    """Every conversation up to its first answer."""
    answered = shard.role == 2
    return [
        row[:start].tolist() for row, start in zip(shard.ids, np.argmax(answered, axis=1), strict=True) if start > 0
    ]


def _numbers(flag: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise DFlashError(f"{flag} {text!r} is not a list of numbers like 1,2,3.") from None
