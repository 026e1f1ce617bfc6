"""Training: many anchors at once are one forward each, runs resume exactly, what is written loads and is the same."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from drafts import CONFIG, domino, random_draft, write_draft
from mlx.utils import tree_flatten
from tiny import LLAMA, build
from tokens import tiny_tokenizer

from dflash_mlx import cli
from dflash_mlx.draft import load_draft
from dflash_mlx.errors import DFlashError
from dflash_mlx.train.blocks import block_hidden
from dflash_mlx.train.data import ANSWER, PADDING, TEMPLATE, USER, Shard, StoredHidden, data_files, read_shard
from dflash_mlx.train.fit import (
    Settings,
    TargetSide,
    Trainer,
    corrected,
    evaluate,
    make_batch,
    slots_hidden,
    tokens_before,
    vocabulary_of,
)
from dflash_mlx.train.start import draft_config, from_target, with_domino, with_vocabulary
from dflash_mlx.train.writer import answer, converse

SMALL = Settings(num_steps=6, batch_size=2, num_anchors=5, vocabulary=40, warmup_steps=2, distillation=0.5)
TEMPLATE_TEXT = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"


def conversations(num_rows: int = 6, length: int = 40, seed: int = 0) -> Shard:
    rng = np.random.default_rng(seed)
    role = np.full((num_rows, length), ANSWER, np.int8)
    role[:, :6] = TEMPLATE
    role[1, length - 9 :] = PADDING
    role[2, 20:26] = USER
    return Shard(rng.integers(3, 97, (num_rows, length)).astype(np.int32), role)


def templated_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.chat_template = TEMPLATE_TEXT
    return type(tokenizer)(tokenizer._tokenizer)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target's directory with a chat template."""
    path = tmp_path_factory.mktemp("target")
    model = build("llama", seed=5)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    templated_tokenizer().save_pretrained(str(path))
    return path


# The forward over many anchors


SLIDING = CONFIG | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@pytest.mark.parametrize("raw", [CONFIG, SLIDING, SLIDING | {"is_causal": True}])
def test_a_forward_over_many_anchors_is_one_forward_each(raw):
    draft, model = random_draft(raw), build("llama", seed=5)
    mx.random.seed(1)
    hidden = mx.random.normal((2, 30, 64))
    ids = mx.random.randint(5, 97, (2, 30))
    anchors = mx.array([[1, 2, 14, 29], [5, 6, 20, 28]])
    inputs = TargetSide(model, draft, np.arange(97)).inputs(ids, anchors)
    together = block_hidden(draft, inputs, hidden, anchors).reshape(2, 4, 8, -1)
    for row in range(2):
        for number, anchor in enumerate(anchors[row].tolist()):
            context = draft.make_context()
            draft.extend(context, hidden[row : row + 1, :anchor])
            block = mx.array([[ids[row, anchor].item()] + [4] * 7])
            alone = draft(model.model.embed_tokens(block), context)[0]
            # Summed in another order.
            assert mx.allclose(together[row, number], alone, atol=2e-5), (row, anchor)


def test_anchors_stand_before_answers_and_blocks_end_with_them():
    shard = conversations()
    vocabulary = vocabulary_of(shard, 50)
    batch = make_batch(shard, range(6), vocabulary, 8, 12, 3.0, np.random.default_rng(0))
    assert (batch.anchors >= 1).all()
    for row, slots in enumerate(batch.anchors):
        for number, anchor in enumerate(slots):
            within = True
            for k in range(1, 8):
                within = within and anchor + k < 40 and shard.role[row, anchor + k] == ANSWER
                weight = batch.weights[row, number, k - 1]
                token = shard.ids[row, anchor + k] if within else -1
                known = within and token in vocabulary
                assert weight == pytest.approx(np.exp(-(k - 1) / 3.0) if known else 0.0)
                assert not known or vocabulary[batch.labels[row, number, k - 1]] == token


# Training


def trainer(settings=SMALL, stored=None, shard=None) -> Trainer:
    return Trainer(
        build("llama", seed=5), random_draft(), conversations() if shard is None else shard, settings, stored
    )


def parameters(draft) -> dict:
    return {name: np.array(array) for name, array in tree_flatten(draft.parameters())}


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    whole = trainer()
    losses = list(whole.run())
    first = trainer()
    list(first.run(2))
    first.save(tmp_path)
    second = trainer()
    assert second.resume(tmp_path) and second.step == 2
    assert list(second.run()) == losses[2:]
    mine, other = parameters(whole.draft), parameters(second.draft)
    assert all((mine[name] == other[name]).all() for name in mine)


