"""Imports point down the list of the design's section on layout, and family names stay in their places."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "dflash_mlx"
# From the top down; a module imports from its own layer or from those below it.
LAYERS = [
    {"__init__", "__main__"},
    {"cli"},
    {"server", "train", "demo", "check", "conformance", "doctor", "bench"},
    {"generate"},
    {"load", "pairs", "text", "prompt_cache"},
    {"speculative"},
    {"targets"},
    {"draft"},
    {"cache"},
    {"kernels"},
    {"default_pair", "machine"},
    {"errors", "version"},
]
FAMILIES = re.compile(
    r"\b(llama|qwen|gemma|mistral|mixtral|phi3|cohere|granite|olmo|smollm|deepseek|kimi|minimax|glm|gpt_oss|falcon|"
    r"jamba|mamba|nemotron|lfm2|bailing|rwkv)",
    re.IGNORECASE,
)


def layer(part: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if part in names)


def sources():
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file, file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_down():
    for file, part in sources():
        depth = len(file.relative_to(PACKAGE).parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                for name in names:
                    assert layer(part) <= layer(name), f"{file.name} ({part}) imports {name} from above"


def test_family_names_stay_in_targets_drafts_and_known_pairs():
    for file, part in sources():
        if part not in {"targets", "draft", "default_pair"}:
            found = FAMILIES.search(file.read_text())
            assert found is None, f"{file.relative_to(PACKAGE)} names {found.group()}"


def test_environment_is_read_in_the_command_line_only():
    for file, part in sources():
        if part != "cli":
            assert "environ" not in file.read_text() and "getenv" not in file.read_text(), file
