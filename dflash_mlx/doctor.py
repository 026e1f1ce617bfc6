"""The doctor looks and tells; it changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import machine
from .default_pair import cache_directory, default_draft_path, is_complete, partial_directory, target_directory

TESTED_MLX_LM = "0.32"
LOW_MEMORY_BYTES = 2e9  # the default pair in float32 with its caches, and room for the conversion
LOW_DISK_BYTES = 2e9  # download and converted weights side by side


def report(cache_dir: Path | None = None) -> dict[str, Any]:
    """Device, versions, speed, memory, cache directory, default pair, and findings: sentences with a remedy each.

    The speed is measured for 0.2 s. A value that this system does not tell is None.
    """
    directory = cache_dir or cache_directory()
    facts = {
        **machine.device_facts(),
        "versions": machine.versions(),
        "blas": machine.blas(),
        "matmul_gflops": round(machine.matmul_gflops(), 1),
        "memory_free_bytes": memory_free_bytes(),
        **mlx_memory(),
        "cache_directory": str(directory),
        "cache_contents": cache_contents(directory),
        "cache_free_bytes": shutil.disk_usage(_existing(directory)).free,
        "unfinished_downloads": unfinished_downloads(directory),
        **default_pair(cache_dir),
    }
    return facts | {"findings": [*machine.slowness(), *findings(facts, installed_distributions(), _nvidia_driver())]}


def memory_free_bytes() -> int | None:
    """What a new allocation can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return parse_meminfo(meminfo.read_text())
    if sys.platform == "darwin":
        return parse_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True).stdout)
    return None


def parse_meminfo(text: str) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def parse_vm_stat(text: str) -> int | None:
    """macOS: free pages, and those it gives up at once."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)\.", text, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None


def mlx_memory() -> dict[str, int | None]:
    """MLX's own limit and, on Apple GPUs, what the system advises and allows."""
    info = mx.device_info()
    return {
        "mlx_memory_limit_bytes": mx.get_memory_limit(),
        "mlx_recommended_bytes": info.get("max_recommended_working_set_size"),
        "mlx_largest_buffer_bytes": info.get("max_buffer_length"),
        "mlx_active_bytes": mx.get_active_memory(),
        "mlx_peak_bytes": mx.get_peak_memory(),
    }


def cache_contents(directory: Path) -> dict[str, int]:
    """Bytes of each thing in the cache directory; hidden ones are not ready for use."""
    if not directory.is_dir():
        return {}
    return {p.name: _size(p) for p in sorted(directory.iterdir()) if not p.name.startswith(".")}


def unfinished_downloads(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob(f"{partial_directory(directory / '*').name}"))


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())


def _existing(directory: Path) -> Path:
    return next(p for p in (directory, *directory.absolute().parents) if p.exists())


def default_pair(cache_dir: Path | None = None) -> dict[str, str]:
    """Whether the default pair is here, and which of its sources the target came from."""
    target, draft = target_directory(cache_dir), default_draft_path()
    return {
        "default_target": "present" if is_complete(target) else "damaged" if target.exists() else "not fetched yet",
        "default_target_source": _source(target),
        "default_draft": "present" if is_draft(draft) else "missing",
    }


