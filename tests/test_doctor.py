"""The doctor tells what is so, changes nothing, and names a remedy for everything that is slow or wrong."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import doctor
from dflash_mlx.default_pair import partial_directory, target_directory

ROOT = Path(__file__).parent.parent
HEALTHY = {
    "device": "cpu",
    "versions": {"mlx_lm": "0.32.2"},
    "blas": "libopenblas.so.0",
    "matmul_gflops": 60.0,
    "memory_free_bytes": 8_000_000_000,
    "cache_free_bytes": 50_000_000_000,
    "unfinished_downloads": [],
    "default_target": "present",
    "default_draft": "present",
}


@pytest.fixture
def healthy(tmp_path):
    return HEALTHY | {"cache_directory": str(tmp_path)}


def write_target(directory: Path) -> None:
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), {"weight": mx.zeros(8)})
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    (directory / "source.json").write_text('{"source": "somewhere"}')


def test_report_is_json_and_renders(tmp_path):
    facts = json.loads(json.dumps(doctor.report(tmp_path / "none")))
    assert facts["device"] == ("cpu" if mx.default_device() == mx.cpu else "gpu")
    assert facts["metal"] == mx.metal.is_available() and facts["matmul_gflops"] > 0
    assert 0 < facts["memory_free_bytes"] <= facts["memory_bytes"] and facts["mlx_memory_limit_bytes"] > 0
    assert facts["default_target"] == "not fetched yet" and facts["default_draft"] == "present"
    text = doctor.render(facts)
    assert all(finding in text for finding in facts["findings"])
    assert "not fetched yet" in text and str(tmp_path / "none") in text
    assert not (tmp_path / "none").exists()  # it looks only


def test_report_lists_the_cache_directory(tmp_path):
    target = target_directory(tmp_path)
    write_target(target)
    (tmp_path / "other").write_bytes(b"12345")
    partial_directory(target).mkdir()
    facts = doctor.report(tmp_path)
    assert set(facts["cache_contents"]) == {target.name, "other"} and facts["cache_contents"]["other"] == 5
    assert facts["default_target"] == "present" and facts["default_target_source"] == "somewhere"
    assert facts["unfinished_downloads"] == [partial_directory(target).name]
    assert any("unfinished download" in finding for finding in facts["findings"])
    assert "somewhere" in doctor.render(facts)
    (target / "model.safetensors").unlink()
    (target / "source.json").write_text("{")
    facts = doctor.report(tmp_path)
    assert facts["default_target"] == "damaged" and facts["default_target_source"] == "unknown source"


def test_nothing_is_found_on_a_healthy_machine(healthy):
    assert doctor.findings(healthy, {"mlx": "0.32.4", "mlx-cpu": "0.32.4"}, nvidia_driver=False) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matmul_gflops": 3.0}, ["3.0 GFLOP/s", "LD_PRELOAD"]),
        ({"memory_free_bytes": 500_000_000}, ["0.5 GB of memory", "close"]),
        ({"cache_free_bytes": 10_000_000, "default_target": "not fetched yet"}, ["0.0 GB of disk", "make room"]),
        ({"versions": {"mlx_lm": "0.40.0"}}, ["0.40.0", "pip install"]),
        ({"default_target": "damaged"}, ["damaged", "fetches it again"]),
        ({"default_draft": "missing"}, ["draft is missing", "reinstall"]),
    ],
)
def test_each_finding_names_the_value_and_the_remedy(healthy, change, words):
    found = doctor.findings(healthy | change, {"mlx-cpu": "0.32.4"}, nvidia_driver=False)
    assert len(found) == 1 and all(word in found[0] for word in words) and "\n" not in found[0]


def test_a_full_disk_does_not_matter_once_the_target_is_there(healthy):
    assert doctor.findings(healthy | {"cache_free_bytes": 0}, {}, nvidia_driver=False) == []


def test_cuda_installations(healthy):
    both = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    (found,) = doctor.findings(healthy, both, nvidia_driver=True)
    assert "uninstall -y mlx-cpu" in found and "mlx-cuda-13==0.32.4" in found
    (found,) = doctor.findings(healthy, {"mlx-cpu": "0.32.4"}, nvidia_driver=True)
    assert "mlx-dflash[cuda]" in found
    assert doctor.findings(healthy | {"device": "gpu"}, {"mlx-cuda-13": "0.32.4"}, nvidia_driver=True) == []


def test_free_memory_as_each_system_tells_it():
    assert doctor.parse_meminfo("MemTotal:  100 kB\nMemAvailable:    64 kB\n") == 65536
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10.\n"
        "Pages active:                            700.\n"
        "Pages inactive:                            5.\n"
        "Pages speculative:                         1.\n"
        "Pages wired down:                        300.\n"
    )
    assert doctor.parse_vm_stat(text) == 16 * 16384
    assert doctor.parse_meminfo("") is None and doctor.parse_vm_stat("") is None


def test_importing_does_nothing(tmp_path):
    # mlx-lm allocates a few bytes of its own on import.
    script = (
        "import mlx.core as mx, mlx_lm; mx.reset_peak_memory(); import dflash_mlx.doctor; print(mx.get_peak_memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0" and list(tmp_path.iterdir()) == []
