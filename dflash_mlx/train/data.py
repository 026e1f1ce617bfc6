"""Training data are shards of conversations; a shard is there whole or not at all, and is never written twice."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import DFlashError

PADDING, TEMPLATE, USER, ANSWER = -1, 0, 1, 2
"""Roles of tokens: behind the row's end, of the chat template, of a user turn, of the target's answer."""

SETTINGS_FILE = "data.json"
SHARD_FAILURES = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
"""What numpy raises for files that are no archive, another archive, or half of one."""


@dataclass(frozen=True)
class Shard:
    """Conversations, one a row, padded at the right.

    ids: int [B, L]; role: int8 [B, L]; hidden: what the target's captured layers gave, float16 [B, L, n_captured × E],
    when the writer kept it.
    """

    ids: np.ndarray
    role: np.ndarray
    hidden: mx.array | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.role.shape:
            raise DFlashError(
                f"A shard's ids are {self.ids.shape} and its roles {self.role.shape}; both must be one [rows, length]."
            )


class DataDirectory:
    """A directory of shards and the settings that they were all written with.

    settings: compared with those of an earlier run; other ones are refused, so that a resumed run continues the same
    data. damaged: shards that were found unreadable; they count as not written.
    """

    def __init__(self, path: Path, settings: dict[str, Any] | None = None):
        self.path = path
        self._settings_file = path / SETTINGS_FILE
        self.damaged: list[Path] = []
        if settings is None:
            if not self.shards():
                raise DFlashError(f"{path} holds no training data; write some with `dflash-mlx train data`.")
            return
        make_directory(path)
        if self._settings_file.exists():
            known = read_settings(self._settings_file)
            if other := sorted(key for key in known.keys() | settings.keys() if known.get(key) != settings.get(key)):
                key = other[0]
                raise DFlashError(
                    f"{path} was begun with {key} {known.get(key)!r}, not {settings.get(key)!r}; "
                    "use the same settings to continue it or another directory."
                )
        else:
            replace(self._settings_file, lambda file: file.write_text(json.dumps(settings, indent=1) + "\n"))
        self.damaged = [shard for shard in self.shards() if not is_whole(shard)]

    def shards(self) -> list[Path]:
        return [shard for shard in sorted(self.path.glob("shard-*.npz")) if shard not in self.damaged]

    def next_index(self) -> int:
        """The number of the first shard that is not there yet."""
        names = {path.name for path in self.shards()}
        return next(i for i in range(len(names) + 1) if shard_name(i) not in names)

    def write(self, index: int, shard: Shard) -> None:
        if shard.hidden is not None:
            hidden = shard.hidden
            replace(
                self.path / f"hidden-{index:05d}.safetensors",
                lambda file: mx.save_safetensors(str(file), {"hidden": hidden}),
            )
        path = self.path / shard_name(index)
        replace(path, lambda file: save(file, shard.ids, shard.role))
        self.damaged = [damaged for damaged in self.damaged if damaged != path]


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.npz"


def hidden_path(shard: Path) -> Path:
    return shard.with_name(shard.name.replace("shard-", "hidden-")).with_suffix(".safetensors")


def make_directory(path: Path) -> None:
    """Make `path` a directory that files can be written to; DFlashError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        raise DFlashError(
            f"{path} cannot be a directory to write to ({error.strerror or error}); use another --out."
        ) from error


def replace(path: Path, write: Any) -> None:
    """Write a file beside its place and move it there at the end, so that a half-written one is never seen."""
    scratch = path.with_name(f".writing-{path.name}")
    try:
        write(scratch)
        os.replace(scratch, path)
    except (OSError, RuntimeError) as error:  # numpy's and ours, or MLX's
        raise DFlashError(f"{path} cannot be written ({error}); make room or use another --out.") from error


def read_settings(file: Path) -> dict[str, Any]:
    """What a data.json says; DFlashError when it is damaged."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise DFlashError(
            f"{file} is damaged ({error}); delete it if the settings of its shards are the ones you give, or use "
            "another directory."
        ) from error
    return settings


def origin(file: Path) -> dict[str, Any]:
    """The settings that a shard was written with; empty where nothing says so."""
    settings = file.with_name(SETTINGS_FILE)
    return read_settings(settings) if settings.exists() else {}


def is_whole(shard: Path) -> bool:
    """Whether a shard, and the file of its hidden states if it has one, can be read."""
    try:
        read_shard(shard)
        if hidden_path(shard).exists():
            check_tensors(hidden_path(shard), "write it again")
    except DFlashError:
        return False
    return True


def check_tensors(file: Path, remedy: str) -> None:
    """DFlashError when a safetensors file is shorter than its own header says or has none."""
    try:
        with safe_open(str(file), framework="numpy"):
            return
    except (OSError, SafetensorError) as error:
        raise DFlashError(f"{file} is damaged ({error}); {remedy}.") from error


def save(path: Path, ids: np.ndarray, role: np.ndarray) -> None:
    small = np.uint16 if ids.max(initial=0) < 2**16 else np.uint32
    with path.open("wb") as file:
        np.savez_compressed(file, ids=ids.astype(small), role=role.astype(np.int8))


def read_shard(path: Path) -> Shard:
    """The tokens of a shard or pack; hidden states are left in their own file."""
    try:
        with np.load(path) as arrays:
            return Shard(arrays["ids"].astype(np.int32), arrays["role"])
    except SHARD_FAILURES as error:
        raise DFlashError(f"{path} is no shard of training data ({error}); write it again or leave it out.") from error


def data_files(paths: Sequence[Path]) -> list[Path]:
    """The shards of files and directories, in order."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DFlashError(f"Training data {path} does not exist; check the path.")
        # A killed writer leaves a hidden file.
        files += sorted(path.glob("[!.]*.npz")) if path.is_dir() else [path]
    if not files:
        raise DFlashError(f"{', '.join(map(str, paths))} holds no training data; write some with `train data`.")
    return files


