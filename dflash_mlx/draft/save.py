"""A draft on disk in the published format: the config it came with, tensors under their published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from .checkpoint import check_options, quantize, read_draft, unstack
from .dflash import DFlashDraft


def convert_draft(
    path_or_repo: str | Path,
    directory: str | Path,
    *,
    dtype: mx.Dtype | None = None,
    bits: int | None = None,
    group_size: int = 64,
) -> None:
    """Write a published draft to a new directory in one file, in other types or quantized where asked."""
    check_options(dtype, bits, group_size)
    draft, raw = read_draft(path_or_repo)
    if dtype is not None:
        draft.set_dtype(dtype)
    if bits is not None:
        quantize(draft, bits, group_size)
    save_draft(directory, draft, raw)


def save_draft(directory: str | Path, draft: DFlashDraft, config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors into a new directory; loading them gives the same draft.

    config: the published one that the draft was read with; it is told how the draft is quantized now.
    """
    directory = Path(directory).expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists and is not an empty directory; name a new one.")
    config = dict(config)
    quantization = config.pop("quantization", None) or config.pop("quantization_config", None)
    if "scales" in draft.kv_proj and not quantization:
        quantization = {"group_size": draft.kv_proj.group_size, "bits": draft.kv_proj.bits}
    if quantization:
        config["quantization"] = quantization
    weights = published_weights(draft)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
        (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{directory} cannot be written ({error}); make room or name another.") from error


def published_weights(draft: DFlashDraft) -> dict[str, mx.array]:
    """A draft's tensors under their published names, and the map of its own vocabulary where it has one."""
    weights = unstack(dict(tree_flatten(draft.parameters())), draft.config)
    if draft.token_ids is not None:
        weights["d2t"] = draft.token_ids - mx.arange(draft.token_ids.size)
    return weights
