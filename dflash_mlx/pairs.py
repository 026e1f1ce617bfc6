"""Known pairs: a target's name, or else its config, says which published draft was made for it.

The table is data (data/known_pairs.json): every target with the words that its name is known by, the sizes that its
config must have where they are known, and its drafts, the one to choose first.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UnknownPairError

TABLE = Path(__file__).parent / "data" / "known_pairs.json"
OTHERWISE = "name one with --draft, train one with `dflash-mlx train`, or leave out --draft and use --ngram"


@dataclass(frozen=True)
class KnownDraft:
    """draft: its repository, or "default" for the one in this package. gigabytes: about, None where nobody says.

    source: who states the pair. checked: what of it was checked for this version: "pair", or its "structure" alone.
    """

    draft: str
    family: str
    gigabytes: float | None
    source: str
    checked: str


@dataclass(frozen=True)
class KnownTarget:
    """names: words that stand next to each other in the name of the target and of what is made of it."""

    target: str
    names: tuple[str, ...]
    model_types: tuple[str, ...]
    hidden_size: int | None
    num_layers: int | None
    drafts: tuple[KnownDraft, ...]


@dataclass(frozen=True)
class Choice:
    """target and draft as in the table; reason: what the choice rests on."""

    target: KnownTarget
    draft: KnownDraft
    reason: str

    def __str__(self) -> str:
        others = [other.draft for other in self.target.drafts if other is not self.draft]
        also = f"; also known: {', '.join(others)}" if others else ""
        return f"{self.draft.draft} ({self.draft.family}), made for {self.target.target}, by {self.reason}{also}"


@functools.cache
def known_targets() -> tuple[KnownTarget, ...]:
    return tuple(
        KnownTarget(
            row["target"],
            tuple(row["names"]),
            tuple(row["model_types"]),
            row["hidden_size"],
            row["num_layers"],
            tuple(KnownDraft(**draft) for draft in row["drafts"]),
        )
        for row in json.loads(TABLE.read_text(encoding="utf-8"))
    )


def choose_draft(path_or_repo: str, config: dict[str, Any]) -> Choice:
    """The draft for a target, from its directory's or repository's name, else from its config.

    UnknownPairError when no known target fits, when several do, or when name and config disagree.
    """
    name = _name(path_or_repo)
    found = _by_name(name)
    reason = f"the target's name {name!r}"
    if not found:
        found, reason = [target for target in known_targets() if _sizes(target) and _fits(target, config)], "its config"
    if not found:
        raise UnknownPairError(f"No draft is known for {name!r} (see `dflash-mlx pairs`); {OTHERWISE}.")
    if len(found) > 1:
        names = ", ".join(target.target for target in found)
        raise UnknownPairError(f"{name!r} may be any of {names}, by {reason}; {OTHERWISE}.")
    if not _fits(found[0], config):
        target = found[0]
        raise UnknownPairError(
            f"{name!r} has the name of {target.target} but another config (model_type, hidden_size and layers "
            f"{_facts(config)} instead of {(*target.model_types, *(_sizes(target) or ()))}); {OTHERWISE}."
        )
    return Choice(found[0], found[0].drafts[0], reason)


def _name(path_or_repo: str) -> str:
    """The last part of a path or repository; of a hub cache's snapshot, its repository's."""
    path = Path(path_or_repo).expanduser()
    parts = (path.resolve() if path.exists() else path).parts or ("",)
    if len(parts) > 2 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    return parts[-1]


def _by_name(name: str) -> list[KnownTarget]:
    """Targets whose words stand in the name; of several, those whose words are not part of another's."""
    words = _words(name)
    matches = [
        (target, known) for target in known_targets() for known in map(_words, target.names) if _stand_in(known, words)
    ]
    longest = [
        target
        for target, known in matches
        if not any(known != other and _stand_in(known, other) for _, other in matches)
    ]
    return list(dict.fromkeys(longest))


def _words(text: str) -> list[str]:
    return [word.strip(".") for word in re.split(r"[^a-z0-9.]+", text.lower()) if word.strip(".")]


def _stand_in(part: Sequence[str], whole: Sequence[str]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def _sizes(target: KnownTarget) -> tuple[int, int] | None:
    if target.hidden_size is None or target.num_layers is None:
        return None
    return target.hidden_size, target.num_layers


def _facts(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    text = config.get("text_config") or config
    return config.get("model_type"), text.get("hidden_size"), text.get("num_hidden_layers")


def _fits(target: KnownTarget, config: dict[str, Any]) -> bool:
    """Whether a config is of the target's kind and, where they are known, of its sizes."""
    model_type, *sizes = _facts(config)
    return model_type in target.model_types and _sizes(target) in (None, tuple(sizes))