def test_a_longer_run_goes_on_from_a_shorter_one_and_other_settings_are_refused(tmp_path):
    short = trainer()
    list(short.run())
    short.save(tmp_path)
    longer = trainer(Settings(**{**SMALL.__dict__, "num_steps": 9}))
    assert longer.resume(tmp_path) and len(list(longer.run())) == 3
    with pytest.raises(DFlashError, match=r"muon_rate 0\.04, not 0\.1"):
        trainer(Settings(**{**SMALL.__dict__, "muon_rate": 0.1})).resume(tmp_path)


def test_training_lowers_the_loss():
    fast = Settings(num_steps=60, batch_size=6, num_anchors=20, vocabulary=97, warmup_steps=2, muon_rate=0.02)
    losses = list(trainer(fast).run())
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_an_exported_draft_loads_and_gives_the_trained_logits(tmp_path):
    trained = trainer()
    list(trained.run(3))
    trained.export(tmp_path, CONFIG, {"why": "test"}, dtype=mx.float32)
    loaded = load_draft(tmp_path)
    ids, anchors = mx.array(conversations().ids[:1]), mx.array([[9, 17]])
    hidden, _ = trained.target.hidden(ids)
    out = block_hidden(trained.draft, trained.target.inputs(ids, anchors), hidden / trained.scale, anchors)
    expected = trained.target.logits(out).reshape(2, 8, -1)
    anatomy = build("llama", seed=5)
    for number, anchor in enumerate((9, 17)):
        context = loaded.make_context()
        loaded.extend(context, hidden[:, :anchor])
        drafted = loaded.draft(ids[0, anchor].item(), 7, context, anatomy.model.embed_tokens, anatomy.lm_head)
        # The scale of the features is divided out before or after the sum.
        assert mx.allclose(drafted.logits[:, trained.target.vocabulary], expected[number, 1:], atol=1e-3)
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"why": "test"}


def test_stored_hidden_states_train_as_recomputed_ones_do(tmp_path, target, capsys):
    argv = ("--model", target, "--out", tmp_path, "--num-shards", 2, "--rows", 3, "--length", 40)
    assert run(capsys, "data", *argv, "--hidden", "--capture-layers", "0,2")[0] == 0
    files = data_files([tmp_path])
    stored = StoredHidden(files, 64)
    assert StoredHidden.unusable(files, str(target), (0, 2)) is None
    shard = read_shard(files[1])
    hidden, _ = trainer().target.hidden(mx.array(shard.ids))
    # Stored in half precision.
    assert mx.allclose(stored([3, 4, 5]).astype(mx.float32), hidden, atol=2e-2, rtol=2e-3)
    (tmp_path / "hidden-00001.safetensors").unlink()
    assert "1 of 2 shards have none" in StoredHidden.unusable(files, str(target), (0, 2))


def test_hidden_states_of_other_layers_or_of_another_target_are_computed_again_with_a_note(tmp_path, target, capsys):
    data, other = tmp_path / "data", tmp_path / "other"
    argv = ("--num-shards", 1, "--rows", 4, "--length", 120, "--hidden", "--capture-layers", "0,1")
    assert run(capsys, "data", "--model", target, "--out", data, *argv)[0] == 0
    write_draft(tmp_path / "draft")
    fit = ("fit", "--draft", tmp_path / "draft", "--data", data, "--num-held-out", 1, "--num-steps", 2, "--json")
    assert run(capsys, *fit, "--model", target, "--out", tmp_path / "run")[0] == 0
    assert "hidden-00000.safetensors is of layers 0,1, the draft reads 0,2" in "".join(SAID)
    for file in data.glob("hidden-*"):
        file.unlink()
    assert run(capsys, *fit, "--model", target, "--out", tmp_path / "without")[0] == 0
    assert "hidden states" not in "".join(SAID)
    made = [mx.load(str(tmp_path / name / "draft" / "model.safetensors")) for name in ("run", "without")]
    assert all(mx.array_equal(made[0][name], made[1][name]) for name in made[0])
    shutil.copytree(target, other)
    assert run(capsys, *fit, "--model", other, "--out", tmp_path / "foreign")[0] == 0
    assert f"Note: The data were written by --model {target}, the draft is for {other}." in "".join(SAID)