def _source(target: Path) -> str:
    try:
        return str(json.loads((target / "source.json").read_text())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown source"


def is_draft(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("model*.safetensors"))


def installed_distributions() -> dict[str, str]:
    """MLX's parts and their versions."""
    found = ((d.name or "", d.version) for d in importlib.metadata.distributions())
    return {name.lower().replace("_", "-"): version for name, version in found if name.lower().startswith("mlx")}


def _nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def findings(facts: Mapping[str, Any], installed: Mapping[str, str], nvidia_driver: bool) -> list[str]:
    """What is slow or wrong, each with its remedy, most consequential first."""
    return [*_installation(facts, installed, nvidia_driver), *_speed(facts), *_room(facts)]


def _installation(facts: Mapping[str, Any], installed: Mapping[str, str], nvidia_driver: bool) -> Iterable[str]:
    cuda = sorted(name for name in installed if name.startswith("mlx-cuda"))
    if cuda and "mlx-cpu" in installed:
        yield (
            f"mlx-cpu and {cuda[0]} are both installed and overwrite each other's libmlx.so: pip uninstall -y mlx-cpu, "
            f"then pip install --force-reinstall --no-deps {cuda[0]}=={installed[cuda[0]]}."
        )
    elif nvidia_driver and facts["device"] == "cpu" and not cuda:
        yield "MLX runs on the CPU beside an NVIDIA GPU: pip install 'mlx-dflash[cuda]', then ask the doctor again."
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        yield "This Python is an Intel build, which MLX does not support: use a Python built for arm64."
    version = facts["versions"]["mlx_lm"]
    if not version.startswith(f"{TESTED_MLX_LM}."):
        yield f"mlx-lm {version} is outside the tested range: pip install 'mlx-lm~={TESTED_MLX_LM}.2'."
    if facts["default_draft"] == "missing":
        yield "The default draft is missing from the installed package: reinstall mlx-dflash."


def _speed(facts: Mapping[str, Any]) -> Iterable[str]:
    if facts["blas"] not in (None, "bundled") and facts["matmul_gflops"] < machine.FAST_BLAS_GFLOPS:
        yield (
            f"Float32 matmuls reach only {facts['matmul_gflops']} GFLOP/s though {facts['blas']} is loaded: look for "
            "other programs on these cores, and start with the library in LD_PRELOAD so that MLX uses it."
        )


def _room(facts: Mapping[str, Any]) -> Iterable[str]:
    free = facts["memory_free_bytes"]
    if free is not None and free < LOW_MEMORY_BYTES:
        yield f"Only {_gigabytes(free)} of memory are free: close other programs, or expect swapping."
    directory = facts["cache_directory"]
    if facts["default_target"] != "present" and facts["cache_free_bytes"] < LOW_DISK_BYTES:
        disk = _gigabytes(facts["cache_free_bytes"])
        yield f"Only {disk} of disk are free at {directory}: make room for the download."
    if not os.access(_existing(Path(directory)), os.W_OK):
        yield f"{directory} cannot be written: make it writable, or point DFLASH_MLX_CACHE somewhere else."
    if facts["default_target"] == "damaged":
        yield f"The default target in {directory} is damaged: run dflash-mlx demo, which fetches it again."
    if facts["unfinished_downloads"]:
        names = ", ".join(facts["unfinished_downloads"])
        yield f"{directory} holds an unfinished download ({names}): if none is running, the next one clears it."


def render(facts: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    contents = ", ".join(f"{name} {_gigabytes(size)}" for name, size in facts["cache_contents"].items())
    memory = [f"{_gigabytes(facts['memory_bytes'])}, {_gigabytes(facts['memory_free_bytes'])} free"]
    memory += [f"MLX limit {_gigabytes(facts['mlx_memory_limit_bytes'])}"]
    if facts["mlx_recommended_bytes"] is not None:
        memory += [f"recommended at most {_gigabytes(facts['mlx_recommended_bytes'])}"]
    lines = [
        f"device        {facts['device']} ({facts['chip']}, {facts['cores']} cores), "
        f"Metal {'available' if facts['metal'] else 'not available'}",
        f"versions      {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}",
        f"matmul        {facts['matmul_gflops']} GFLOP/s float32{', BLAS: ' + facts['blas'] if facts['blas'] else ''}",
        f"memory        {', '.join(memory)}",
        f"cache         {facts['cache_directory']} "
        f"({contents or 'empty'}; {_gigabytes(facts['cache_free_bytes'])} of disk free)",
        f"default pair  target {facts['default_target']}"
        f"{' (' + facts['default_target_source'] + ')' if facts['default_target'] == 'present' else ''}, "
        f"draft {facts['default_draft']}",
    ]
    found = [f"! {finding}" for finding in facts["findings"]] or ["Nothing is known to be slow or wrong here."]
    return "\n".join(lines + found)


def _gigabytes(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"
