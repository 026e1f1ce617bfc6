"""Training: many anchors at once are one forward each, runs resume exactly, what is written loads and is the same."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import islice

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from drafts import CONFIG, random_draft, write_draft
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
    with pytest.raises(DFlashError, match=r"muon_rate 0\.005, not 0\.1"):
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
    stored = StoredHidden.of(files)
    shard = read_shard(files[1])
    hidden, _ = trainer().target.hidden(mx.array(shard.ids))
    # Stored in half precision.
    assert mx.allclose(stored([3, 4, 5]).astype(mx.float32), hidden, atol=2e-2, rtol=2e-3)
    (tmp_path / "hidden-00001.safetensors").unlink()
    assert StoredHidden.of(files) is None


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


def run(capsys, *argv) -> tuple[int, str, str]:
    status = cli.main(["train", *map(str, argv)])
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if not line.startswith("Note: ")]
    return status, captured.out, "\n".join(errors)


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
    fit += ("--layers", 1, "--block-size", 4, "--mask-token", 4)
    fit += ("--num-held-out", 1, "--batch-size", 2, "--num-anchors", 4)
    status, out, err = run(capsys, *fit, "--num-steps", 4, "--evaluate-every", 2)
    assert (status, err) == (0, "") and json.loads(out)["step"] == 4
    curve = json.loads((tmp_path / "run" / "curve.json").read_text())
    assert [point["step"] for point in curve] == [0, 2, 4]
    ElementTree.parse(tmp_path / "run" / "curve.svg")
    made = json.loads((tmp_path / "run" / "draft" / "provenance.json").read_text())
    assert made["settings"]["num_steps"] == 4 and len(made["data_sha256"]) == 64 and made["versions"]["mlx"]
    status, out, _ = run(capsys, *fit, "--num-steps", 6, "--evaluate-every", 2)
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
    return {name: root / name for name in ("data.npz", "questions.npz", "broken.npz", "empty.txt", "bad.jsonl")} | {
        "draft": root / "draft", "nothing": root / "nothing", "out": root / "out", "missing": root / "missing",
        "target": target,
    }  # fmt: skip


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
    ("eval --draft none", "name one with --draft"),
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