def test_a_trained_draft_learns_at_lower_rates_than_a_new_one_unless_rates_are_given(tmp_path, target, capsys):
    assert run(capsys, "data", "--model", target, "--out", tmp_path / "data", "--num-shards", 1, "--rows", 4)[0] == 0
    write_draft(tmp_path / "trained")
    fit = ("fit", "--model", target, "--data", tmp_path / "data", "--num-held-out", 1, "--num-steps", 1, "--json")
    given = ("--draft", tmp_path / "trained")
    chosen = []
    for number, flags in enumerate([NEW, given, (*given, "--muon-rate", 0.03)]):
        assert run(capsys, *fit, *flags, "--out", tmp_path / str(number))[0] == 0
        settings = json.loads((tmp_path / str(number) / "draft" / "provenance.json").read_text())["settings"]
        chosen.append((settings["muon_rate"], settings["adamw_rate"]))
    new, trained, asked = chosen
    assert new == (Settings().muon_rate, Settings().adamw_rate)
    assert trained[0] < new[0] and trained[1] < new[1]
    assert asked == (0.03, trained[1])


def test_damaged_hidden_states_are_refused_by_name(tmp_path, target, capsys):
    argv = ("--num-shards", 1, "--rows", 4, "--length", 120, "--hidden", "--capture-layers", "0,2")
    assert run(capsys, "data", "--model", target, "--out", tmp_path / "data", *argv)[0] == 0
    write_draft(tmp_path / "draft")
    cut(tmp_path / "data" / "hidden-00000.safetensors")
    fit = ("fit", "--draft", tmp_path / "draft", "--data", tmp_path / "data", "--num-held-out", 1)
    status, _, err = run(capsys, *fit, "--model", target, "--out", tmp_path / "run")
    assert status == 2 and "hidden-00000.safetensors is damaged" in err and err.count("\n") == 0


@pytest.mark.parametrize("kind", ["bfloat16", "quantized"])
def test_targets_of_other_weight_types_train_as_well(kind):
    config = LLAMA | {"intermediate_size": 64, "head_dim": 8}
    model = build("llama", config, seed=5, dtype=mx.bfloat16)
    if kind == "quantized":
        nn.quantize(model, group_size=32, bits=8)
    raw = draft_config(model, config, num_layers=1, block_size=4, mask_token_id=4)
    trained = Trainer(model, from_target(model, raw), conversations(), SMALL)
    assert all(np.isfinite(list(trained.run(3)))) and trained.draft.dtype == mx.float32


def test_drafts_that_cannot_be_trained_are_refused():
    from drafts import dflash2

    with pytest.raises(DFlashError, match="cannot train"):
        Trainer(build("llama", seed=5), random_draft(dflash2()), conversations(), SMALL)


def test_a_new_draft_has_the_targets_own_values_and_keys():
    model = build("qwen3", seed=5)
    raw = draft_config(model, {**LLAMA, "head_dim": 16}, num_layers=1, block_size=4, mask_token_id=4)
    draft = from_target(model, raw)
    assert draft.capture_layer_ids == (1,)
    x = model.model.layers[1](model.model.layers[0](mx.random.normal((1, 9, 32)), None, None), None, None)
    keys, values = draft._context_kv(x, 0)
    attention, normed = model.model.layers[2].self_attn, model.model.layers[2].input_layernorm(x)
    own = attention.v_proj(normed).reshape(1, 9, 2, 16).transpose(0, 2, 1, 3)
    assert mx.allclose(values, own, atol=1e-4)
    own = attention.k_norm(attention.k_proj(normed).reshape(1, 9, 2, 16)).transpose(0, 2, 1, 3)
    assert mx.allclose(keys, attention.rope(own), atol=1e-4)


def test_a_target_built_otherwise_is_refused_with_the_part_that_differs():
    model = build("phi3", seed=5)
    raw = draft_config(model, LLAMA, num_layers=1, block_size=4, mask_token_id=4)
    with pytest.raises(DFlashError, match="start from a draft with --draft"):
        from_target(model, raw)


def domino_trainer(settings=SMALL) -> tuple[Trainer, dict]:
    shard = conversations()
    draft, raw = with_vocabulary(random_draft(), CONFIG, vocabulary_of(shard, settings.vocabulary))
    draft, raw = with_domino(draft, raw, state_size=12, rank=8)
    return Trainer(build("llama", seed=5), draft, shard, settings), raw