def join(shards: Sequence[Shard]) -> Shard:
    """All conversations in one, padded to the longest."""
    length = max(shard.ids.shape[1] for shard in shards)

    def padded(array: np.ndarray, value: int) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, length - array.shape[1])), constant_values=value)

    return Shard(
        np.concatenate([padded(shard.ids, 0) for shard in shards]),
        np.concatenate([padded(shard.role, PADDING) for shard in shards]),
    )


def without(shard: Shard, held_out: Shard) -> np.ndarray:
    """Numbers of the conversations of `shard` that are not in `held_out`."""
    held = {ids.tobytes() for ids, _ in rows(held_out)}
    return np.array([i for i, (ids, _) in enumerate(rows(shard)) if ids.tobytes() not in held], dtype=int)


class StoredHidden:
    """Hidden states beside the shards of `files`, read row by row."""

    def __init__(self, files: Sequence[Path], width: int):
        """width: of the captured states of a token; DFlashError for a file that is damaged or of another shape."""
        self._index: list[tuple[Path, int]] = []
        for file in files:
            hidden, (rows, length) = hidden_path(file), read_shard(file).ids.shape
            check_tensors(hidden, "delete it, so that hidden states are computed again")
            with safe_open(str(hidden), framework="numpy") as tensors:
                shape = tensors.get_slice("hidden").get_shape() if "hidden" in tensors.keys() else None  # noqa: SIM118
            if shape != [rows, length, width]:
                raise DFlashError(
                    f"{hidden} holds states of shape {shape}, not {[rows, length, width]}; delete it, so that hidden "
                    "states are computed again."
                )
            self._index += [(hidden, row) for row in range(rows)]

    @staticmethod
    def unusable(files: Sequence[Path], model: str, layers: Sequence[int]) -> str | None:
        """Why the states beside `files` are not those of these layers of this target; None when they are."""
        found = [file for file in files if hidden_path(file).exists()]
        for file in found:
            known = origin(file)
            if not same_model(known.get("model"), model):
                return f"{hidden_path(file)} was written by {known.get('model', 'an unknown target')}, not {model}"
            if known.get("capture_layers") != list(layers):
                kept = f"of layers {','.join(map(str, known.get('capture_layers') or ['unknown']))}"
                return f"{hidden_path(file)} is {kept}, the draft reads {','.join(map(str, layers))}"
        if len(found) < len(files):
            return f"{len(files) - len(found)} of {len(files)} shards have none"
        return None

    def __call__(self, rows: Sequence[int]) -> mx.array:
        """[B, L, n_captured × E] of conversations, zeros behind the shorter ones."""
        found = []
        for file, row in (self._index[i] for i in rows):
            with safe_open(str(file), framework="numpy") as tensors:
                found.append(tensors.get_slice("hidden")[row])
        length = max(len(array) for array in found)
        return mx.array(np.stack([np.pad(array, ((0, length - len(array)), (0, 0))) for array in found]))


def same_model(known: str | None, model: str) -> bool:
    """Whether two values of --model name one target: the same word, or the same directory."""
    if known is None or known == model:
        return known == model
    here, there = Path(known), Path(model)
    return here.is_dir() and there.is_dir() and here.samefile(there)


def digest(files: Sequence[Path]) -> str:
    """SHA-256 over the files' contents, in order."""
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def pack(shards: Sequence[Path], pack_file: Path) -> int:
    """Put shards of one length into one file; the number of tokens in it."""
    parts = [read_shard(path) for path in shards]
    ids, role = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "role"))
    replace(pack_file, lambda file: save(file, ids, role))
    return int((role != PADDING).sum())


def rows(shard: Shard) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each conversation without its padding."""
    for ids, role in zip(shard.ids, shard.role, strict=True):
        length = int((role != PADDING).sum())
        yield ids[:length], role[:length]
