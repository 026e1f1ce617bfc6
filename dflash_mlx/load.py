"""Loading either gives a checked model or raises one sentence; nothing is loaded half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from huggingface_hub import try_to_load_from_cache

from .draft import DFlashDraft
from .draft import load_draft as _load_draft
from .draft.checkpoint import is_draft
from .errors import CheckpointError, PairMismatchError
from .targets.anatomy import dissect


def load(path_or_hf_repo: str, *args: Any, **kwargs: Any) -> Any:
    """mlx_lm.load with its own arguments: (model, tokenizer) or, with return_config, (model, tokenizer, config).

    CheckpointError when there is no such model, when it cannot be read, or when it is a draft.
    """
    _refuse_draft(path_or_hf_repo)
    try:
        return mlx_lm.load(path_or_hf_repo, *args, **kwargs)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        _refuse_draft(path_or_hf_repo)  # only now is a repository's config here
        where = "directory" if Path(path_or_hf_repo).exists() else "local directory or reachable model repository"
        raise CheckpointError(
            f"Model {path_or_hf_repo!r} is no {where} that mlx-lm can load ({_first_line(error)}); "
            "check the path or the name."
        ) from error


def load_draft(path_or_hf_repo: str | Path, *, target: nn.Module | None = None, **kwargs: Any) -> DFlashDraft:
    """Load a DFlash draft in the published format; with `target`, check at once that it was made for it."""
    draft = _load_draft(path_or_hf_repo, **kwargs)
    if target is not None:
        check_pair(target, draft)
    return draft


def check_pair(model: nn.Module, draft: DFlashDraft) -> None:
    """PairMismatchError, with both values, when the draft cannot have been made for this target."""
    anatomy = dissect(model)
    config = draft.config
    num_layers = len(model.layers)
    vocab_size = anatomy.vocab_size
    hidden_size = anatomy.hidden_size
    problems = [
        (
            config.num_target_layers not in (None, num_layers),
            "num_target_layers",
            config.num_target_layers,
            "layers",
            num_layers,
        ),
        (config.hidden_size != hidden_size, "hidden_size", config.hidden_size, "hidden_size", hidden_size),
        # Before the sizes of the vocabularies: it says more about a draft whose mask is a row added to the target's.
        (config.mask_token_id >= vocab_size, "mask_token_id", config.mask_token_id, "embedding rows", vocab_size),
        (config.vocab_size != vocab_size, "vocab_size", config.vocab_size, "embedding rows", vocab_size),
        (
            max(config.capture_layer_ids) >= num_layers,
            "capture_layer_ids up to",
            max(config.capture_layer_ids),
            "layers",
            num_layers,
        ),
    ]
    for wrong, draft_name, draft_value, target_name, target_value in problems:
        if wrong:
            raise PairMismatchError(
                f"This draft was not made for this target: the draft's {draft_name} is {draft_value}, "
                f"the target's {target_name} is {target_value}; load the draft that belongs to the target."
            )


def _refuse_draft(path_or_repo: str | Path) -> None:
    """CheckpointError for a directory, or a repository as far as it is on this machine, that holds a DFlash draft."""
    try:
        local = Path(path_or_repo).expanduser()
        found = local / "config.json" if local.is_dir() else try_to_load_from_cache(str(path_or_repo), "config.json")
        raw = json.loads(Path(found).read_text(encoding="utf-8")) if isinstance(found, (str, Path)) else None
    except (OSError, ValueError):  # what is missing or damaged is said by what loads it
        return
    if isinstance(raw, dict) and is_draft(raw):
        raise CheckpointError(
            f"{path_or_repo} holds a DFlash draft; give it with --draft (load_draft), and a target model here."
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