def test_a_new_domino_head_changes_nothing_and_training_lowers_its_loss():
    trained, _ = domino_trainer(Settings(num_steps=80, batch_size=6, num_anchors=20, vocabulary=97, muon_rate=0.02))
    plain = trainer(Settings(num_steps=80, batch_size=6, num_anchors=20, vocabulary=97, muon_rate=0.02))
    found = [evaluate(t.target, t.draft, t.scale, conversations(), 6, 10) for t in (trained, plain)]
    assert found[0] == found[1]
    losses = list(trained.run())
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
    assert mx.abs(trained.draft.domino.widen.weight).max() > 0.01


def test_a_domino_head_is_trained_on_what_it_says_along_the_right_tokens(tmp_path):
    trained, raw = domino_trainer()
    trained.draft.domino.widen.weight = mx.random.normal(trained.draft.domino.widen.weight.shape)
    list(trained.run(2))
    trained.export(tmp_path, raw, {}, dtype=mx.float32)
    loaded, model = load_draft(tmp_path), build("llama", seed=5)
    assert loaded.token_ids.tolist() == trained.vocabulary.tolist()
    ids, anchors = mx.array(conversations().ids[:1]), mx.array([[9, 17]])
    hidden, _ = trained.target.hidden(ids)
    slots = slots_hidden(trained.draft, trained.target.inputs(ids, anchors), hidden / trained.scale, anchors)
    before = tokens_before(ids, anchors, 7)
    assert before[0, 1].tolist() == ids[0, 17:24].tolist()
    expected = corrected(trained.target, trained.draft, trained.target.logits(slots), slots, before)[0]
    for number, anchor in enumerate((9, 17)):
        context = loaded.make_context()
        loaded.extend(context, hidden[:, :anchor])
        said = loaded.draft(ids[0, anchor].item(), 7, context, model.model.embed_tokens, model.lm_head)
        state = said.correction.start()
        for position in range(7):
            # The scale of the features is divided out before or after the sum.
            assert mx.allclose(said.correction.logits(position, state)[0], expected[number, position], atol=1e-3)
            state = said.correction.advance(position, state, ids[0, anchor + 1 + position][None])


def test_a_checkpoint_of_another_head_is_refused(tmp_path):
    trainer().save(tmp_path)
    with pytest.raises(DFlashError, match="another head; use the same flags"):
        domino_trainer()[0].resume(tmp_path)


def test_evaluation_counts_prefixes():
    trained = trainer()
    found = evaluate(trained.target, trained.draft, trained.scale, conversations(), 6, 10)
    shares = found["acceptance_by_position"]
    assert found["num_blocks"] > 0 and len(shares) == 7
    assert found["acceptance_length"] == pytest.approx(1 + sum(np.cumprod(shares)), abs=1e-6)


# Data


def last(writing) -> Shard:
    return list(writing)[-1]


def test_greedy_answers_are_mlx_lms_own():
    model, tokenizer = build("llama", seed=5), tiny_tokenizer()
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    shard = last(answer(model, prompts, length=24, temperatures=[0], eos_token_ids=tokenizer.eos_token_ids, seed=0))
    for row, prompt in enumerate(prompts):
        own = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24 - len(prompt))]
        assert shard.ids[row][shard.role[row] == ANSWER].tolist() == own
        assert shard.ids[row, : len(prompt)].tolist() == prompt


def test_in_conversations_greedy_rows_are_the_targets_argmax_and_templates_are_whole():
    model, tokenizer = build("llama", seed=5), templated_tokenizer()
    options = {"num_rows": 4, "length": 80, "temperatures": [0, 0.7], "seed": "s"}
    options |= {"user_limit": 9, "answer_limit": 12}
    shard = last(converse(model, tokenizer, **options))
    choices = np.array(mx.argmax(model(mx.array(shard.ids)), axis=-1))
    for row in (0, 2):
        at = np.flatnonzero(shard.role[row] == ANSWER)
        assert at.size > 10 and (choices[row, at - 1] == shard.ids[row, at]).all()
    start = tokenizer.encode("<s> user", add_special_tokens=False)
    assert all(row[: len(start)].tolist() == start for row in shard.ids)
    again = last(converse(model, tokenizer, **options))
    assert (again.ids == shard.ids).all() and (again.role == shard.role).all()


SAID: list[str] = []


