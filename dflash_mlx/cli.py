"""Flags to one call per subcommand; errors become one sentence and an exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import setup_arg_parser
from mlx_lm.models.cache import QuantizedKVCache

from . import check, conformance, demo, doctor, machine
from .bench.prompts import PROMPTS, Prompt
from .bench.report import Setting, run_bench, table
from .default_pair import default_draft_path, default_target_path
from .draft import DFlashDraft, convert_draft
from .errors import DFlashError, TargetStateError, UnsupportedOptionError
from .generate import checked_caches, generate, stream_generate
from .load import load, load_draft
from .pairs import choose_draft, known_targets
from .prompt_cache import load_prompt_cache
from .speculative.sampling import Sampler, make_sampler
from .text import chat_prompt
from .train.cli import add_train, numbers
from .version import __version__

DEFAULT = "default"
DRAFT_BITS = (4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 0 when it did what was asked, 1 when a check failed, 2 for bad input."""
    args = build_parser().parse_args(argv)
    try:
        check_flags(args)
        return args.run(args)
    except (DFlashError, TargetStateError, NotImplementedError) as error:
        print(f"dflash-mlx: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def check_flags(args: argparse.Namespace) -> None:
    """What a flag can never mean, in whatever command."""
    for flag in ("draft", "model"):
        value = getattr(args, flag, None)
        if value is not None and not value.strip():
            raise DFlashError(
                f"--{flag} is {value!r}, perhaps a shell variable that is not set; name one or leave it out."
            )
    bits, seed = getattr(args, "draft_bits", None), getattr(args, "seed", None)
    top_k, budgets = getattr(args, "tree_top_k", None), getattr(args, "tree_budgets", None) or "0"
    if top_k is not None and not args.tree_budget and not budgets.strip("0, "):
        raise DFlashError(f"--tree-top-k {top_k} needs a tree; give --tree-budget or leave it out.")
    if bits is not None and bits not in DRAFT_BITS:
        raise DFlashError(f"--draft-bits {bits} is neither 4 nor 8; use one of them or leave it out.")
    if seed is not None and not 0 <= seed < 2**64:
        raise DFlashError(f"--seed {seed} is outside 0..{2**64 - 1}; use a smaller number of 0 or more.")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-mlx", description="DFlash speculative decoding for MLX: mlx-lm's output in fewer target forwards."
    )
    parser.add_argument("--version", action="version", version=f"dflash-mlx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "generate",
        help="text from a prompt; mlx_lm.generate's flags and a draft",
        parents=[setup_arg_parser()],
        add_help=False,
        conflict_handler="resolve",
    )
    _add_target(command)
    _add_draft(command)
    command.add_argument("--draft-model", dest="draft", default=argparse.SUPPRESS, help="The same as --draft.")
    command.add_argument("--num-draft-tokens", type=int, default=None, help="The same as --block-size minus 1.")
    command.add_argument("--stop", action="append", default=[], help="Text that ends the output (repeatable).")
    command.add_argument(
        "--hint", default=None, help="Text that you expect in the output, or a file @PATH: it is proposed, not trusted."
    )
    command.add_argument("--json", action="store_true", help="Print one JSON line instead of the text.")
    command.set_defaults(run=run_generate)

    command = commands.add_parser(
        "check", help="prove that speculation changes nothing; exit status 0 when it does not"
    )
    _add_model(command)
    command.add_argument("--temp", type=float, default=0.0, help="0: same tokens; above: same distribution.")
    command.add_argument("--top-p", type=float, default=1.0)
    command.add_argument("--top-k", type=int, default=0)
    command.add_argument("--min-p", type=float, default=0.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--conformance",
        action="store_true",
        help="Check the target alone: are its caches rolled back exactly, for chains and for trees?",
    )
    _add_prompts(command)
    command.set_defaults(run=run_check)

    command = commands.add_parser("bench", help="plain and speculative decoding side by side")
    _add_model(command)
    command.add_argument("--block-sizes", default=None, help="Comma-separated; the draft's 4, 8, 16 by default.")
    command.add_argument("--tree-budgets", default=None, help="Comma-separated; 0 is a chain.")
    command.add_argument("--no-costs", action="store_true", help="Leave out the parts of a round.")
    _add_prompts(command)
    command.set_defaults(run=run_bench_command)

    command = commands.add_parser("demo", help="one prompt, decoded both ways")
    _add_model(command)
    command.add_argument("--prompt", "-p", default="Write a Python function that reverses a string.")
    command.add_argument("--max-tokens", "-m", type=int, default=128)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run_demo)

    command = commands.add_parser("pairs", help="the targets that a published draft is known for")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run_pairs)

    command = commands.add_parser("convert", help="write a draft to disk, quantized or in another type")
    command.add_argument("--draft", required=True, help="A DFlash draft (directory or repository), or 'default'.")
    command.add_argument("--out", type=Path, required=True, help="A new directory.")
    command.add_argument("--draft-bits", type=int, default=None, metavar="N", help="Quantize it, to 4 or 8 bits.")
    command.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default=None)
    command.set_defaults(run=run_convert)

    add_train(commands, load_pair)

    command = commands.add_parser("doctor", help="what is slow or wrong on this machine")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run_doctor)
    return parser


