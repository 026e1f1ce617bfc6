"""--draft auto: a known base under any name is found, anything else is refused, and what was chosen is said."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafts import CONFIG, write_draft
from mlx.utils import tree_flatten
from tiny import LLAMA, build
from tokens import tiny_tokenizer

from dflash_mlx import UnknownPairError, cli, pairs
from dflash_mlx.pairs import KnownDraft, KnownTarget, choose_draft, known_targets


def config_of(target: KnownTarget, nested: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": target.hidden_size or 64, "num_hidden_layers": target.num_layers or 2}
    sizes |= dict(target.facts)
    kind = {"model_type": target.model_types[0]}
    return kind | ({"text_config": sizes} if nested else sizes)


def named(name: str) -> KnownTarget:
    return next(target for target in known_targets() if target.target == name)


def test_the_table_is_whole() -> None:
    targets = known_targets()
    assert len({target.target for target in targets}) == len(targets) > 20
    drafts = [draft for target in targets for draft in target.drafts]
    assert len({draft.draft for draft in drafts}) == len(drafts)
    assert {draft.family for draft in drafts} == {"DFlash 1", "DFlash 2", "Domino"}
    assert all(draft.source and draft.checked in ("pair", "structure") for draft in drafts)
    assert all(target.names and target.model_types and target.drafts for target in targets)
    assert [draft.draft for draft in drafts if draft.checked == "pair"] == ["default"]


@pytest.mark.parametrize("target", known_targets(), ids=lambda target: target.target)
@pytest.mark.parametrize("nested", [False, True])
def test_every_known_target_is_found_by_its_name_and_what_is_made_of_it(target: KnownTarget, nested: bool) -> None:
    config, base = config_of(target, nested), target.target.rpartition("/")[2]
    for name in (
        target.target,
        base,
        f"mlx-community/{base}-4bit",
        f"mlx-community/{base.lower()}-MLX-8bit-dwq",
        f"someone/{base}-SQL-finetune-v2",
        f"/models/my_{base}_lora",
        f"/cache/hub/models--mlx-community--{base}-6bit/snapshots/0123abcd",
        f"{base}/",
    ):
        choice = choose_draft(name, config)
        assert choice.target is target and choice.draft is target.drafts[0]
        assert target.drafts[0].draft in str(choice) and "by the target's name" in str(choice)
    assert all(other.draft in str(choice) for other in target.drafts[1:])


@pytest.mark.parametrize(
    "name",
    ["Qwen3-14B", "Qwen3-4", "qwen3-480b", "Qwen2.5-4B", "xQwen3-8Bx", "Llama-3.2-8B", "gpt-oss", "Kimi-K2", "", "/"],
)
def test_neighbours_of_known_names_are_not_taken_for_them(name: str) -> None:
    with pytest.raises(UnknownPairError, match=r"No draft is known for .*dflash-mlx pairs.*--draft.*train.*--ngram"):
        choose_draft(name, {"model_type": "qwen3", "hidden_size": 1, "num_hidden_layers": 1})


def test_the_longer_of_two_names_counts() -> None:
    coder = named("Qwen/Qwen3-Coder-30B-A3B-Instruct")
    assert choose_draft("Qwen3-Coder-30B-A3B-Instruct-4bit", config_of(coder)).target is coder


def test_a_name_of_two_targets_is_refused() -> None:
    with pytest.raises(UnknownPairError, match=r"may be any of Qwen/Qwen3-4B, Qwen/Qwen3-8B, by the target's name"):
        choose_draft("Qwen3-4B-merged-with-Qwen3-8B", config_of(named("Qwen/Qwen3-8B")))


def test_a_name_that_tells_nothing_leaves_it_to_the_config() -> None:
    eight = named("Qwen/Qwen3-8B")
    choice = choose_draft("/models/latest", config_of(eight))
    assert choice.target is eight and "by its config" in str(choice)
    # Where the table does not know every fact, a config alone says too little: generations of one size look alike.
    for target in known_targets():
        if target.facts:
            assert choose_draft("latest", config_of(target)).target is target
        else:
            with pytest.raises(UnknownPairError, match="No draft is known for 'latest'"):
                choose_draft("latest", config_of(target))


@pytest.mark.parametrize("target", [t for t in known_targets() if t.facts], ids=lambda target: target.target)
def test_a_config_alone_counts_only_when_every_fact_agrees(target: KnownTarget) -> None:
    config = config_of(target)
    for key in config:
        for wrong in ({key: None}, {key: 7}):
            with pytest.raises(UnknownPairError, match="No draft is known for 'latest'"):
                choose_draft("latest", config | wrong)


def test_two_targets_of_one_config_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = named("Qwen/Qwen3-8B")
    monkeypatch.setattr(pairs, "known_targets", lambda: (eight, dataclasses.replace(eight, target="a/twin")))
    with pytest.raises(UnknownPairError, match=r"'latest' may be any of Qwen/Qwen3-8B, a/twin, by its config alone"):
        choose_draft("latest", config_of(eight))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Llama-3.2", "meta-llama/Llama-3.1-8B-Instruct"),
        ("mistralai/Mistral-7B-v0.1", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Embedding", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-VL-8B", "Qwen/Qwen3-8B"),
        ("Qwen3-8B-VL-4bit", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-Reranker-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen3-8B-pruned-6B", "Qwen/Qwen3-8B"),
        ("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B"),
        ("HuggingFaceTB/SmolLM-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("google/gemma-4-31B", "google/gemma-4-31B-it"),
        ("kimi", "moonshotai/Kimi-K2.5"),
    ],
)
def test_a_name_of_another_model_is_refused_whatever_its_config(name: str, target: str) -> None:
    with pytest.raises(UnknownPairError, match=r"No draft is known for|so it may be another model"):
        choose_draft(name, config_of(named(target)))


@pytest.mark.parametrize("model_type", [None, "llama", 3])
@pytest.mark.parametrize("text_config", [[1], "x", None, 3, {}])
def test_a_config_of_any_form_is_no_traceback(text_config: Any, model_type: Any) -> None:
    with pytest.raises(UnknownPairError):
        choose_draft("latest", {"model_type": model_type, "text_config": text_config})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 4095},
        {"num_hidden_layers": 35},
        {"model_type": "llama"},
        {"vocab_size": 32000},
        {"intermediate_size": 11008},
        {"num_attention_heads": 16},
    ],
)
def test_a_name_and_a_config_that_disagree_are_refused_with_both(change: dict[str, Any]) -> None:
    config = config_of(named("Qwen/Qwen3-8B")) | change
    with pytest.raises(UnknownPairError, match="has the name of Qwen/Qwen3-8B but another config") as error:
        choose_draft("Qwen3-8B-pruned", config)
    ((key, value),) = change.items()
    assert f"({key} {value} instead of {config_of(named('Qwen/Qwen3-8B'))[key]})" in str(error.value)


def test_a_fine_tune_may_stretch_its_context() -> None:
    config = config_of(named("Qwen/Qwen3-8B")) | {"max_position_embeddings": 131072}
    assert choose_draft("Qwen3-8B-long", config).target is named("Qwen/Qwen3-8B")


def test_a_directorys_own_name_is_found_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "Qwen3-8B-4bit"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert choose_draft(".", config_of(named("Qwen/Qwen3-8B"))).target.target == "Qwen/Qwen3-8B"


# --- the command line ------------------------------------------------------------------------------------------------


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_pairs_lists_every_draft(capsys) -> None:
    status, out, _ = run(capsys, "pairs")
    lines = out.splitlines()
    assert status == 0 and lines[0].split()[:2] == ["target", "draft"]
    for target in known_targets():
        for draft in target.drafts:
            assert any(line.startswith(target.target) and f" {draft.draft} " in line for line in lines)
    status, out, _ = run(capsys, "pairs", "--json")
    assert status == 0 and [row["target"] for row in json.loads(out)] == [t.target for t in known_targets()]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "Tiny-1B-Instruct-4bit"
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(build("llama", seed=5).parameters())))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    tiny_tokenizer().save_pretrained(str(path))
    return path


def test_auto_says_what_it_chose_and_uses_it(target: Path, tmp_path, monkeypatch, capsys) -> None:
    write_draft(tmp_path / "draft", CONFIG)
    drafts = (KnownDraft(str(tmp_path / "draft"), "DFlash 1", 0.1, "here", "no"), KnownDraft("b", "Domino", 1, "", ""))
    tiny = KnownTarget("tiny/Tiny-1B", ("tiny 1b",), ("llama",), 32, 3, drafts)
    monkeypatch.setattr(cli, "choose_draft", lambda *a: pairs.Choice(tiny, drafts[0], "the target's name"))
    argv = ("generate", "--model", target, "-p", " w4 w5", "-m", 12, "--json")
    status, out, err = run(capsys, *argv, "--draft", "auto")
    assert status == 0 and json.loads(out)["speculation"]["target_forwards"] > 1
    assert (
        f"--draft auto: {tmp_path / 'draft'} (DFlash 1), made for tiny/Tiny-1B, by the target's name; also known: b"
        in err
    )
    assert json.loads(run(capsys, *argv, "--draft", tmp_path / "draft")[1])["text"] == json.loads(out)["text"]


def test_auto_by_the_config_alone_says_so(target: Path, tmp_path, monkeypatch, capsys) -> None:
    write_draft(tmp_path / "draft", CONFIG)
    facts = tuple((key, LLAMA[key]) for key in ("vocab_size", "intermediate_size", "num_attention_heads"))
    drafts = (KnownDraft(str(tmp_path / "draft"), "DFlash 1", 0.1, "here", "no"),)
    other = KnownTarget("some/Thing-1B", ("thing 1b",), ("llama",), 32, 3, drafts, facts)
    monkeypatch.setattr(pairs, "known_targets", lambda: (other,))
    named_nothing = tmp_path / "latest"
    named_nothing.symlink_to(target)
    shutil.copytree(target, tmp_path / "current")
    argv = ("generate", "-p", " w4 w5", "-m", 4, "--draft", "auto", "--model")
    status, _, err = run(capsys, *argv, tmp_path / "current")
    assert status == 0 and "by its config alone, since its name 'current' says nothing" in err
    assert run(capsys, *argv, named_nothing)[0] == 2  # a link to Tiny-1B is Tiny-1B, another model


def test_auto_without_a_known_draft_says_so_and_offers_ngrams(target: Path, capsys) -> None:
    for command in ("generate", "check", "bench", "demo"):
        status, out, err = run(capsys, command, "--model", target, "--draft", "auto")
        assert status == 2 and not out
        assert "No draft is known for 'Tiny-1B-Instruct-4bit'" in err and "use --ngram" in err