def run(capsys, *argv) -> tuple[int, str, str]:
    """Status, output and errors; notes are in SAID."""
    status = cli.main(["train", *map(str, argv)])
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    SAID[:] = [line for line in lines if line.startswith("Note: ")]
    return status, captured.out, "\n".join(line for line in lines if not line.startswith("Note: "))


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def test_an_interrupted_data_run_loses_nothing(tmp_path, target, capsys, monkeypatch):
    argv = ("--model", target, "--num-shards", 3, "--rows", 3, "--length", 30, "--json")
    run(capsys, "data", "--out", tmp_path / "whole", *argv)
    from dflash_mlx.train import cli as train_cli

    calls = []

    def interrupted(*args, **kwargs):
        calls.append(1)
        writing = converse(*args, **kwargs)
        yield from islice(writing, 7) if len(calls) == 2 else writing
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_cli, "converse", interrupted)
    assert run(capsys, "data", "--out", tmp_path / "parts", *argv)[0] == 130
    assert len(data_files([tmp_path / "parts"])) == 1
    status, out, _ = run(capsys, "data", "--out", tmp_path / "parts", *argv)
    assert status == 0 and json.loads(out)["shards"] == 3
    for mine, other in zip(data_files([tmp_path / "whole"]), data_files([tmp_path / "parts"]), strict=True):
        assert (read_shard(mine).ids == read_shard(other).ids).all()


# The commands


def test_data_fit_and_eval_work_together(tmp_path, target, capsys):
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "w4 w5"}, {"role": "assistant", "content": "w7"}]
    prompts.write_text("\n".join(json.dumps(v) for v in ["w4", {"prompt": "w5 w7"}, {"messages": chat}, chat, "w8"]))
    data = ("data", "--model", target, "--out", tmp_path / "data", "--length", 40, "--rows", 2, "--json")
    status, out, err = run(capsys, *data, "--prompts", prompts)
    assert (status, err) == (0, "") and json.loads(out)["shards"] == 3
    fit = ("fit", "--model", target, "--data", tmp_path / "data", "--out", tmp_path / "run", "--json")
    fit += ("--num-held-out", 1, "--batch-size", 2, "--num-anchors", 4)
    new = ("--layers", 1, "--block-size", 4, "--mask-token", 4)
    status, out, err = run(capsys, *fit, *new, "--num-steps", 4, "--evaluate-every", 2)
    assert (status, err) == (0, "") and json.loads(out)["step"] == 4
    curve = json.loads((tmp_path / "run" / "curve.json").read_text())
    assert [point["step"] for point in curve] == [0, 2, 4]
    ElementTree.parse(tmp_path / "run" / "curve.svg")
    made = json.loads((tmp_path / "run" / "draft" / "provenance.json").read_text())
    assert made["settings"]["num_steps"] == 4 and len(made["data_sha256"]) == 64 and made["versions"]["mlx"]
    status, out, _ = run(capsys, *fit, *new, "--num-steps", 6, "--evaluate-every", 2)
    assert status == 0 and json.loads(out)["step"] == 6
    draft = tmp_path / "run" / "draft"
    evaluation = ("eval", "--model", target, "--draft", draft, "--prompts", prompts, "--max-tokens", 12, "--json")
    status, out, _ = run(capsys, *evaluation)
    result = json.loads(out)
    assert status == 0 and result["prompts"] == 5 and result["acceptance_length"] >= 1
    status, out, _ = run(capsys, *evaluation, "--tree-budget", 6)
    assert status == 0 and json.loads(out)["tokens"] == result["tokens"]
    fit = [tmp_path / "domino" if word == tmp_path / "run" else word for word in fit]
    fit += ["--draft", draft, "--domino", "--vocabulary", 50, "--num-steps", 4, "--evaluate-every", 2]
    assert run(capsys, *fit)[0] == 0
    made = load_draft(tmp_path / "domino" / "draft")
    assert made.config.family == "Domino" and 0 < made.token_ids.size <= 50
    evaluation = [tmp_path / "domino" / "draft" if word == draft else word for word in evaluation]
    status, out, _ = run(capsys, *evaluation)
    assert status == 0 and json.loads(out)["tokens"] == result["tokens"]


