"""`dflash-mlx train data|fit|eval`: flags to one call each."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import dequantize_model
from tqdm import tqdm

from ..bench.prompts import PROMPTS
from ..default_pair import default_draft_path
from ..draft import DFlashDraft
from ..errors import DFlashError
from ..load import load_draft
from ..targets.anatomy import dissect
from ..text import chat_prompt
from .data import (
    ANSWER,
    DataDirectory,
    Shard,
    StoredHidden,
    data_files,
    digest,
    hidden_path,
    join,
    make_directory,
    origin,
    read_shard,
    same_model,
    without,
)
from .evaluation import decode_all
from .fit import Settings, Trainer, vocabulary_of
from .prompts import read_prompts
from .run import Run
from .start import draft_config, from_target, spread, with_domino, with_vocabulary
from .writer import answer, captured, converse

LoadPair = Callable[[argparse.Namespace], tuple[nn.Module, Any, dict[str, Any], DFlashDraft | None]]

# The rates a new draft learns fast at would first undo what a trained one knows.
RATES_OF_TRAINED = {"muon_rate": 4e-3, "adamw_rate": 1e-3}


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
    command.add_argument("--hidden-limit-gb", type=float, default=None, help="Keep no more of them than this (20).")
    command.add_argument("--json", action="store_true", help="Print one JSON line.")
    command.set_defaults(run=lambda args: run_data(args, load_pair))


def run_data(args: argparse.Namespace, load_pair: LoadPair) -> int:
    temperatures = checked_data(args)
    args.draft = "none"
    model, tokenizer, _, _ = load_pair(args)
    layers = capture_layers(args, model) if args.hidden else ()
    limit_gb = 20.0 if args.hidden_limit_gb is None else args.hidden_limit_gb
    prompts = None if args.prompts is None else fitting(read_prompts(args.prompts, tokenizer), args.length)
    settings = {
        "model": str(args.model or "default"),
        "prompts": None if args.prompts is None else digest([args.prompts]),
        **{name: getattr(args, name) for name in ("rows", "length", "temperatures", "seed")},
        "capture_layers": list(layers),
    }
    directory = DataDirectory(args.out, settings)
    for damaged in directory.damaged:
        print(f"Note: {damaged} is damaged and is written again.", file=sys.stderr)
    num_shards = 16 if args.num_shards is None else args.num_shards
    if prompts is not None:
        whole = -(-len(prompts) // args.rows)
        num_shards = whole if args.num_shards is None else min(whole, args.num_shards)
    total, index, said = 0, directory.next_index(), set[str]()

    def say(note: str) -> None:
        if note not in said:
            print(f"Note: {note}", file=sys.stderr)
        said.add(note)

    while index < num_shards:
        kept = sum(file.stat().st_size for file in args.out.glob("hidden-*.safetensors")) / 1e9
        taken = layers if kept < limit_gb else ()
        if layers and not taken:
            say(f"--hidden-limit-gb {limit_gb:g} is reached; the shards from here have no hidden states.")
        writing = begun_shard(args, model, tokenizer, prompts, index, temperatures, taken)
        shard = _written(writing, f"shard {index + 1} of {num_shards}", args.rows * args.length, not args.json)
        if prompts is not None and taken:
            shard = Shard(shard.ids, shard.role, captured(model, shard.ids, taken))
        directory.write(index, shard)
        total += int((shard.role >= 0).sum())
        if not (shard.role == ANSWER).any():
            say(f"A shard has no answer within --length {args.length}, nothing to learn from; use a larger --length.")
        index = directory.next_index()
    result = {"shards": len(directory.shards()), "new_tokens": total, "directory": str(args.out)}
    print(json.dumps(result) if args.json else f"{result['shards']} shards in {args.out}, {total} tokens of them new.")
    return 0


def begun_shard(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Any,
    prompts: list[list[int]] | None,
    index: int,
    temperatures: list[float],
    taken: tuple[int, ...],
) -> Iterator[int | Shard]:
    """Both sides of conversations, or answers to the shard's part of the prompts; tokens so far, at last the shard."""
    if prompts is None:
        return converse(
            model,
            tokenizer,
            num_rows=args.rows,
            length=args.length,
            temperatures=temperatures,
            seed=f"{args.seed}-{index}",
            capture_layer_ids=taken,
        )
    return answer(
        model,
        prompts[index * args.rows : (index + 1) * args.rows],
        length=args.length,
        temperatures=temperatures,
        eos_token_ids=list(tokenizer.eos_token_ids),
        seed=args.seed + index,
    )


