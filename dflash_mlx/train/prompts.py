"""Prompts of a file become token lists in the chat template, or one sentence says which line is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import DFlashError
from ..text import chat_prompt


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """A text file, one prompt a line, or .jsonl: a string, {"prompt": ..}, {"messages": [..]} or a list of messages."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DFlashError(f"--prompts {path} cannot be read ({error}); give a text or .jsonl file.") from error
    if not lines:
        raise DFlashError(f"--prompts {path} holds no prompt; write one a line.")
    if path.suffix != ".jsonl":
        return [chat_prompt(tokenizer, line.strip()) for line in lines]
    return [_encoded(tokenizer, line, f"{path}, prompt {number}") for number, line in enumerate(lines, 1)]


def _encoded(tokenizer: Any, line: str, where: str) -> list[int]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DFlashError(f"{where} is not valid JSON ({error}); write one JSON value a line.") from error
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if isinstance(value, str) and value.strip():
        return chat_prompt(tokenizer, value)
    if not (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        raise DFlashError(f'{where} is neither a text nor messages; write {{"prompt": ".."}} or {{"messages": [..]}}.')
    if not tokenizer.has_chat_template:
        raise DFlashError(f"{where} holds messages, but the target has no chat template; write plain prompts.")
    while value and value[-1]["role"] == "assistant":  # the target writes its own
        value = value[:-1]
    if not value:
        raise DFlashError(f"{where} holds no user turn; write at least one.")
    return tokenizer.apply_chat_template(value, add_generation_prompt=True)