@pytest.fixture(scope="module")
def files(tmp_path_factory, target):
    """Names that the bad commands below use."""
    root = tmp_path_factory.mktemp("bad")
    write_draft(root / "draft")
    shard = conversations()
    np.savez(root / "data.npz", ids=shard.ids, role=shard.role)
    np.savez(root / "questions.npz", ids=shard.ids, role=np.full_like(shard.role, USER))
    (root / "broken.npz").write_bytes(b"no archive")
    (root / "empty.txt").write_text("\n")
    (root / "bad.jsonl").write_text('{"text": "w4"}\n')
    (root / "nothing").mkdir()
    (root / "taken").mkdir()
    (root / "taken" / "draft").write_text("a file")
    write_draft(root / "domino", domino(shift=False))
    (root / "damaged").mkdir()
    shutil.copy(root / "data.npz", root / "damaged")
    (root / "damaged" / "data.json").write_text('{"rows": ')
    shutil.copy(root / "data.npz", root / "cut.npz")
    cut(root / "cut.npz")
    with (root / "array.npz").open("wb") as file:
        np.save(file, shard.ids)
    np.savez(root / "far.npz", ids=np.where(shard.ids == 50, 500, shard.ids), role=shard.role)
    names = [path.name for path in root.iterdir()] + ["out", "missing"]
    return {name: root / name for name in names} | {"empty.txt/run": root / "empty.txt" / "run", "target": target}


BAD = [
    ("fit --data missing --out out", "does not exist"),
    ("fit --data nothing --out out", "holds no training data"),
    ("fit --data broken.npz --out out", "no shard of training data"),
    ("fit --data questions.npz --out out --num-held-out 1 --mask-token 4", "hold no answers"),
    ("fit --data data.npz --out out", "are held out"),
    ("fit --data data.npz --out out --num-held-out 1 --draft missing", "no local directory"),
    ("fit --data data.npz --out out --num-held-out 1 --layers 9 --mask-token 4", "cannot start from a target of 3"),
    ("fit --data data.npz --out out --num-held-out 1 --block-size 1 --mask-token 4", "block_size is 1"),
    ("fit --data data.npz --out out --num-steps 0", "num_steps is 0"),
    ("fit --data data.npz --out out --distillation 2", "distillation is 2.0"),
    ("fit --data data.npz --out out --num-held-out 1 --mask-token 4 --evaluate-every 0", "evaluate_every is 0"),
    ("data --out out --prompts missing", "cannot be read"),
    ("data --out out --prompts empty.txt", "holds no prompt"),
    ("data --out out --prompts bad.jsonl", "neither a text nor messages"),
    ("data --out out --temperatures warm", "not a list of numbers"),
    ("data --out out --temperatures 0,-1", "below 0"),
    ("data --out out --rows 0", "--rows is 0"),
    ("data --out out --hidden --capture-layers 7", "the target has 3 layers"),
    *(
        (f"fit --data data.npz --out out {flag} {value}", f"{flag[2:].replace('-', '_')} is {float(value):g}")
        for flag, values in {
            "--warmup-steps": "-1",
            "--clip-norm": "-1 0 nan",
            "--cooldown": "nan",
            "--muon-rate": "-1 nan inf",
            "--adamw-rate": "-1 nan",
            "--decay": "nan -1 inf",
            "--distillation": "nan",
        }.items()
        for value in values.split()
    ),
    ("fit --data cut.npz --out out", "no shard of training data"),
    ("fit --data array.npz --out out", "no shard of training data"),
    ("fit --data questions.npz --out out", "held out, hold no answers"),
    ("fit --data far.npz --out out --num-held-out 1 --mask-token 4", "hold token 500, but the target has 97"),
    ("fit --data data.npz --out empty.txt --num-held-out 1 --mask-token 4", "cannot be a directory to write to"),
    ("fit --data data.npz --out empty.txt/run --num-held-out 1 --mask-token 4", "cannot be a directory to write to"),
    ("fit --data data.npz --out /proc/run --num-held-out 1 --mask-token 4", "cannot be a directory to write to"),
    ("fit --data data.npz --out out --num-held-out 1 --mask-token 97", "--mask-token 97 is no token of the target"),
    ("fit --data data.npz --out out --num-held-out 1 --mask-token -1", "--mask-token -1 is no token of the target"),
    ("fit --data data.npz --out out --num-held-out 1 --draft auto", "--draft auto is no local directory"),
    ("fit --data data.npz --out out --num-held-out 1 --draft default", "was not made for this target"),
    ("fit --data data.npz --out out --num-held-out 1 --draft draft --layers 1", "--layers 1 is of a new draft"),
    ("fit --data data.npz --out out --num-held-out 1 --draft draft --block-size 4", "--block-size 4 is of a new draft"),
    ("fit --data data.npz --out out --num-held-out 1 --draft draft --mask-token 4", "--mask-token 4 is of a new draft"),
    ("data --out empty.txt", "cannot be a directory to write to"),
    ("data --out /proc/data", "cannot be a directory to write to"),
    ("data --out damaged", "data.json is damaged"),
    ("fit --data damaged --out out --num-held-out 1 --mask-token 4", "data.json is damaged"),
    ("data --out out --num-shards 0", "--num-shards is 0"),
    ("data --out out --num-shards -1", "--num-shards is -1"),
    ("data --out out --temperatures 0,nan", "not finite"),
    ("data --out out --temperatures inf", "not finite"),
    ("data --out out --hidden --hidden-limit-gb -1", "--hidden-limit-gb is -1"),
    ("data --out out --hidden --hidden-limit-gb nan", "--hidden-limit-gb is nan"),
    ("data --out out --capture-layers 0,1", "keeps nothing without --hidden"),
    ("data --out out --hidden-limit-gb 5", "--hidden-limit-gb 5.0 keeps nothing without --hidden"),
    ("data --out out --hidden --capture-layers 0,0", "names a layer twice"),
    ("data --out out --seed -1", "seed"),  # the sentence is the command line's or ours
    ("fit --data data.npz --out out --seed -1", "seed"),
    ("eval --draft none", "name one with --draft"),
    ("eval --draft draft --held-out questions.npz", "holds no answers"),
    ("fit --data data.npz --out out --num-held-out 1 --draft domino --vocabulary 30", "is over all tokens"),
    ("fit --data data.npz --out taken --num-held-out 1 --draft draft", "draft cannot be a directory to write to"),
    ("eval --draft draft --num-prompts 0", "--num-prompts is 0"),
]


