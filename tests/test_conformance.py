"""The conformance tool: one architecture per cache kind passes it, and it sees a fault."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import conformance as tool  # noqa: E402

from dflash_mlx.cache.kv import KVBlock  # noqa: E402
from dflash_mlx.conformance import check_model  # noqa: E402

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
