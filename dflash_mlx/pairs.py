"""Known pairs: a target's name, or else its config, says which published draft was made for it.

The table is data (data/known_pairs.json): every target with the words that its name is known by, the sizes that its
config must have where they are known, and its drafts, the one to choose first. A wrong draft only costs speed, but
silently, so what may be another model is refused.
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
SIZE = re.compile(r"a?\d+(\.\d+)?[bmt]")  # parameters: 8b, 135m, a3b
# What makes another model of the same base name: another purpose, another size, or a release by its date (2507).
OTHER = re.compile(
    "asr|audio|base|classifier|draft|dflash|eagle|embed(ding)?s?|guard|omni|pretrain(ed)?|pt|rerank(er)?|reward|rm"
    rf"|speculator|tts|vision|vl|{SIZE.pattern}|\d{{4}}"
)


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
    """names: words that stand next to each other in the name of the target and of what is made of it.

    facts: further sizes of its config; only targets with them are recognized by their config alone.
    """

    target: str
    names: tuple[str, ...]
    model_types: tuple[str, ...]
    hidden_size: int | None
    num_layers: int | None
    drafts: tuple[KnownDraft, ...]
    facts: tuple[tuple[str, int], ...] = ()


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
            tuple((row["facts"] or {}).items()),
        )
        for row in json.loads(TABLE.read_text(encoding="utf-8"))
    )


def choose_draft(path_or_repo: str, config: dict[str, Any]) -> Choice:
    """The draft for a target, from its directory's or repository's name; where that says nothing, from its config.

    UnknownPairError when no known target fits, when several do, when name and config disagree, or when the name says
    that this is another model, version or size.
    """
    name = _name(path_or_repo)
    found = _by_name(name)
    reason = f"the target's name {name!r}"
    if not found and not _tells(name):
        found = [target for target in known_targets() if target.facts and not _differences(target, config, whole=True)]
        reason = f"its config alone, since its name {name!r} says nothing"
    if not found:
        raise UnknownPairError(f"No draft is known for {name!r} (see `dflash-mlx pairs`); {OTHERWISE}.")
    if len(found) > 1:
        names = ", ".join(target.target for target in found)
        raise UnknownPairError(f"{name!r} may be any of {names}, by {reason}; {OTHERWISE}.")
    target = found[0]
    if other := _other_words(name, target):
        raise UnknownPairError(
            f"{name!r} has the name of {target.target} but also {', '.join(map(repr, other))}, so it may be another "
            f"model; {OTHERWISE}."
        )
    if differences := _differences(target, config):
        raise UnknownPairError(
            f"{name!r} has the name of {target.target} but another config ({', '.join(differences)}); {OTHERWISE}."
        )
    return Choice(target, target.drafts[0], reason)


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


def _tells(name: str) -> bool:
    """Whether a name says what model it is, by a size or by the family of a known target."""
    families = {re.split(r"[^a-z]", known)[0] for target in known_targets() for known in target.names}
    return any(SIZE.fullmatch(word) or word.rstrip("0123456789.") in families for word in _words(name))


def _other_words(name: str, target: KnownTarget) -> list[str]:
    """Words of a name beside the target's own that make it another model, version or size."""
    own = {word for known in target.names for word in _words(known)}
    return [word for word in _words(name) if word not in own and OTHER.fullmatch(word)]


def _differences(target: KnownTarget, config: dict[str, Any], whole: bool = False) -> list[str]:
    """Where a config is not of the target's kind and sizes, as far as these are known.

    whole: what a fine-tune may change or a config may leave out counts too.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    model_type = config.get("model_type")
    kinds = " or ".join(target.model_types)
    found = [] if model_type in target.model_types else [f"model_type {model_type} instead of {kinds}"]
    sizes = (("hidden_size", target.hidden_size), ("num_hidden_layers", target.num_layers), *target.facts)
    for key, wanted in sizes:
        value = text.get(key)
        open_to_tunes = key == "max_position_embeddings" or (value is None and (key, wanted) in target.facts)
        if wanted is not None and value != wanted and (whole or not open_to_tunes):
            found.append(f"{key} {value} instead of {wanted}")
    return found