@pytest.mark.parametrize(("command", "message"), BAD)
def test_bad_input_is_one_sentence(files, capsys, command, message):
    argv = [files.get(word, word) for word in command.split()]
    status, out, err = run(capsys, *argv, "--model", files["target"])
    assert (status, out) == (2, "") and message in err and err.count("\n") == 0, err


def test_other_settings_do_not_mix_into_a_data_directory(tmp_path, target, capsys):
    argv = ("data", "--model", target, "--out", tmp_path, "--num-shards", 1, "--rows", 2, "--json")
    assert run(capsys, *argv, "--length", 30)[0] == 0
    status, _, err = run(capsys, *argv, "--length", 31)
    assert status == 2 and "begun with length 30, not 31" in err


def test_a_damaged_shard_is_written_again_as_it_was(tmp_path, target, capsys):
    argv = ("data", "--model", target, "--out", tmp_path, "--num-shards", 2, "--rows", 2, "--length", 30, "--json")
    assert run(capsys, *argv)[0] == 0
    shard = tmp_path / "shard-00001.npz"
    before = read_shard(shard)
    cut(shard)
    status, out, _ = run(capsys, *argv)
    assert status == 0 and json.loads(out)["shards"] == 2 and json.loads(out)["new_tokens"] > 0
    assert f"Note: {shard} is damaged and is written again." in SAID
    assert (read_shard(shard).ids == before.ids).all()


def test_shards_without_answers_and_a_reached_limit_are_said_once(tmp_path, target, capsys):
    argv = ("data", "--model", target, "--out", tmp_path, "--num-shards", 3, "--rows", 2, "--length", 20, "--hidden")
    assert run(capsys, *argv, "--hidden-limit-gb", 1e-9, "--json")[0] == 0
    assert len([note for note in SAID if "--length 20" in note]) == 1
    assert len([note for note in SAID if "--hidden-limit-gb 1e-09 is reached" in note]) == 1
    assert len(list(tmp_path.glob("hidden-*"))) == 1


@pytest.fixture
def fit(files, tmp_path):
    """A short run's command."""
    argv = ["fit", "--model", files["target"], "--data", files["data.npz"], "--out", tmp_path / "run"]
    return [*argv, "--num-held-out", 1, "--num-anchors", 4, "--evaluate-every", 2, "--json"]


NEW = ["--layers", 1, "--block-size", 4, "--mask-token", 4]