def checked_data(args: argparse.Namespace) -> list[float]:
    """The temperatures; DFlashError for a flag's value that is out of its range."""
    for name in ("rows", "length", "num_shards"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise DFlashError(f"--{name.replace('_', '-')} is {getattr(args, name)}; use 1 or more.")
    if not 0 <= args.seed < 2**63:
        raise DFlashError(f"--seed is {args.seed}; use 0 to 2**63 - 1.")
    if args.hidden_limit_gb is not None and not args.hidden_limit_gb >= 0:
        raise DFlashError(f"--hidden-limit-gb is {args.hidden_limit_gb:g}; use 0 or more.")
    for name in ("capture_layers", "hidden_limit_gb"):
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if value is not None and not args.hidden:
            raise DFlashError(f"{flag} {value} keeps nothing without --hidden; give both or none.")
    temperatures = numbers("--temperatures", args.temperatures, float)
    if not all(0 <= temperature < math.inf for temperature in temperatures):
        raise DFlashError(f"--temperatures {args.temperatures} holds one below 0 or not finite; use 0 or more.")
    return temperatures


def _written(writing: Iterator[int | Shard], title: str, total: int, progress: bool) -> Shard:
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
    layers = numbers("--capture-layers", args.capture_layers, int)
    if wrong := [layer for layer in layers if not 0 <= layer < depth]:
        raise DFlashError(f"--capture-layers has {wrong[0]}, but the target has {depth} layers; use 0 to {depth - 1}.")
    if len(set(layers)) < len(layers):
        raise DFlashError(f"--capture-layers {args.capture_layers} names a layer twice; name each once.")
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
        help="A local directory of a draft to go on from, or 'default', the default pair's; without it, or with "
        "'none', the draft starts from the target's last layers.",
    )
    command.add_argument("--layers", type=int, default=None, help="Of a new draft (2).")
    command.add_argument("--block-size", type=int, default=None, help="Of a new draft (8).")
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
    command.add_argument(
        "--vocabulary",
        type=int,
        default=None,
        help=f"Most frequent tokens trained on ({defaults.vocabulary}); a draft that has its own keeps them.",
    )
    for name, what in (("muon_rate", "matrices"), ("adamw_rate", "the rest")):
        new, trained = getattr(defaults, name), RATES_OF_TRAINED[name]
        text = f"For {what} ({new}; with --draft {trained})."
        command.add_argument(f"--{name.replace('_', '-')}", type=float, default=None, help=text)
    command.add_argument("--warmup-steps", type=int, default=defaults.warmup_steps)
    command.add_argument(
        "--cooldown", type=float, default=defaults.cooldown, help="Share of the run in which the rates fall to 0 (1)."
    )
    command.add_argument("--clip-norm", type=float, default=defaults.clip_norm)
    command.add_argument("--seed", type=int, default=defaults.seed)
    command.add_argument("--json", action="store_true", help="Print one JSON line.")
    command.set_defaults(run=lambda args: run_fit(args, load_pair))


def run_fit(args: argparse.Namespace, load_pair: LoadPair) -> int:
    given = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
    rates = {} if args.draft in (None, "none") else RATES_OF_TRAINED
    settings = Settings(**rates | {name: value for name, value in given.items() if value is not None})
    if args.evaluate_every < 1:
        raise DFlashError(f"evaluate_every is {args.evaluate_every}; use 1 or more.")
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
    make_directory(args.out)
    if (args.prune_head or (args.domino and draft.config.domino is None)) and draft.token_ids is None:
        draft, raw = with_vocabulary(draft, raw, vocabulary_of(shard, settings.vocabulary))
    if args.domino and draft.config.domino is None:
        draft, raw = with_domino(draft, raw)
    target = str(args.model or "default")
    check_origin(files, target, everything, draft.config.vocab_size)
    whole = None if settings.distillation else stored_hidden(files, target, draft)
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
    if not (shard.role[:num_rows] == ANSWER).any():
        raise DFlashError(
            f"The first {num_rows} conversations, held out, hold no answers; give others with --held-out."
        )
    return Shard(shard.ids[:num_rows], shard.role[:num_rows])


