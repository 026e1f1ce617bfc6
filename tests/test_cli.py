"""The command line: one sentence for bad input, one JSON line where asked, and exit statuses that mean something."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from drafts import CONFIG, write_draft
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache, save_prompt_cache
from tiny import LLAMA, build
from tokens import tiny_tokenizer

from dflash_mlx import cli
from dflash_mlx.cache.kv import KVBlock


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft directory."""
    root = tmp_path_factory.mktemp("pair")
    target = root / "target"
    target.mkdir()
    model = build("llama", seed=5)
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (target / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    tiny_tokenizer().save_pretrained(str(target))
    write_draft(root / "draft")
    return str(target), str(root / "draft")


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in argv])
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if not line.startswith("Note: ")]  # about this machine's speed
    return status, captured.out, "\n".join(errors)


def test_generate_prints_what_mlx_lm_prints(pair, capsys):
    target, draft = pair
    model, tokenizer = mlx_lm.load(target)
    expected = mlx_lm.generate(model, tokenizer, " w4 w5", max_tokens=20)
    argv = ("generate", "--model", target, "--prompt", " w4 w5", "-m", "20", "--verbose", "F")
    status, out, err = run(capsys, *argv, "--draft", draft)
    assert status == 0 and out == expected + "\n"
    # mlx_lm.generate's own flag means the same; without a draft it says that speculation is not running.
    assert run(capsys, *argv, "--draft-model", draft, "--num-draft-tokens", "2")[1] == expected + "\n"
    status, out, err = run(capsys, *argv)
    assert status == 0 and out == expected + "\n" and "Speculation is not running" in err


def test_generate_json_is_one_line(pair, capsys):
    target, draft = pair
    argv = ("generate", "--model", target, "--draft", draft, "-p", " w4 w5", "-m", 15, "--json", "--block-size", 4)
    status, out, _ = run(capsys, *argv)
    result = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert result["generation_tokens"] == 15 and result["finish_reason"] == "length"
    assert result["speculation"]["max_width"] == 4 and result["speculation"]["target_forwards"] > 1


def test_sampled_output_repeats_with_its_seed(pair, capsys):
    target, draft = pair
    argv = (
        "generate",
        "--model",
        target,
        "--draft",
        draft,
        "-p",
        " w4",
        "-m",
        20,
        "--verbose",
        "F",
        "--temp",
        1,
        "--seed",
        5,
    )
    assert run(capsys, *argv)[1] == run(capsys, *argv)[1]


def test_prompt_cache_file(pair, capsys, tmp_path):
    target, draft = pair
    model, tokenizer = mlx_lm.load(target)
    cache = make_prompt_cache(model)
    prefix, suffix = tokenizer.encode(" w4 w5 w7 w8"), tokenizer.encode(" w10")
    model(mx.array([prefix]), cache=cache)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), cache, {"model": target, "tokenizer_config": "{}"})
    argv = ("generate", "--prompt-cache-file", file, "--draft", draft, "-p", " w10", "-m", 12, "--verbose", "F")
    assert run(capsys, *argv)[1] == mlx_lm.generate(model, tokenizer, prefix + suffix, max_tokens=12) + "\n"
    status, _, err = run(capsys, *argv, "--model", draft)
    assert status == 2 and "is not the model of" in err


def test_check_and_bench(pair, capsys, tmp_path):
    target, draft = pair
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(" w4 w5\n w7\n\n w8 w10 w11\n")
    common = ("--model", target, "--draft", draft, "--prompts", prompts, "-m", 20, "--json")
    status, out, _ = run(capsys, "check", *common)
    assert status == 0 and json.loads(out)["lossless"] and json.loads(out)["prompts"] == 3
    status, out, _ = run(capsys, "check", *common, "--temp", 1, "--top-p", 0.9)
    assert status == 0 and json.loads(out)["mode"] == "sampling"
    assert run(capsys, "check", *common[:-1])[1].startswith("LOSSLESS")


