"""A draft written to disk is the draft that was read; quantizing and types mean the same on load and on disk."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from domino import EXPORTS, said
from domino import write as write_domino
from drafts import CONFIG, along, dflash2, domino, write_draft
from mlx.utils import tree_flatten
from test_draft_checkpoint import V0, quantized_checkpoint
from test_draft_checkpoint import forward as forward_64
from test_draft_heads import pruned_draft
from test_draft_published import published, speculators
from tiny import LLAMA, build
from tokens import tiny_tokenizer

from dflash_mlx import cli, load_draft
from dflash_mlx.draft import DFlashDraft, convert_draft, save_draft
from dflash_mlx.errors import CheckpointError, UnsupportedOptionError
from dflash_mlx.machine import has_bfloat16

KINDS = {"DFlash 1": CONFIG, "DFlash 2": dflash2(), "Domino": domino(CONFIG)}


def logits(draft: DFlashDraft) -> mx.array:
    drafted, _ = said(draft)
    return drafted.logits if drafted.correction is None else along(drafted, [1] * drafted.num_positions)


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_written_and_read_again_it_says_the_same(tmp_path: Path, kind: str, bits: int | None) -> None:
    write_draft(tmp_path / "a", KINDS[kind])
    convert_draft(tmp_path / "a", tmp_path / "b", bits=bits, group_size=32)
    there = load_draft(tmp_path / "b", dtype=mx.float32)
    assert isinstance(there.kv_proj, nn.QuantizedLinear) == (bits is not None)
    assert mx.array_equal(logits(there), logits(load_draft(tmp_path / "a", bits=bits, group_size=32)))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config.pop("quantization", None) == (None if bits is None else {"group_size": 32, "bits": bits})
    assert config == json.loads((tmp_path / "a" / "config.json").read_text())
    # And a second time, from what was written.
    convert_draft(tmp_path / "b", tmp_path / "c")
    assert mx.array_equal(logits(load_draft(tmp_path / "c", dtype=mx.float32)), logits(there))


def test_an_unquantized_draft_keeps_every_published_tensor(tmp_path: Path) -> None:
    for name, raw in KINDS.items():
        weights = write_draft(tmp_path / name / "a", raw)
        convert_draft(tmp_path / name / "a", tmp_path / name / "b")
        written = mx.load(str(tmp_path / name / "b" / "model.safetensors"))
        assert written.keys() == weights.keys()
        assert all(mx.array_equal(written[key], weights[key]) for key in weights)


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16])
def test_types_on_disk_stay_as_they_are_or_become_what_was_asked(tmp_path: Path, stored: mx.Dtype) -> None:
    weights = {name: x.astype(stored) for name, x in write_draft(tmp_path / "a").items()}
    mx.save_safetensors(str(tmp_path / "a" / "model.safetensors"), weights)
    convert_draft(tmp_path / "a", tmp_path / "kept")
    convert_draft(tmp_path / "a", tmp_path / "float32", dtype=mx.float32)
    convert_draft(tmp_path / "a", tmp_path / "quantized", bits=4, group_size=32)
    for name, dtype in (("kept", stored), ("float32", mx.float32), ("quantized", stored)):
        arrays = mx.load(str(tmp_path / name / "model.safetensors"))
        assert {x.dtype for x in arrays.values()} - {mx.uint32} == {dtype}
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("kept", "float32", "quantized")}
    assert sizes["quantized"] < 0.6 * sizes["kept"] < 0.4 * sizes["float32"]


def test_packagings_with_a_vocabulary_of_their_own_keep_it(tmp_path: Path) -> None:
    pruned = pruned_draft(tmp_path / "a")
    convert_draft(tmp_path / "a", tmp_path / "b")
    again = load_draft(tmp_path / "b")
    assert mx.array_equal(again.token_ids, pruned.token_ids) and mx.array_equal(logits(again), logits(pruned))
    speculators(tmp_path / "c", *published("qwen3"))
    convert_draft(tmp_path / "c", tmp_path / "d", bits=8, group_size=32)
    there, here = load_draft(tmp_path / "d", dtype=mx.float32), load_draft(tmp_path / "c", bits=8, group_size=32)
    assert mx.array_equal(there.token_ids, here.token_ids) and there.config == here.config
    here, there = (dict(tree_flatten(x.parameters())) for x in (here, there))
    assert here.keys() == there.keys() and all(mx.array_equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize("name", EXPORTS)
def test_every_domino_export_is_kept(tmp_path: Path, name: str) -> None:
    write_domino(tmp_path / "a", EXPORTS[name])
    convert_draft(tmp_path / "a", tmp_path / "b")
    tokens = list(EXPORTS[name].tokens or range(97))[:8]
    here, there = (said(load_draft(tmp_path / x))[0] for x in "ab")
    assert mx.array_equal(along(here, tokens[: here.num_positions]), along(there, tokens[: there.num_positions]))


def test_a_draft_quantized_in_parts_is_kept(tmp_path: Path) -> None:
    quantized_checkpoint(tmp_path / "a", {V0: {"group_size": 32, "bits": 6}, "fc": False})
    convert_draft(tmp_path / "a", tmp_path / "b")
    assert mx.array_equal(forward_64(load_draft(tmp_path / "b")), forward_64(load_draft(tmp_path / "a")))


def test_what_chooses_tokens_is_not_quantized(tmp_path: Path) -> None:
    for name in ("DFlash 2", "Domino"):
        write_draft(tmp_path / name, KINDS[name])
        draft = load_draft(tmp_path / name, bits=4, group_size=32)
        quantized = {part for part, module in draft.named_modules() if isinstance(module, nn.QuantizedLinear)}
        assert {"fc", "kv_proj", "layers.1.mlp.gate_proj"} <= quantized
        assert "layers.1.mlp.down_proj" not in quantized  # 48 columns are no whole groups of 32
        assert not any(part.startswith(("domino", "candidate_selector")) for part in quantized)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_draft(tmp_path / "a")
    before = (tmp_path / "a" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists and is not an empty directory; name a new one"):
        convert_draft(tmp_path / "a", tmp_path / "a", bits=4, group_size=32)
    with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
        save_draft(tmp_path / "a" / "config.json", load_draft(tmp_path / "a"), CONFIG)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == before
    (tmp_path / "empty").mkdir()
    convert_draft(tmp_path / "a", tmp_path / "empty")
    assert load_draft(tmp_path / "empty").block_size == 8


def test_quantizing_twice_is_refused(tmp_path: Path) -> None:
    write_draft(tmp_path / "a")
    convert_draft(tmp_path / "a", tmp_path / "b", bits=8, group_size=32)
    with pytest.raises(UnsupportedOptionError, match="quantized already, at 8 bits"):
        load_draft(tmp_path / "b", bits=4)
    with pytest.raises(UnsupportedOptionError, match="to 5 bits in groups of 64"):
        load_draft(tmp_path / "a", bits=5)


@pytest.mark.parametrize(
    ("on_cpu", "architecture", "native"),
    [
        (True, "", False),
        (True, "applegpu_g16s", False),
        (False, "applegpu_g13g", False),  # M1
        (False, "applegpu_g14s", False),  # M2
        (False, "applegpu_g15d", True),  # M3
        (False, "applegpu_g16p", True),
        (False, "applegpu_g17s", True),
        (False, "sm_90", True),
        (False, "", True),
    ],
)
def test_which_devices_have_bfloat16(on_cpu: bool, architecture: str, native: bool) -> None:
    assert has_bfloat16(on_cpu, architecture) == native


def test_quantized_activations_are_float32_on_the_cpu(tmp_path: Path) -> None:
    weights = {name: x.astype(mx.bfloat16) for name, x in write_draft(tmp_path).items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    draft = load_draft(tmp_path, bits=8, group_size=32)
    wanted = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    assert draft.dtype == wanted and draft.fc.scales.dtype == wanted and logits(draft).dtype == mx.float32


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a draft of widths that 64 divides."""
    root, sizes = tmp_path_factory.mktemp("pair"), {"hidden_size": 64, "intermediate_size": 128}
    config = LLAMA | sizes
    (root / "target").mkdir()
    weights = dict(tree_flatten(build("llama", config, seed=5).parameters()))
    mx.save_safetensors(str(root / "target" / "model.safetensors"), weights)
    (root / "target" / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tiny_tokenizer().save_pretrained(str(root / "target"))
    write_draft(root / "draft", CONFIG | sizes | {"head_dim": 16})
    return root / "target", root / "draft"


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_draft_bits_change_no_output(pair, capsys):
    target, draft = pair
    argv = ("generate", "--model", target, "--draft", draft, "-p", " w4 w5", "-m", 15, "--json")
    plain = json.loads(run(capsys, *argv)[1])
    for bits in (4, 8):
        status, out, _ = run(capsys, *argv, "--draft-bits", bits)
        assert status == 0 and json.loads(out)["text"] == plain["text"]
    for bits in (0, 3, 5, 7, 16):  # the API takes more than the flag
        status, out, err = run(capsys, *argv, "--draft-bits", bits)
        assert (status, out) == (2, "") and f"--draft-bits {bits} is neither 4 nor 8" in err
    argv = ("generate", "--model", target, "-p", " w4", "-m", 3)
    status, _, err = run(capsys, *argv, "--draft-bits", 4)
    assert status == 2 and "--draft-bits 4 needs a draft; name one with --draft" in err


@pytest.mark.parametrize("command", ["check", "bench", "demo"])
def test_every_command_with_a_draft_takes_draft_bits(pair, capsys, tmp_path, command):
    target, draft = pair
    (tmp_path / "prompts").write_text("w4 w5\n")
    argv = [command, "--model", target, "--draft", draft, "--draft-bits", 8, "-m", 8, "--json"]
    argv += ["-p", "w4 w5"] if command == "demo" else ["--prompts", tmp_path / "prompts"]
    argv += ["--no-costs", "--block-sizes", "4"] if command == "bench" else []
    status, out, _ = run(capsys, *argv)
    assert status == 0 and json.loads(out)


def test_convert_writes_what_draft_then_reads(pair, capsys, tmp_path):
    target, draft = pair
    status, out, _ = run(capsys, "convert", "--draft", draft, "--out", tmp_path / "q", "--draft-bits", 4)
    assert status == 0 and out.startswith(str(tmp_path / "q")) and out.rstrip().endswith("MB")
    argv = ("generate", "--model", target, "-p", " w4 w5", "-m", 15, "--json", "--draft")
    converted, on_load = (
        json.loads(run(capsys, *argv, *of)[1]) for of in ([tmp_path / "q"], [draft, "--draft-bits", 4])
    )
    assert converted["speculation"]["target_forwards"] == on_load["speculation"]["target_forwards"]
    status, _, err = run(capsys, "convert", "--draft", draft, "--out", tmp_path / "q")
    assert status == 2 and "name a new one" in err
    for name in ("auto", "none"):
        status, _, err = run(capsys, "convert", "--draft", name, "--out", tmp_path / "x")
        assert status == 2 and f"--draft {name} names no draft" in err and err.count("\n") == 1
    status, _, err = run(capsys, "convert", "--draft", tmp_path / "none", "--out", tmp_path / "x")
    assert status == 2 and "neither a local directory nor a reachable model repository" in err


def test_a_draft_too_narrow_for_draft_bits_is_told_what_helps(pair, capsys, tmp_path):
    write_draft(tmp_path / "narrow")  # 32 columns, groups of 64
    status, _, err = run(capsys, "convert", "--draft", tmp_path / "narrow", "--out", tmp_path / "x", "--draft-bits", 4)
    assert status == 2 and "leave out bits (--draft-bits)" in err and not (tmp_path / "x").exists()
