"""Fingerprints identify a build and a machine: differences and patched files are detected."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from kcdsl.ir.terms import KernelRef
from kcdsl.model.fingerprint import (
    Machine,
    described,
    fingerprint_digest,
    installed,
    kernel_fingerprint,
    torch_flags,
)
from kcdsl.source import files

H200 = {
    "model": "NVIDIA H100 80GB HBM3", "capability": "9.0", "architecture": "", "processors": 132,
    "memory": 85520809984, "driver": "550.54.15",
}  # fmt: skip
TORCH = {"version": "2.13.0+cu128", "record": "a" * 64, "code": "b" * 64}
PROCESSOR = {"machine": "x86_64", "model": "AMD EPYC 9654", "instructions": ["avx2", "avx512f"]}


def machine(**changes: Any) -> Machine:
    """Return the description of a machine with some probes replaced."""
    libraries: Mapping[str, Any] = {"torch": TORCH, "nvidia-cublas-cu12": TORCH, "other": TORCH}
    probes: dict[str, Any] = {
        "library": libraries.get,
        "libraries": lambda: tuple(libraries),
        "processor": lambda: PROCESSOR,
        "host": lambda: {"cores": 8, "memory": 64},
        "device": lambda: H200,
        "compiler": lambda: "g++ 12.2.0",
        "flags": dict,
        "environment": {},
    }
    return Machine(**(probes | changes))


def digest(place: Machine, run: str = "torch.eager", device: str = "cuda") -> str:
    return fingerprint_digest(kernel_fingerprint(KernelRef(run, ()), device, place))


CHANGES: dict[str, dict[str, Any]] = {
    "another GPU": {"device": lambda: {**H200, "model": "NVIDIA B200", "capability": "10.0"}},
    "another driver": {"device": lambda: {**H200, "driver": "570.86.10"}},
    "another local version": {"library": lambda name: {**TORCH, "version": "2.13.0+cu126"}},
    "another record": {"library": lambda name: {**TORCH, "record": "c" * 64}},
    "a patched file": {"library": lambda name: {**TORCH, "code": "d" * 64}},
    "a patched cuBLAS": {
        "library": lambda name: {**TORCH, "code": "d" * 64} if "cublas" in name else TORCH
    },
    "another processor": {"processor": lambda: {**PROCESSOR, "model": "Intel Xeon 8480"}},
    "fewer instructions": {"processor": lambda: {**PROCESSOR, "instructions": ["avx2"]}},
    "more cores": {"host": lambda: {"cores": 16, "memory": 64}},
    "a flag of torch": {"flags": lambda: {"matmul.allow_tf32": True}},
    **{
        f"the variable {name}": {"environment": {name: value}}
        for name, value in {
            "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "3", "MKL_CBWR": "COMPATIBLE",
            "NVIDIA_TF32_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "VLLM_ATTENTION_BACKEND": "FLASHINFER", "XFORMERS_FORCE_DISABLE_TRITON": "1",
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "LD_PRELOAD": "fast.so",
            "TORCH_COMPILE_DISABLE": "1", "TORCH_COMPILE_OVERRIDE_BACKENDS": "0:eager",
            "TORCHINDUCTOR_PROLOGUE_FUSION": "0", "TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING": "1,1,1",
            "MKL_DEBUG_CPU_TYPE": "5", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2",
            "PYTORCH_JIT": "0", "CUTLASS_EPILOGUE_FUSION": "1", "KMP_AFFINITY": "compact",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_relevant_settings_change_the_digest(change: str) -> None:
    assert digest(machine()) == digest(machine())
    assert digest(machine(**CHANGES[change])) != digest(machine())


def test_irrelevant_and_secret_settings_are_not_recorded() -> None:
    names = [
        *("VLLM_API_KEY", "HOME", "TRITON_CACHE_DIR", "OMP_TOKEN", "CUDNN_LOGINFO_DBG", "PATH"),
        *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    ]
    place = machine(environment=dict.fromkeys(names, "do-not-show-this"))
    assert place.switches() == {}
    assert digest(place) == digest(machine())


def test_cpu_kernel_records_no_gpu_libraries() -> None:
    found = kernel_fingerprint(KernelRef("torch.eager", ()), "cpu", machine())
    assert set(found["software"]) == {"torch"}
    assert "gpu" not in found["hardware"]
    rfc8785.dumps(found)  # no floats
    compiled = kernel_fingerprint(KernelRef("torch.compile", ()), "cpu", machine())
    assert compiled["software"]["compiler"] == "g++ 12.2.0"
    other = replace(machine(), compiler=lambda: "clang 19")
    assert digest(other, "torch.compile") != digest(machine(), "torch.compile")


# --- wheels --------------------------------------------------------------------------------------

FILES = {"fast/__init__.py": b"def f(x): return x\n", "fast/kernels.so": b"\x7fELF" + bytes(500)}


@pytest.fixture
def wheel(tmp_path: Path) -> Distribution:
    """Install a small distribution with a file RECORD."""
    rows = []
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        sha = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={sha},{len(data)}")
    about = tmp_path / "fast-1.0+local.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fast\nVersion: 1.0+local\n")
    (about / "RECORD").write_text("\n".join(rows) + "\nfast-1.0+local.dist-info/RECORD,,\n")
    return PathDistribution(about)


def test_local_part_of_a_version_is_recorded(wheel: Distribution) -> None:
    assert described("fast", wheel)["version"] == "1.0+local"


@pytest.mark.parametrize("name", FILES)
def test_file_patched_in_place_is_detected(wheel: Distribution, name: str) -> None:
    """The RECORD is unchanged, and so are size and times of the file."""
    before = described("fast", wheel)
    assert described("fast", wheel) == before
    path = Path(str(wheel.locate_file(name)))
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = described("fast", wheel)
    assert after["record"] == before["record"]
    assert after["code"] != before["code"]


def test_two_changes_within_one_tick_are_detected(
    wheel: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests of a recently changed file are not cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    described("fast", wheel)
    assert not (tmp_path / "cache").exists()
    later = time.time_ns() + 2 * files.SETTLED
    monkeypatch.setattr(time, "time_ns", lambda: later)
    described("fast", wheel)
    assert len(list((tmp_path / "cache" / "kcdsl" / "libraries").iterdir())) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_rewritten_record_is_detected(
    wheel: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Also where the list of the former one is cached."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    later = time.time_ns() + 2 * files.SETTLED * kept
    monkeypatch.setattr(time, "time_ns", lambda: later)
    before = described("fast", wheel)
    assert described("fast", wheel) == before
    with (tmp_path / "fast-1.0+local.dist-info" / "RECORD").open("a") as file:
        file.write("fast/more.py,sha256=AAAA,3\n")
    after = described("fast", wheel)
    assert after["record"] != before["record"]
    assert after["code"] != before["code"]


@pytest.mark.parametrize(
    ("row", "is_a_program"),
    [
        ("fast/more.py,sha256=AAAA,3", True),
        ("fast/more.so.1.2,sha256=AAAA,3", True),
        ("fast/more.so", True),
        ("fast/more.py.txt,sha256=AAAA,3", False),
        ('"fast/more, again.py",sha256=AAAA,3', True),
        ('"fast/more.py, again",sha256=AAAA,3', False),
        ("fast/more.txt,sha256=.py,3", False),
    ],
)
def test_programs_in_a_record_are_found(
    wheel: Distribution, tmp_path: Path, row: str, is_a_program: bool
) -> None:
    before = described("fast", wheel)
    with (tmp_path / "fast-1.0+local.dist-info" / "RECORD").open("a") as file:
        file.write(f"{row}\n")
    assert (described("fast", wheel)["code"] != before["code"]) == is_a_program


def test_digests_of_two_environments_are_cached_separately(
    wheel: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise alternating commands in two environments would hash all files each time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    later = time.time_ns() + 2 * files.SETTLED
    monkeypatch.setattr(time, "time_ns", lambda: later)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "fast", other / "fast")
    about = shutil.copytree(tmp_path / "fast-1.0+local.dist-info", other / "fast-1.0.dist-info")
    assert described("fast", PathDistribution(about))["code"] == described("fast", wheel)["code"]
    assert len(list((tmp_path / "cache" / "kcdsl" / "libraries").iterdir())) == 2


def test_removed_file_is_detected(wheel: Distribution) -> None:
    before = described("fast", wheel)
    Path(str(wheel.locate_file("fast/kernels.so"))).unlink()
    assert described("fast", wheel)["code"] != before["code"]


def test_package_of_another_distribution_is_described(
    wheel: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example onnxruntime-gpu, whose package belongs to no distribution of its name."""
    about = tmp_path / "fast-1.0+local.dist-info"
    text = (about / "METADATA").read_text().replace("Name: fast", "Name: fast-gpu")
    (about / "METADATA").write_text(text)
    about.rename(tmp_path / "fast_gpu-1.0+local.dist-info")
    monkeypatch.syspath_prepend(tmp_path)
    found = installed.__wrapped__("fast")
    assert found is not None
    assert (found["name"], found["version"]) == ("fast-gpu", "1.0+local")
    assert found["code"] == described("fast", wheel)["code"]
    assert installed.__wrapped__("slow") is None


