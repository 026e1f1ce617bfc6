"""What the published format says of every draft, whoever trained it."""

from __future__ import annotations

from typing import Any

FORMAT: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",  # the family that the layers are built as
    "attention_bias": False,
    "tie_word_embeddings": True,
}