def _add_draft(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft",
        default=None,
        help="A DFlash draft (directory or repository), 'auto' for the one known for the target (see `pairs`), or "
        "'none'. The default target has a default draft.",
    )
    command.add_argument(
        "--draft-bits", type=int, default=None, metavar="N", help="Quantize the draft on load, to 4 or 8 bits."
    )
    command.add_argument(
        "--block-size", type=int, default=None, help="Nodes of the draft's block, the anchor included."
    )
    command.add_argument(
        "--tree-budget", type=int, default=0, help="Nodes of a tree besides the anchor; 0, the default, is a chain."
    )
    command.add_argument("--tree-top-k", type=int, default=None, help="Tokens of every position in the tree (16).")
    command.add_argument(
        "--width",
        default="full",
        help="How much of block and budget a round uses: full, auto (what pays), or a probability such as 0.1 below "
        "which a node is left out.",
    )
    command.add_argument(
        "--ngram", action="store_true", help="Propose what followed the text's last words before; needs no draft."
    )


def proposing(args: argparse.Namespace) -> dict[str, Any]:
    """What stream_generate is told about proposals."""
    names = ("block_size", "tree_budget", "tree_top_k", "width", "ngram")
    return {name: getattr(args, name) for name in names}


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", default=None, help="Directory or repository of the target; the default pair's if left out."
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    _add_target(command)
    _add_draft(command)


def _add_prompts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prompts", type=Path, default=None, help="A text file, one prompt a line; built-in ones if left out."
    )
    command.add_argument("--num-prompts", type=int, default=None, help="Use the first so many, spread over the kinds.")
    command.add_argument("--max-tokens", "-m", type=int, default=None)
    command.add_argument("--json", action="store_true", help="Print one JSON line.")


def cache_dir() -> Path | None:
    """The user's override of the cache directory, the only place where it is read."""
    value = os.environ.get("DFLASH_MLX_CACHE")
    return Path(value).expanduser() if value else None


def load_pair(args: argparse.Namespace, **options: Any) -> tuple[Any, Any, dict, DFlashDraft | None]:
    """Target, tokenizer, config and draft that the flags name; draft None means that speculation is not running."""
    name, bits = getattr(args, "model", None), getattr(args, "draft_bits", None)
    path = str(default_target_path(cache_dir())) if name in (None, DEFAULT) else name
    model, tokenizer, config = load(path, return_config=True, **options)
    for note in machine.slowness(model):
        print(f"Note: {note}", file=sys.stderr)
    chosen = args.draft or (DEFAULT if name in (None, DEFAULT) else "none")
    if chosen == "auto":
        choice = choose_draft(path, config)
        print(f"--draft auto: {choice}", file=sys.stderr)
        chosen = choice.draft.draft
    if chosen == "none":
        if bits is not None:
            raise DFlashError(f"--draft-bits {bits} needs a draft; name one with --draft.")
        if args.draft is None and not args.ngram and not getattr(args, "hint", None):
            print("Speculation is not running: name a draft with --draft, or use --ngram.", file=sys.stderr)
        return model, tokenizer, config, None
    draft = load_draft(default_draft_path() if chosen == DEFAULT else chosen, target=model, bits=bits)
    return model, tokenizer, config, draft


