"""Which mlx-lm models a block cannot be verified on, and why: said when a target is made, before anything is wrong.

A model is refused by the model file that any of its modules comes from, since a family's layers are used by others.
"""

from __future__ import annotations

import mlx.nn as nn

from .anatomy import family

# Model file of mlx-lm → why a chain cannot be rolled back exactly.
NO_CHAINS: dict[str, str] = {
    "deepseek_v41": (
        "This model's cache merges tokens into compressed groups and drops what went into them, so that a rejected "
        "token cannot be taken out again; generate without a draft."
    ),
    "phi3small": (
        "This model's attention adds mlx-lm's boolean mask to its scores, so that rows of one forward attend the "
        "tokens behind them; generate without a draft."
    ),
}

# Model file of mlx-lm → why the nodes of a tree cannot have their own positions and masks; chains work.
NO_TREES: dict[str, str] = {
    "nanochat": "This model rotates in a function of its own that takes one offset; propose one branch.",
    "muse_spark": "This model rotates in a kernel of its own that takes one offset; propose one branch.",
    "minimax_m3_vl": "This model picks key blocks by cache row, not by a node's position; propose one branch.",
    "llama4": "This model masks its chunks itself, by row number, not by a node's position; propose one branch.",
}


def chain_refusal(model: nn.Module) -> str | None:
    return _reason(model, NO_CHAINS)


def tree_refusal(model: nn.Module) -> str | None:
    return _reason(model, NO_TREES) or chain_refusal(model)


def _reason(model: nn.Module, table: dict[str, str]) -> str | None:
    files = {family(module) for module in model.modules()}
    return next((reason for file, reason in table.items() if file in files), None)
