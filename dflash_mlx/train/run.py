"""A training run: checkpoints that last, evaluations on the way, and at the end a draft with its provenance."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import DFlashError
from ..machine import device_facts, versions
from .curve import svg
from .data import Shard, make_directory, replace
from .fit import Trainer, evaluate


@dataclass
class Run:
    """Everything a run leaves is in `directory`: trainer.safetensors to go on from, curve.json, curve.svg, draft/.

    held_out: conversations that are never trained on. data_sha256: of the data files.
    """

    trainer: Trainer
    raw_config: dict[str, Any]
    held_out: Shard
    directory: Path
    data_sha256: str
    num_evaluated: int = 16
    curve: list[dict[str, Any]] = field(default_factory=list)

    def resume(self) -> bool:
        """Go on where an earlier process stopped; points of the curve behind the checkpoint are dropped."""
        if not self.trainer.resume(self.directory):
            return False
        file = self.directory / "curve.json"
        if file.exists():
            self.curve = [point for point in read_curve(file) if point["step"] <= self.trainer.step]
        return True

    def fit(self, *, evaluate_every: int, progress: bool = True) -> dict[str, Any]:
        """Train to the end, with a checkpoint and an evaluation every so many steps; the last point of the curve."""
        if evaluate_every < 1:
            raise DFlashError(f"evaluate_every is {evaluate_every}; use 1 or more.")
        trainer, total = self.trainer, self.trainer.settings.num_steps
        seconds = self.curve[-1]["seconds"] if self.curve else 0.0
        if not self.curve:
            self._record(seconds, None)
        losses: list[float] = []
        bar = tqdm(total=total, initial=min(trainer.step, total), unit="step", desc="fit", disable=not progress)
        steps = trainer.run()
        while trainer.step < total:
            started = time.perf_counter()
            losses.append(next(steps))
            seconds += time.perf_counter() - started
            if not math.isfinite(losses[-1]):
                raise DFlashError(
                    f"The loss is {losses[-1]} at step {trainer.step}; go on from {self.directory} with lower rates."
                )
            bar.update()
            if trainer.step % evaluate_every == 0 or trainer.step == total:
                self._record(seconds, sum(losses) / len(losses))
                losses = []
                bar.set_postfix(acceptance=f"{self.curve[-1]['acceptance_length']:.2f}")
        bar.close()
        return self.curve[-1]

    def _record(self, seconds: float, loss: float | None) -> None:
        trainer = self.trainer
        found = evaluate(trainer.target, trainer.draft, trainer.scale, self.held_out, self.num_evaluated)
        self.curve.append({"step": trainer.step, "seconds": round(seconds, 2), "loss": loss, **found})
        make_directory(self.directory)
        text = json.dumps(self.curve, indent=1) + "\n"
        replace(self.directory / "curve.json", lambda file: file.write_text(text))
        replace(self.directory / "curve.svg", lambda file: file.write_text(svg(self.curve)))
        trainer.export(self.directory / "draft", self.raw_config, self.provenance())
        trainer.save(self.directory)

    def provenance(self) -> dict[str, Any]:
        return {
            "command": " ".join(["dflash-mlx", *sys.argv[1:]]),
            "commit": commit(),
            "versions": versions(),
            "machine": device_facts(),
            "data_sha256": self.data_sha256,
            "conversations": len(self.trainer.shard.ids),
            "settings": asdict(self.trainer.settings),
            "held_out": self.curve[-1] if self.curve else None,
        }


def read_curve(file: Path) -> list[dict[str, Any]]:
    """The points of a curve.json; DFlashError when it is damaged."""
    try:
        points = json.loads(file.read_text(encoding="utf-8"))
        for point in points:
            for name in ("step", "seconds", "acceptance_length"):
                if not math.isfinite(point[name]):
                    raise ValueError(f"{name} is {point[name]}")
        return list(points)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DFlashError(f"{file} is damaged ({error}); delete it to go on with a new curve.") from error


def commit() -> str | None:
    """Of the checkout that this package runs from, with a mark where files differ; None when installed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