def load_speculative_pair(args: argparse.Namespace) -> tuple[Any, Any, DFlashDraft | None]:
    if not args.ngram and (args.draft == "none" or (args.draft is None and args.model not in (None, DEFAULT))):
        raise DFlashError("This command compares with speculation; name a draft with --draft, or use --ngram.")
    model, tokenizer, _, draft = load_pair(args)
    return model, tokenizer, draft


def run_generate(args: argparse.Namespace) -> int:
    if args.image:
        raise UnsupportedOptionError("--image is not supported with a draft; use mlx_lm.generate for images.")
    if not 0 < args.top_p <= 1:
        raise DFlashError(f"--top-p {args.top_p} is outside (0, 1]; use 1 to switch it off.")
    if args.seed is not None:
        mx.random.seed(args.seed)
    if args.adapter_path is not None and not (Path(args.adapter_path) / "adapter_config.json").is_file():
        raise DFlashError(
            f"--adapter-path {args.adapter_path} holds no adapter_config.json; give an adapter's directory."
        )
    prompt_cache, metadata = _load_prompt_cache(args)
    tokenizer_config = _json_object(
        f"the tokenizer_config of {args.prompt_cache_file}", metadata.get("tokenizer_config")
    )
    tokenizer_config["trust_remote_code"] = args.trust_remote_code
    model, tokenizer, _, draft = load_pair(
        args,
        adapter_path=args.adapter_path,
        tokenizer_config=tokenizer_config,
        model_config={"quantize_activations": args.quantize_activations},
        trust_remote_code=args.trust_remote_code,
    )
    if prompt_cache is not None:
        checked_caches(model, prompt_cache, None)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    options = {
        "max_tokens": args.max_tokens,
        "sampler": _sampler(args, tokenizer),
        "max_kv_size": args.max_kv_size,
        "prefill_step_size": args.prefill_step_size,
        "prompt_cache": prompt_cache,
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
        "draft_model": draft,
        "stop": args.stop,
        "hint_tokens": encode_hint(args, tokenizer),
    } | proposing(args)
    if args.num_draft_tokens is not None:
        if draft is None and not args.ngram and args.hint is None:
            raise DFlashError(f"--num-draft-tokens {args.num_draft_tokens} needs a draft; name one with --draft.")
        options["num_draft_tokens"] = args.num_draft_tokens
    prompt = encode_prompt(args, tokenizer, prompt_cache is not None)
    if args.json:
        _print_json(model, tokenizer, prompt, options)
        return 0
    text = generate(model, tokenizer, prompt, verbose=args.verbose, **options)
    if not args.verbose:
        print(text)
    return 0


def _print_json(model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any]) -> None:
    responses = list(stream_generate(model, tokenizer, prompt, **options))
    last = responses[-1]
    statistics = getattr(last, "statistics", None)
    result = {
        "text": "".join(r.text for r in responses),
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "prompt_tokens_per_s": last.prompt_tps,
        "generation_tokens": last.generation_tokens,
        "generation_tokens_per_s": last.generation_tps,
        "from_draft": sum(r.from_draft for r in responses),
        "peak_bytes": int(last.peak_memory * 1e9),
        "speculation": statistics.summary() if statistics else None,
    }
    print(json.dumps(result))


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise DFlashError(f"{name} is no JSON ({error}); give an object such as {{}}.") from error
    if not isinstance(value, dict):
        raise DFlashError(f"{name} is {text}, not a JSON object such as {{}}.")
    return value


def _sampler(args: argparse.Namespace, tokenizer: Any) -> Any:
    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=tokenizer.encode("\n") + list(tokenizer.eos_token_ids),
    )