def starting_draft(
    args: argparse.Namespace, start: str | None, model: nn.Module, tokenizer: Any, config: dict[str, Any]
) -> tuple[DFlashDraft, dict[str, Any]]:
    """The draft to train and its published config."""
    if start not in (None, "none"):
        return given_draft(args, start, model)
    vocab_size = dissect(model).vocab_size
    mask = unused_token(tokenizer, vocab_size) if args.mask_token is None else args.mask_token
    if not 0 <= mask < vocab_size:
        raise DFlashError(f"--mask-token {mask} is no token of the target; use 0 to {vocab_size - 1}.")
    raw = draft_config(
        model,
        config,
        num_layers=2 if args.layers is None else args.layers,
        block_size=8 if args.block_size is None else args.block_size,
        mask_token_id=mask,
    )
    return from_target(model, raw), raw


def given_draft(args: argparse.Namespace, start: str, model: nn.Module) -> tuple[DFlashDraft, dict[str, Any]]:
    """The draft that --draft names; DFlashError where another flag asks for what it does not have."""
    directory = default_draft_path() if start == "default" else Path(start)
    if not directory.is_dir():
        raise DFlashError(f"--draft {start} is no local directory; download the draft and name its directory.")
    for name in ("layers", "block_size", "mask_token"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise DFlashError(f"{flag} is of a new draft, and --draft {start} has its own; leave one of the two out.")
    draft = load_draft(directory, target=model, dtype=mx.float32)
    if draft.token_ids is None and draft.config.domino is not None and not args.prune_head and args.vocabulary:
        raise DFlashError(
            f"--vocabulary {args.vocabulary} cannot be had from --draft {start}, whose Domino head is over all tokens; "
            "add --prune-head or leave --vocabulary out."
        )
    if draft.token_ids is not None:
        size = draft.token_ids.size
        if args.vocabulary not in (None, size):
            raise DFlashError(
                f"--vocabulary {args.vocabulary} cannot be had from --draft {start}, which has its own {size} tokens; "
                "leave --vocabulary out."
            )
        if args.prune_head:
            print(f"Note: --draft {start} keeps its own vocabulary of {size} tokens.", file=sys.stderr)
    dequantize_model(draft)
    raw = json.loads((directory / "config.json").read_text())
    return draft, {name: value for name, value in raw.items() if not name.startswith("quantization")}


def check_origin(files: Sequence[Path], model: str, shard: Shard, vocab_size: int) -> None:
    """A note for data of another target; DFlashError where their tokens cannot be this one's."""
    for other in sorted({str(origin(file).get("model", model)) for file in files}):
        if not same_model(other, model):
            print(f"Note: The data were written by --model {other}, the draft is for {model}.", file=sys.stderr)
    if not 0 <= shard.ids.min() <= shard.ids.max() < vocab_size:
        raise DFlashError(
            f"The data hold token {shard.ids.max()}, but the target has {vocab_size}; give data that this target wrote."
        )


def stored_hidden(files: Sequence[Path], model: str, draft: DFlashDraft) -> StoredHidden | None:
    """The hidden states that the data keep, where they are this target's and of this draft's layers; else a note."""
    if not any(hidden_path(file).exists() for file in files):
        return None
    layers = draft.capture_layer_ids
    if why := StoredHidden.unusable(files, model, layers):
        print(f"Note: Stored hidden states are computed again: {why}.", file=sys.stderr)
        return None
    return StoredHidden(files, draft.config.hidden_size * len(layers))


def unused_token(tokenizer: Any, vocab_size: int) -> int:
    """A special token, with an embedding, that no text and no template holds."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used = {*tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = getattr(tokenizer, "added_tokens_decoder", {})
    for token, added in sorted(special.items()):
        if token < vocab_size and token not in used and str(added) not in template:
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
        if not prompts:
            raise DFlashError(f"--held-out {args.held_out} holds no answers; give data with some.")
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


def numbers(flag: str, text: str, kind: type) -> list[Any]:
    """The values of a comma-separated flag."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise DFlashError(f"{flag} {text!r} is not a list of numbers like 1,2,3.") from None
