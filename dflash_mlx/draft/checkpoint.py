"""A checkpoint loads whole or not at all: missing, unexpected or misshapen tensors are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from .config import ARCHITECTURES, DraftConfig, parse_config
from .dflash import DFlashDraft

STACKED = ("k_proj", "v_proj")


def load_draft(path_or_repo: str | Path, *, dtype: mx.Dtype | None = None) -> DFlashDraft:
    """Load a DFlash draft in the published format (config.json and safetensors, whole or sharded).

    dtype: of the unquantized weights; None keeps the file's, except that on the CPU half precision becomes float32,
    whose matmuls are tens of times faster there. CheckpointError names what is missing, damaged or unknown.
    """
    path = _resolve(path_or_repo)
    raw = _read_json(path / "config.json")
    if not any(name in ARCHITECTURES for name in raw.get("architectures") or []) and "dflash_config" not in raw:
        kind = ", ".join(raw.get("architectures") or [str(raw.get("model_type", "unknown"))])
        raise CheckpointError(f"{path} holds a {kind}, not a DFlash draft; give it as the target model instead.")
    config = parse_config(raw, str(path / "config.json"))
    weights = stack(_read_weights(path), config)
    draft = DFlashDraft(config)
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in weights:
            rows, columns = config.vocab_size, config.hidden_size
            draft[name] = (
                nn.Embedding(rows, columns) if name == "embed_tokens" else nn.Linear(columns, rows, bias=False)
            )
    if "quantization" in raw:
        _quantize_like(draft, weights, raw["quantization"])
    _check_tensors(draft, weights, path)
    draft.load_weights(list(weights.items()))
    draft.eval()
    if dtype is None and mx.default_device() == mx.cpu and draft.dtype != mx.float32:
        dtype = mx.float32
    if dtype is not None:
        draft.set_dtype(dtype)
    mx.eval(draft.parameters())
    return draft


def stack(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """Published names to ours: the K/V projections of all layers become one, row after row."""
    weights = dict(weights)
    names = [f"layers.{i}.self_attn.{name}" for i in range(config.num_hidden_layers) for name in STACKED]
    for suffix in ("weight", "scales", "biases", "bias"):
        parts = {name: weights.pop(f"{name}.{suffix}") for name in names if f"{name}.{suffix}" in weights}
        if len(parts) == len(names):
            weights[f"kv_proj.{suffix}"] = mx.concatenate(list(parts.values()))
        else:  # incomplete: leave the names for the check, which reports them
            weights |= {f"{name}.{suffix}": part for name, part in parts.items()}
    return weights


def unstack(weights: dict[str, mx.array], config: DraftConfig) -> dict[str, mx.array]:
    """Our names to the published ones; the inverse of `stack`."""
    weights = dict(weights)
    rows = config.num_key_value_heads * config.head_dim
    for suffix in ("weight", "scales", "biases", "bias"):
        stacked = weights.pop(f"kv_proj.{suffix}", None)
        if stacked is None:
            continue
        for i in range(config.num_hidden_layers):
            for j, name in enumerate(STACKED):
                start = (2 * i + j) * rows
                weights[f"layers.{i}.self_attn.{name}.{suffix}"] = stacked[start : start + rows]
    return weights


def _resolve(path_or_repo: str | Path) -> Path:
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json and the safetensors.")
    from huggingface_hub import snapshot_download  # slow to import and not needed for local drafts

    try:
        return Path(snapshot_download(str(path_or_repo), allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's client raises many kinds, all of which mean that it is not to be had
        reason = str(error).strip().split("\n")[0][:160]
        raise CheckpointError(
            f"Draft {str(path_or_repo)!r} is neither a local directory nor a reachable model repository "
            f"({type(error).__name__}: {reason}); check the path or the name."
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); a draft needs it.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not a config; download it again.")
    return raw


def _read_weights(path: Path) -> dict[str, mx.array]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = [path / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no safetensors file; download the draft again.")
    weights: dict[str, mx.array] = {}
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is missing though the index names it; download the draft again.")
        try:
            weights |= mx.load(str(file))
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(f"{file} is damaged ({reason}); download it again.") from error
    return weights


def _quantize_like(draft: DFlashDraft, weights: dict[str, mx.array], quantization: dict[str, Any]) -> None:
    """Make the modules whose weights are quantized in the file quantized, as mlx-lm does."""

    def predicate(name: str, module: nn.Module) -> Any:
        published = name.replace("kv_proj", "layers.0.self_attn.k_proj") if name == "kv_proj" else name
        if not hasattr(module, "to_quantized") or f"{name}.scales" not in weights:
            return False
        return quantization.get(published, True)

    options = {key: quantization[key] for key in ("group_size", "bits", "mode") if key in quantization}
    nn.quantize(draft, **options, class_predicate=predicate)


def _check_tensors(draft: DFlashDraft, weights: dict[str, mx.array], path: Path) -> None:
    wanted = {name: array.shape for name, array in tree_flatten(draft.parameters())}
    missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    problems = [
        f"{label}: {', '.join(names)}" for label, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    problems += [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(shape)}"
        for name, shape in wanted.items()
        if name in weights and weights[name].shape != shape
    ]
    if problems:
        raise CheckpointError(
            f"The tensors of {path} do not fit its config ({'; '.join(problems)}); "
            "download the draft again or use the version that made it."
        )