def _load_prompt_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, str]]:
    """mlx-lm's rules for a cache file: it brings its model along, and kv flags must agree with it."""
    if args.prompt_cache_file is None:
        return None, {}
    cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    if isinstance(cache[0], QuantizedKVCache):
        for flag, given, held in (
            ("--kv-bits", args.kv_bits, cache[0].bits),
            ("--kv-group-size", args.kv_group_size, cache[0].group_size),
        ):
            if given is not None and given != held:
                raise DFlashError(
                    f"{flag} {given} does not match the {held} of {args.prompt_cache_file}; leave it out."
                )
    if "model" not in metadata:  # saved through the API
        if args.model is None:
            raise DFlashError(f"{args.prompt_cache_file} does not say which model made it; name it with --model.")
        return cache, metadata
    if args.model not in (None, metadata["model"]):
        raise DFlashError(
            f"--model {args.model} is not the model of {args.prompt_cache_file} ({metadata['model']}); use that one."
        )
    args.model = metadata["model"]
    return cache, metadata


def encode_hint(args: argparse.Namespace, tokenizer: Any) -> list[int] | None:
    if args.hint is None:
        return None
    text = args.hint
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DFlashError(f"--hint {args.hint} cannot be read ({error}); give a text file.") from error
    return tokenizer.encode(text, add_special_tokens=False)