def test_a_pruned_head_is_the_training_vocabulary(fit, tmp_path, capsys):
    assert run(capsys, *fit, *NEW, "--prune-head", "--vocabulary", 30, "--num-steps", 2)[0] == 0
    made = load_draft(tmp_path / "run" / "draft")
    assert made.config.draft_vocab_size == made.token_ids.size == 30
    again = [*fit, "--draft", tmp_path / "run" / "draft", "--out", tmp_path / "again", "--num-steps", 2]
    status, _, err = run(capsys, *again, "--prune-head", "--vocabulary", 10)
    assert status == 2 and "--vocabulary 10 cannot be had" in err and err.count("\n") == 0
    assert run(capsys, *again, "--prune-head")[0] == 0 and "keeps its own vocabulary of 30 tokens" in SAID[-1]
    assert load_draft(tmp_path / "again" / "draft").token_ids.tolist() == made.token_ids.tolist()


@pytest.mark.parametrize(("flags", "size"), [([], None), (["--domino"], None), (["--prune-head"], 30)])
def test_a_domino_draft_over_every_token_is_trained_whole_or_pruned(fit, files, tmp_path, capsys, flags, size):
    flags = [*flags, *(["--vocabulary", size] if size else [])]
    assert run(capsys, *fit, "--draft", files["domino"], "--num-steps", 2, *flags)[0] == 0
    made, old = load_draft(tmp_path / "run" / "draft"), load_draft(files["domino"])
    assert made.config.draft_vocab_size == size and made.config.family == "Domino"
    if size:  # rows of the tokens that are left, and 2 steps of training
        kept = old.domino.widen.weight[made.token_ids]
        assert mx.abs(made.domino.widen.weight - kept).max() < mx.abs(old.domino.widen.weight[:30] - kept).max() / 4


def test_what_a_killed_writer_left_is_no_data(tmp_path, files):
    shutil.copy(files["data.npz"], tmp_path / "shard-00000.npz")
    shutil.copy(files["cut.npz"], tmp_path / ".writing-shard-00001.npz")
    assert data_files([tmp_path]) == [tmp_path / "shard-00000.npz"]


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (["--prune-head"], [], "a draft with draft_vocab_size 30, not None"),
        ([], ["--prune-head"], "a draft with draft_vocab_size None, not 30"),
        ([], ["--block-size", 6], "a draft with block_size 4, not 6"),
        ([], ["--mask-token", 3], "a draft with mask_token_id 4, not 3"),
        ([], ["--layers", 2], "another head; use the same flags"),
    ],
)
def test_a_run_goes_on_with_its_own_draft_only(fit, tmp_path, capsys, first, then, message, num_steps):
    fit = [*fit, *NEW, "--vocabulary", 30]
    assert run(capsys, *fit, *first, "--num-steps", 2)[0] == 0
    before = (tmp_path / "run" / "draft" / "config.json").read_text()
    status, _, err = run(capsys, *fit, *then, "--num-steps", num_steps)
    assert status == 2 and message in err and err.count("\n") == 0
    assert (tmp_path / "run" / "draft" / "config.json").read_text() == before


def test_a_pruned_run_on_other_data_is_refused(fit, files, tmp_path, capsys):
    fit = [*fit, *NEW, "--vocabulary", 30, "--prune-head"]
    assert run(capsys, *fit, "--num-steps", 2)[0] == 0
    shard = conversations(seed=1)
    np.savez(tmp_path / "more.npz", ids=shard.ids, role=shard.role)
    status, _, err = run(capsys, *fit, "--num-steps", 4, "--data", files["data.npz"], tmp_path / "more.npz")
    assert status == 2 and "use the same --data" in err and err.count("\n") == 0


@pytest.mark.parametrize("damage", ["cut", "text", "stranger", "curve", "points"])
def test_a_damaged_run_is_refused_by_name(fit, tmp_path, capsys, damage):
    assert run(capsys, *fit, *NEW, "--num-steps", 2)[0] == 0
    checkpoint, curve = tmp_path / "run" / "trainer.safetensors", tmp_path / "run" / "curve.json"
    if damage == "cut":
        cut(checkpoint)
    elif damage == "text":
        checkpoint.write_text("no tensors")
    elif damage == "stranger":
        mx.save_safetensors(str(checkpoint), {"scale": mx.zeros(1)})
    else:
        curve.write_text("[{" if damage == "curve" else '[{"step": 1}]')
    status, _, err = run(capsys, *fit, *NEW, "--num-steps", 4)
    name = curve.name if damage in ("curve", "points") else checkpoint.name
    assert status == 2 and name in err and "delete it" in err and err.count("\n") == 0
