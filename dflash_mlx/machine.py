"""Facts about this machine, read when asked; nothing is changed and nothing runs on import."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

APPLE_BFLOAT16 = 15  # the generation of Apple's GPUs, that of M3, from which bfloat16 is native
FAST_BLAS_GFLOPS = 15.0  # MLX's bundled reference BLAS reaches 2 to 3, any real one far more


def device_facts() -> dict[str, Any]:
    """The device MLX computes on."""
    on_cpu = mx.default_device() == mx.cpu
    return {
        "device": "cpu" if on_cpu else "gpu",
        "metal": mx.metal.is_available(),
        "chip": _chip(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    packages = {"mlx": "mlx", "mlx_lm": "mlx-lm", "transformers": "transformers", "numpy": "numpy"}
    found = {name: _version(package) for name, package in packages.items()}
    return {"dflash_mlx": _version("mlx-dflash"), "python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _chip() -> str:
    name = mx.device_info().get("device_name") if mx.metal.is_available() else None
    if name:
        return str(name)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def native_bfloat16() -> bool:
    """Whether the device that MLX computes on multiplies bfloat16 in hardware."""
    return has_bfloat16(mx.default_device() == mx.cpu, str(mx.device_info().get("architecture", "")))


def has_bfloat16(on_cpu: bool, architecture: str) -> bool:
    """MLX's CPU backend has not, nor have Apple's GPUs before M3; `architecture` is MLX's name, as "applegpu_g14s"."""
    apple = re.match(r"applegpu_g(\d+)", architecture)
    return not on_cpu and (apple is None or int(apple[1]) >= APPLE_BFLOAT16)


def blas() -> str | None:
    """The BLAS that serves float32 matmuls on Linux's CPU backend: a preloaded library's name, or "bundled"."""
    maps = Path("/proc/self/maps")
    if mx.default_device() != mx.cpu or not maps.exists():
        return None
    names = {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if "/" in line}
    fast = sorted(n for n in names if n.startswith(("libopenblas", "libmkl_rt", "libblis")) and "scipy" not in n)
    return fast[0] if fast else "bundled"


def installed_openblas() -> Path | None:
    """Debian's and Ubuntu's OpenBLAS, loaded or not."""
    found = sorted(Path("/usr/lib").glob(f"{platform.machine()}-linux-gnu*/openblas-pthread/libopenblas.so.0"))
    return found[0] if found else None


def matmul_gflops(seconds: float = 0.2) -> float:
    """float32 speed of a [16, 1024] × [1024, 1024] matmul, a forward's typical shape."""
    a, b = mx.random.normal((16, 1024)), mx.random.normal((1024, 1024))
    mx.eval(a @ b)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        mx.eval(a @ b)
        count += 1
    return 2 * 16 * 1024 * 1024 * count / (time.perf_counter() - started) / 1e9


def slowness(model: nn.Module | None = None) -> list[str]:
    """What is slow on this machine and why, each with its remedy; empty when nothing is known to be."""
    if mx.default_device() != mx.cpu:
        return []
    found = []
    if blas() == "bundled":
        library = installed_openblas()
        remedy = "install libopenblas0-pthread, then ask dflash-mlx doctor" if library is None else "it is installed"
        start = "" if library is None else f", so start with LD_PRELOAD={library}"
        found.append(f"Matmuls use MLX's bundled BLAS, which is tens of times slower than OpenBLAS: {remedy}{start}.")
    if model is not None:
        kinds = {str(a.dtype).rpartition(".")[2] for _, a in tree_flatten(model.parameters())} - {"float32"}
        if kinds:
            found.append(
                f"The model has {', '.join(sorted(kinds))} weights, which the CPU multiplies tens of times slower "
                "than float32: convert it with mlx_lm.convert --dtype float32 or use a GPU."
            )
    return found
