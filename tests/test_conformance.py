"""The conformance tool: one architecture per cache kind passes it, and it sees a fault."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from reference import plain_tokens
from tokens import tiny_tokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import conformance as tool  # noqa: E402

from dflash_mlx import UnsupportedTargetError, stream_generate  # noqa: E402
from dflash_mlx.cache.kv import KVBlock  # noqa: E402
from dflash_mlx.conformance import check_model  # noqa: E402
from dflash_mlx.speculative.proposal import Proposal  # noqa: E402
from dflash_mlx.targets.support import chain_refusal  # noqa: E402
from dflash_mlx.targets.target import Target  # noqa: E402

ONE_PER_KIND = ["llama", "llama:sliding", "qwen3_5", "deepseek_v32", "falcon_h1", "gemma4_text"]


@pytest.mark.parametrize("case", ONE_PER_KIND)
def test_one_architecture_of_each_cache_kind_conforms(case):
    row = tool.run(case)
    assert (row["chain"], row["tree"]) == ("pass", "pass"), row


def test_a_rejected_row_left_in_the_cache_is_seen(monkeypatch):
    commit = KVBlock.commit
    monkeypatch.setattr(KVBlock, "commit", lambda self, path: commit(self, (*path, len(path))))
    report = check_model(tool.build("llama"))
    assert {c.name for c in report.checks if not c.passed} >= {"greedy", "rollback", "tree"}


def test_refusal_is_one_sentence_at_construction():
    report = check_model(tool.build("phi3small"))
    assert report.chain == report.tree == "refused" and report.refusal and not report.checks


def committed_rows():
    return json.loads((ROOT / "docs" / "conformance.json").read_text())["rows"]


def test_committed_table_names_every_architecture_of_the_installed_mlx_lm():
    """A new mlx-lm is noticed: run the tool, look at what is new, commit the table."""
    assert sorted(row["architecture"] for row in committed_rows()) == tool.cases()
    assert {case.partition(":")[0] for case in tool.cases()} == set(tool.modules())
    table = (ROOT / "docs" / "CONFORMANCE.md").read_text()
    assert [case for case in tool.cases() if f"\n| {case} |" not in table] == []


def test_committed_table_has_no_failure_and_a_reason_for_every_refusal():
    ran = [row for row in committed_rows() if row["mlx_lm_error"] is None]
    assert [row["architecture"] for row in ran if "FAIL" in (row["chain"], row["tree"])] == []
    assert all(row["refusal"] for row in ran if row["chain"] == "refused")
    assert all(row["refusal"] or row["tree_refusal"] for row in ran if row["tree"] == "refused")
    assert sum(row["chain"] == "pass" for row in ran) >= 0.95 * len(ran)
    assert sum(row["tree"] == "pass" for row in ran) >= 0.95 * len(ran)


def captured(model, tokens=(5, 7, 9)):
    last = len(list(model.layers)) - 1
    target = Target(model, make_prompt_cache(model), capture_layer_ids=(last,))
    return target.verify(Proposal.chain(mx.array([tokens])))


@pytest.mark.parametrize("case", ["llama", "iquestloopcoder", "nanbeige"])
def test_the_last_layers_tap_is_what_the_head_reads(case):
    """Also where the model runs the parts of its layers itself, and where a layer runs twice."""
    model = tool.build(case)
    verification = captured(model)
    assert mx.allclose(model.lm_head(model.model.norm(verification.hidden)), verification.logits, atol=1e-5)


def test_of_stacked_streams_the_active_one_is_captured():
    assert captured(tool.build("gemma3n")).hidden.shape == (1, 3, 32)


@pytest.mark.parametrize("case", tool.cases())
def test_every_architecture_decodes_through_the_public_api(case):
    """With copies, which need nothing of a target but its caches; trees and drafts stand elsewhere."""
    if tool.plain_error(case) is not None:
        pytest.skip("mlx-lm cannot run it here")
    model, tokenizer = tool.build(case), tiny_tokenizer()
    tokenizer.eos_token_ids = ()
    prompt = [5, 7, 9, 11, 3]
    if chain_refusal(model) is not None:
        with pytest.raises(UnsupportedTargetError):
            stream_generate(model, tokenizer, prompt, 3, ngram=True)
        return
    expected = plain_tokens(model, prompt, 14)
    hint = [t if i % 5 else (t + 1) % 97 for i, t in enumerate(expected)]
    responses = list(stream_generate(model, tokenizer, prompt, 14, ngram=True, hint_tokens=hint))
    assert [r.token for r in responses] == expected
    assert responses[-1].statistics.acceptance_length > 1
