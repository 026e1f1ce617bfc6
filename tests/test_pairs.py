"""--draft auto: a known base under any name is found, anything else is refused, and what was chosen is said."""

from __future__ import annotations

import json
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
    # Two generations of one size cannot be told apart by their configs.
    with pytest.raises(UnknownPairError, match=r"'latest' may be any of Qwen/Qwen3.5-27B, Qwen/Qwen3.6-27B, .*config"):
        choose_draft("latest", config_of(named("Qwen/Qwen3.6-27B")))
    # Where the table does not know the sizes a kind alone says too little.
    with pytest.raises(UnknownPairError, match="No draft is known for 'latest'"):
        choose_draft("latest", config_of(named("MiniMaxAI/MiniMax-M2.5")))


@pytest.mark.parametrize("change", [{"hidden_size": 4095}, {"num_hidden_layers": 35}, {"model_type": "llama"}])
def test_a_name_and_a_config_that_disagree_are_refused_with_both(change: dict[str, Any]) -> None:
    config = config_of(named("Qwen/Qwen3-8B")) | change
    with pytest.raises(UnknownPairError, match="has the name of Qwen/Qwen3-8B but another config") as error:
        choose_draft("Qwen3-8B-pruned", config)
    assert all(str(value) in str(error.value) for value in (*change.values(), "('qwen3', 4096, 36)"))


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


def test_auto_without_a_known_draft_says_so_and_offers_ngrams(target: Path, capsys) -> None:
    for command in ("generate", "check", "bench", "demo"):
        status, out, err = run(capsys, command, "--model", target, "--draft", "auto")
        assert status == 2 and not out
        assert "No draft is known for 'Tiny-1B-Instruct-4bit'" in err and "use --ngram" in err