@pytest.mark.parametrize("layout", ["package", "module", "inside of a namespace", "of no adapter"])
@pytest.mark.parametrize("finder", [False, True])
def test_changed_source_of_an_editable_installation_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, finder: bool
) -> None:
    """Its RECORD lists a path, or the finder of setuptools, and does not change."""
    project, site = tmp_path / "project", tmp_path / "site"
    about = site / "edited_kernels-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: edited-kernels\nVersion: 1.0\n")
    (about / "direct_url.json").write_text(
        json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})
    )
    record = "__editable___finder.py,sha256=AAAA,3\n" if finder else "edited.pth,sha256=AAAA,3\n"
    (about / "RECORD").write_text(record)
    changed, module = {
        "package": ("edited/inner/helper.py", "edited"),
        "module": ("edited.py", "edited"),
        "inside of a namespace": ("edited/helper.py", "edited.adapter"),
        "of no adapter": ("edited_kernels/helper.py", ""),
    }[layout]
    (project / changed).parent.mkdir(parents=True)
    (project / changed).write_text("GAIN = 1\n")
    top = "edited_kernels" if not module else "edited"
    if layout in ("package", "of no adapter"):
        (project / top / "__init__.py").write_text("")
    if "." in module:
        (project / "edited" / "adapter.py").write_text("")
    if module:
        (about / "entry_points.txt").write_text(f"[kcdsl.adapters]\nmine = {module}:ADAPTER\n")
    monkeypatch.syspath_prepend(project)
    found = PathDistribution(about)
    before = described("edited-kernels", found)
    assert described("edited-kernels", found) == before
    (project / changed).write_text("GAIN = 2\n")
    after = described("edited-kernels", found)
    assert after["record"] == before["record"]
    assert after["code"] != before["code"]


def test_non_default_torch_settings_are_recorded() -> None:
    import torch

    assert torch_flags() == {}
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_flags() == {"deterministic_algorithms": True}
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch_flags() == {}