def test_doctor(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert status == 0 and facts["device"] in ("cpu", "gpu") and facts["matmul_gflops"] > 0
    assert "versions" in run(capsys, "doctor")[1]


BAD = {
    "temperature -1": ("--temp", -1),
    "--top-p 1.5": ("--top-p", 1.5),
    "--top-p 0": ("--top-p", 0),
    "max_tokens is 0": ("-m", 0),
    "max_tokens is -3": ("-m", -3),
    "prompt is empty": ("-p", ""),
    "block_size 0": ("--block-size", 0),
    "block_size 9": ("--block-size", 9),
    "no/such/draft": ("--draft", "no/such/draft"),
    "cannot be read": ("--prompt-cache-file", "nowhere.safetensors"),
    "--adapter-path no/such/adapter": ("--adapter-path", "no/such/adapter"),
    "--image": ("--image", "a.png"),
}


@pytest.mark.parametrize("match", BAD)
def test_bad_input_is_one_sentence_and_status_2(pair, capsys, match):
    target, draft = pair
    status, out, err = run(capsys, "generate", "--model", target, "--draft", draft, "-p", " w4", *BAD[match])
    assert status == 2 and out == "" and match in err and "\n" not in err and "Traceback" not in err


def test_draft_and_target_mixed_up(pair, capsys, tmp_path):
    """Case 18, and case 25: a draft that cannot be loaded is an error, never plain decoding in silence."""
    target, _ = pair
    status, _, err = run(capsys, "generate", "--model", target, "--draft", target, "-p", " w4")
    assert status == 2 and "not a DFlash draft" in err
    write_draft(tmp_path, CONFIG | {"hidden_size": 64})
    status, _, err = run(capsys, "generate", "--model", target, "--draft", tmp_path, "-p", " w4")
    assert status == 2 and "hidden_size is 64" in err and "hidden_size is 32" in err
    for command in ("check", "bench", "demo"):
        status, _, err = run(capsys, command, "--model", target)
        assert status == 2 and "--draft" in err


def test_module_and_help_run_as_programs():
    done = subprocess.run([sys.executable, "-m", "dflash_mlx", "generate", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for flag in ("--draft", "--block-size", "--json", "--prompt-cache-file", "--kv-bits", "--xtc-probability"):
        assert flag in done.stdout


def test_check_conformance_of_a_target_alone(pair, capsys, monkeypatch):
    target, draft = pair
    argv = ("check", "--conformance", "--model", target)
    status, out, _ = run(capsys, *argv)
    assert status == 0 and out.startswith("CONFORMS: chains pass, trees pass\n  caches: KVCache\n")
    assert all(f"  {name}: pass, largest difference" in out for name in ("greedy", "rollback", "taps", "tree"))
    status, out, err = run(capsys, *argv, "--json")
    result = json.loads(out)
    assert status == 0 and out.count("\n") == 1 and not err
    assert result["conforms"] and (result["chain"], result["tree"]) == ("pass", "pass") and result["versions"]
    status, _, err = run(capsys, *argv, "--draft", draft)
    assert status == 2 and "leave out --draft" in err
    status, _, err = run(capsys, *argv, "--tree-budget", 4)
    assert status == 2 and "leave out --tree-budget" in err
    # A row too many stays in the cache: seen, and said by the exit status.
    commit = KVBlock.commit
    monkeypatch.setattr(KVBlock, "commit", lambda self, path: commit(self, (*path, len(path))))
    status, out, _ = run(capsys, *argv)
    assert status == 1 and out.startswith("DOES NOT CONFORM") and "rollback: FAIL" in out


@pytest.mark.parametrize(
    "flags",
    [
        ("--tree-budget", 12, "--tree-top-k", 4),
        ("--width", "auto"),
        ("--tree-budget", 12, "--width", 0.05, "--ngram"),
        ("--ngram",),
        ("--hint", " w4 w5 w7"),
    ],
)
def test_flags_of_proposals_change_no_text(pair, tmp_path, capsys, flags):
    target, draft = pair
    model, tokenizer = mlx_lm.load(target)
    expected = mlx_lm.generate(model, tokenizer, " w4 w5", max_tokens=20)
    argv = ("generate", "--model", target, "--prompt", " w4 w5", "-m", "20", "--verbose", "F", *flags)
    assert run(capsys, *argv, "--draft", draft) == (0, expected + "\n", "")
    if flags[0] in ("--ngram", "--hint"):
        assert run(capsys, *argv) == (0, expected + "\n", "")
        (tmp_path / "hint.txt").write_text(expected)
        assert run(capsys, *argv, "--hint", f"@{tmp_path}/hint.txt") == (0, expected + "\n", "")
        status, _, err = run(capsys, *argv, "--hint", f"@{tmp_path}/none.txt")
        assert status == 2 and "cannot be read" in err and err.count("\n") == 0
    else:
        status, _, err = run(capsys, *argv)
        assert status == 2 and "needs a draft" in err
    if "--hint" not in flags:
        checked = ("check", "--model", target, "--num-prompts", 2, "-m", 12, "--json", *flags)
        assert json.loads(run(capsys, *checked, "--draft", draft)[1])["lossless"]


def test_bench_compares_lists_of_budgets_and_widths(pair, capsys):
    target, draft = pair
    argv = ("bench", "--model", target, "--draft", draft, "--num-prompts", 1, "-m", 12, "--no-costs", "--json")
    status, out, _ = run(capsys, *argv, "--tree-budgets", "0,6", "--width", "full,auto")
    rows = json.loads(out)["settings"]
    assert status == 0 and [(r["tree_budget"], r["width"]) for r in rows] == [
        (0, "full"),
        (0, "auto"),
        (6, "full"),
        (6, "auto"),
    ]
    assert all(r["identical"] == 1 for r in rows)


@pytest.mark.parametrize(
    ("match", "argv"),
    [
        ("--max-tokens is -5", ("check", "-m", -5)),
        ("--max-tokens is 0", ("bench", "-m", 0)),
        ("have no effect at --temp 0", ("check", "--top-p", 0.5)),
        ("leave out --top-k", ("check", "--conformance", "--top-k", 3)),
        ("leave out --width", ("check", "--conformance", "--width", "bogus")),
        ("say two things", ("bench", "--block-size", 4, "--block-sizes", "4,8")),
        ("say two things", ("bench", "--tree-budget", 4, "--tree-budgets", "4,8")),
        ("num_draft_tokens 1 means", ("generate", "-p", "x", "--num-draft-tokens", 1, "--block-size", 8)),
        ("--seed -1", ("generate", "-p", "x", "--seed", -1)),
        ("--seed 99999999999999999999", ("generate", "-p", "x", "--seed", "99999999999999999999")),
        ("--seed -1", ("check", "--seed", -1)),
        ("--seed 18446744073709551616", ("check", "--seed", 2**64)),
        ("--seed -7", ("check", "--conformance", "--seed", -7)),
        ("--tree-top-k 4 needs a tree", ("bench", "--tree-top-k", 4)),
        ("--tree-top-k 4 needs a tree", ("bench", "--tree-top-k", 4, "--tree-budgets", "0")),
        ("--tree-top-k 4 needs a tree", ("check", "--tree-top-k", 4)),
        ("--tree-top-k 4 needs a tree", ("demo", "--tree-top-k", 4)),
    ],
)
def test_flags_that_mean_nothing_are_refused(pair, capsys, match, argv):
    target, draft = pair
    draft = () if "--conformance" in argv else ("--draft", draft)
    status, _, err = run(capsys, argv[0], "--model", target, *draft, *argv[1:])
    assert status == 2 and match in err and err.count("\n") == 0


def test_flags_without_a_draft_are_refused(pair, capsys):
    target, _ = pair
    for argv in (
        ("generate", "-p", " w4", "--num-draft-tokens", 4),
        ("bench", "--ngram", "--width", "auto", "--num-prompts", 1, "-m", 4),
    ):
        status, _, err = run(capsys, argv[0], "--model", target, "--draft", "none", *argv[1:])
        assert status == 2 and "draft" in err.splitlines()[-1]


def test_prompt_cache_of_the_api_is_taken_with_a_model_name(pair, tmp_path, capsys):
    target, draft = pair
    model, _ = mlx_lm.load(target)
    cache = make_prompt_cache(model)
    model(mx.array([[5, 7]]), cache=cache)
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(str(file), cache)
    argv = ("generate", "--prompt-cache-file", file, "-p", " w4", "-m", 4, "--draft", draft)
    status, _, err = run(capsys, *argv)
    assert status == 2 and "name it with --model" in err
    assert run(capsys, *argv, "--model", target)[0] == 0


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("flag", ["--draft", "--model"])
@pytest.mark.parametrize(
    "command", [("generate", "-p", "x"), ("check",), ("bench",), ("demo",), ("convert",), ("train", "fit")]
)
def test_an_empty_name_is_refused_in_every_command(pair, capsys, tmp_path, command, flag, value):
    """Case 25: an unset shell variable; never plain decoding, nor the default draft, in silence."""
    target, _ = pair
    if command[0] == "convert":
        if flag == "--model":
            pytest.skip("convert has no target")
        argv = (*command, "--out", tmp_path / "out")
    else:
        argv = (*command, *(("--model", target) if flag == "--draft" else ()))
        argv += ("--data", tmp_path, "--out", tmp_path / "out") if command[0] == "train" else ()
    status, out, err = run(capsys, *argv, flag, value)
    assert (status, out) == (2, "") and f"{flag} is {value!r}" in err and "leave it out" in err and "\n" not in err


@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("check",), ("bench",), ("check", "--conformance")])
def test_case_18_a_draft_given_as_the_target_says_so(pair, capsys, command):
    _, draft = pair
    named = () if "--conformance" in command else ("--draft", draft)
    status, out, err = run(capsys, *command, "--model", draft, *named)
    assert (status, out) == (2, "") and f"{draft} holds a DFlash draft; give it with --draft" in err
    assert "\n" not in err


def test_a_prompt_cache_of_another_kind_of_model_is_one_sentence(pair, capsys, tmp_path):
    target, draft = pair
    caches = [ArraysCache(2) for _ in range(3)]
    for cache in caches:
        cache[0], cache[1] = mx.zeros((1, 3, 4)), mx.zeros((1, 2, 4, 4))
    save_prompt_cache(str(tmp_path / "c.safetensors"), caches)
    argv = ("generate", "--model", target, "-p", " w4", "-m", 4, "--prompt-cache-file", tmp_path / "c.safetensors")
    for proposals in (("--draft", draft), ("--draft", "none"), ("--ngram",)):
        status, out, err = run(capsys, *argv, *proposals)
        assert (status, out) == (2, "") and "holds a ArraysCache of 2 at 0" in err and "\n" not in err


def test_answers_of_one_round_have_no_acceptance(pair, capsys, tmp_path):
    target, draft = pair
    (tmp_path / "prompts").write_text(" w4 w5\n w7\n")
    prompts = ("--prompts", tmp_path / "prompts")
    argv = ("bench", "--model", target, "--draft", draft, "-m", 1, *prompts)
    status, out, _ = run(capsys, *argv, "--no-costs", "--json", "--block-sizes", "2,4")
    rows = json.loads(out)["settings"]
    assert status == 0 and len(rows) == 2
    for row in rows:
        assert row["identical"] == 2 and row["acceptance_by_position"] == []
        assert row["acceptance_length"] is row["mean_width"] is row["accepted_of_proposed"] is None
        assert row["acceptance_length_by_kind"] == {"own": None}
    status, out, _ = run(capsys, *argv, "--no-costs", "--block-sizes", "4")
    assert status == 0 and "| – | – | – | 2/2 |" in out
    status, out, _ = run(capsys, "bench", "--model", target, "--draft", "none", "--ngram", "-m", 1, *prompts, "--json")
    assert status == 0 and json.loads(out)["settings"][0]["acceptance_length"] is None
    demo = ("demo", "--model", target, "--draft", draft, "-p", " w4", "-m", 1)
    status, out, _ = run(capsys, *demo)
    assert status == 0 and "nothing drafted · outputs identical" in out
    assert json.loads(run(capsys, *demo, "--json")[1])["acceptance_length"] is None


def test_bench_measures_the_parts_of_a_round_of_any_block_and_of_one_prompt(pair, capsys, tmp_path):
    target, draft = pair
    (tmp_path / "prompts").write_text(" w4 w5\n")
    argv = ("bench", "--model", target, "--draft", draft, "-m", 12, "--prompts", tmp_path / "prompts", "--json")
    for flags in (("--block-size", 4), ("--tree-budgets", "0,6")):
        status, out, _ = run(capsys, *argv, *flags)
        assert status == 0 and json.loads(out)["settings"][0]["overhead"] > 0


def test_proposal_flags_without_a_draft_name_the_flag_that_helps(pair, capsys):
    target, _ = pair
    for flags in (("--width", "auto"), ("--width", "auto", "--ngram"), ("--tree-budget", 4)):
        status, _, err = run(capsys, "generate", "--model", target, "--draft", "none", "-p", " w4", *flags)
        assert status == 2 and "give draft_model (--draft)" in err and "\n" not in err