def encode_prompt(args: argparse.Namespace, tokenizer: Any, using_cache: bool) -> list[int]:
    """The prompt as mlx_lm.generate builds it, with stdin, chat template, prefilled response and cached prefix."""
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    if not text:
        raise DFlashError("The prompt is empty; give --prompt some text.")
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=True)
    messages = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    messages.append({"role": "user", "content": text})
    prefilled = args.prefill_response is not None
    if prefilled:
        messages.append({"role": "assistant", "content": args.prefill_response})

    def templated(**extra: Any) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=prefilled, add_generation_prompt=not prefilled, **extra
        )

    prompt = templated(**_json_object("--chat-template-config", args.chat_template_config))
    if using_cache:  # the part before the user's words is in the cache
        messages[-1]["content"] = "<query>"
        prompt = prompt[templated().index("<query>") :]
    return tokenizer.encode(prompt, add_special_tokens=False)


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = list(PROMPTS)
    if args.prompts is not None:
        try:
            lines = args.prompts.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DFlashError(f"--prompts {args.prompts} cannot be read ({error}); give a text file.") from error
        prompts = [Prompt("own", line.strip()) for line in lines if line.strip()]
        if not prompts:
            raise DFlashError(f"--prompts {args.prompts} holds no prompt; write one a line.")
    if args.num_prompts is None:
        return prompts
    if args.num_prompts < 1:
        raise DFlashError(f"--num-prompts is {args.num_prompts}; use 1 or more.")
    step = max(1, len(prompts) // args.num_prompts)
    return prompts[::step][: args.num_prompts]


def _max_tokens(args: argparse.Namespace, default: int) -> int:
    if args.max_tokens is not None and args.max_tokens < 1:
        raise DFlashError(f"--max-tokens is {args.max_tokens}; use 1 or more.")
    return args.max_tokens or default


def run_check(args: argparse.Namespace) -> int:
    if args.conformance:
        return run_conformance(args)
    prompts = _prompts(args)
    if not 0 < args.top_p <= 1:
        raise DFlashError(f"--top-p {args.top_p} is outside (0, 1]; use 1 to switch it off.")
    if not args.temp and (args.top_p, args.min_p, args.top_k) != (1, 0, 0):
        raise DFlashError("--top-p, --min-p and --top-k have no effect at --temp 0; give a temperature above 0.")
    sampler = make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    model, tokenizer, draft = load_speculative_pair(args)
    encoded = [chat_prompt(tokenizer, p.text) for p in prompts]
    options: dict[str, Any] = {"progress": not args.json, "max_tokens": _max_tokens(args, 64)} | proposing(args)
    mx.random.seed(args.seed)
    if isinstance(sampler, Sampler):
        result = check.check_sampling(model, tokenizer, draft, encoded, sampler, **options)
    else:
        result = check.check_greedy(model, tokenizer, draft, encoded, **options)
    print(json.dumps(result | {"versions": machine.versions()}) if args.json else check.render(result))
    return 0 if result["lossless"] else 1


def run_conformance(args: argparse.Namespace) -> int:
    for flag, given in (
        ("--draft", args.draft),
        ("--draft-bits", args.draft_bits),
        ("--block-size", args.block_size),
        ("--prompts", args.prompts),
        ("--num-prompts", args.num_prompts),
        ("--max-tokens", args.max_tokens),
        ("--temp", args.temp or None),
        ("--top-p", None if args.top_p == 1 else args.top_p),
        ("--top-k", args.top_k or None),
        ("--min-p", args.min_p or None),
        ("--tree-budget", args.tree_budget or None),
        ("--tree-top-k", args.tree_top_k),
        ("--width", None if args.width == "full" else args.width),
        ("--ngram", args.ngram or None),
    ):
        if given is not None:
            raise UnsupportedOptionError(f"--conformance checks the target alone, on random tokens; leave out {flag}.")
    path = str(default_target_path(cache_dir())) if args.model in (None, DEFAULT) else args.model
    model, _ = load(path)
    report = conformance.check_model(model, seed=args.seed, progress=not args.json)
    result = conformance.as_dict(report) | {"conforms": report.conforms, "versions": machine.versions()}
    print(json.dumps(result) if args.json else conformance.render(report))
    return 0 if report.conforms else 1


def run_bench_command(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    model, tokenizer, draft = load_speculative_pair(args)
    result = run_bench(
        model,
        tokenizer,
        draft,
        prompts,
        settings=bench_settings(args, draft),
        max_tokens=_max_tokens(args, 128),
        costs=not args.no_costs,
        progress=not args.json,
    )
    result["command"] = "dflash-mlx " + " ".join(sys.argv[1:])
    print(json.dumps(result) if args.json else table(result))
    return 0


def bench_settings(args: argparse.Namespace, draft: DFlashDraft | None) -> list[Setting]:
    """Every block size with every tree budget and every width that the flags list."""
    for flag, one, several in (
        ("--block-size", args.block_size, args.block_sizes),
        ("--tree-budget", args.tree_budget or None, args.tree_budgets),
    ):
        if one is not None and several is not None:
            raise DFlashError(f"{flag} {one} and {flag}s {several} say two things; leave one of them out.")
    sizes: list[int | None] = [args.block_size]
    if args.block_sizes is not None:
        sizes = list(numbers("--block-sizes", args.block_sizes, int))
    elif args.block_size is None and draft is not None and args.tree_budgets is None:
        sizes = [size for size in (4, 8, 16) if size <= draft.block_size] or [draft.block_size]
    budgets = [args.tree_budget] if args.tree_budgets is None else numbers("--tree-budgets", args.tree_budgets, int)
    return [
        Setting(size, budget, args.tree_top_k if budget else None, width, args.ngram)
        for size in sizes
        for budget in budgets
        for width in args.width.split(",")
    ]


def run_demo(args: argparse.Namespace) -> int:
    if not args.prompt.strip():
        raise DFlashError("The prompt is empty; give --prompt some text.")
    model, tokenizer, draft = load_speculative_pair(args)

    def write(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    result = demo.demo(model, tokenizer, draft, args.prompt, max_tokens=args.max_tokens, write=write, **proposing(args))
    print(json.dumps(result) if args.json else "\n\n" + demo.render(result))
    return 0


def run_pairs(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps([asdict(target) for target in known_targets()]))
        return 0
    rows = [("target", "draft", "family", "GB", "checked", "source")]
    for target in known_targets():
        for draft in target.drafts:
            size = "" if draft.gigabytes is None else f"{draft.gigabytes:.1f}"
            rows.append((target.target, draft.draft, draft.family, size, draft.checked, draft.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\n--draft auto takes the first of a target's drafts, for the target, its quantizations and its fine-tunes.")
    print("Checked: the pair, by `dflash-mlx check` and bench; or its structure, on random weights (docs/DRAFTS.md).")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    if args.draft in ("auto", "none"):
        raise DFlashError(
            f"--draft {args.draft} names no draft, since convert knows no target; name a directory, a repository "
            "(`dflash-mlx pairs` lists them) or 'default'."
        )
    source = default_draft_path() if args.draft == DEFAULT else args.draft
    dtype = None if args.dtype is None else getattr(mx, args.dtype)
    convert_draft(source, args.out, dtype=dtype, bits=args.draft_bits)
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    print(f"{args.out}: {size / 1e6:.1f} MB")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    facts = doctor.report(cache_dir())
    print(json.dumps(facts) if args.json else doctor.render(facts))
    return 0
