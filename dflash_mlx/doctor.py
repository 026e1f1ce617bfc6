"""The doctor looks and tells; it changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import machine
from .default_pair import cache_directory, target_directory


def report(cache_dir: Path | None = None) -> dict[str, Any]:
    """Device, versions, speed, memory, cache directory, and findings: sentences with a remedy each."""
    directory = cache_dir or cache_directory()
    gflops = machine.matmul_gflops()
    return {
        **machine.device_facts(),
        "versions": machine.versions(),
        "blas": machine.blas(),
        "matmul_gflops": round(gflops, 1),
        "mlx_peak_bytes": mx.get_peak_memory(),
        "cache_directory": str(directory),
        "cache_bytes": sum(f.stat().st_size for f in directory.rglob("*") if f.is_file()) if directory.exists() else 0,
        "cache_free_bytes": shutil.disk_usage(_existing(directory)).free,
        "default_target": "present" if (target_directory(cache_dir) / "config.json").exists() else "not fetched yet",
        "findings": [*machine.slowness(), *_findings(directory, gflops)],
    }


def _findings(directory: Path, gflops: float) -> list[str]:
    found = []
    if machine.blas() not in (None, "bundled") and gflops < machine.FAST_BLAS_GFLOPS:
        found.append(
            f"Float32 matmuls reach only {gflops:.1f} GFLOP/s though a fast BLAS is loaded: look for other programs "
            "on these cores."
        )
    if shutil.disk_usage(_existing(directory)).free < 2e9:
        found.append(f"Less than 2 GB are free at {directory}: make room before a model is fetched.")
    leftovers = [p.name for p in directory.glob(".*") if p.is_dir()] if directory.exists() else []
    if leftovers:
        found.append(f"{directory} holds unfinished downloads ({', '.join(sorted(leftovers))}): delete them.")
    return found


def _existing(directory: Path) -> Path:
    return next(p for p in (directory, *directory.parents) if p.exists())


def render(facts: dict[str, Any]) -> str:
    """The report for a terminal."""
    gigabytes = {k: f"{facts[k] / 1e9:.1f} GB" for k in ("memory_bytes", "cache_bytes", "cache_free_bytes")}
    lines = [
        f"device        {facts['device']} ({facts['chip']}, {facts['cores']} cores, {gigabytes['memory_bytes']}), "
        f"Metal {'available' if facts['metal'] else 'not available'}",
        "versions      " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"matmul        {facts['matmul_gflops']} GFLOP/s float32"
        + (f", BLAS: {facts['blas']}" if facts["blas"] else ""),
        f"cache         {facts['cache_directory']} ({gigabytes['cache_bytes']}, {gigabytes['cache_free_bytes']} free)",
        f"default pair  target {facts['default_target']}, draft shipped",
    ]
    findings = [f"! {finding}" for finding in facts["findings"]] or ["Nothing is known to be slow or wrong here."]
    return "\n".join(lines + findings)
