"""`quire collect-env`: versions, hardware, limits and variables, for a report of a problem. Nothing secret is shown."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from quire import __version__
from quire.config.commands import CollectEnv
from quire.config.secrets import shown_variable

Section = Mapping[str, Any]
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = {  # files of control groups version 2 and 1
    "memory limit": ("memory.max", "memory/memory.limit_in_bytes"),
    "memory used": ("memory.current", "memory/memory.usage_in_bytes"),
    "CPU quota": ("cpu.max", "cpu/cpu.cfs_quota_us"),
    "CPUs": ("cpuset.cpus.effective", "cpuset/cpuset.cpus"),
}
# Of a CPU's many flags, those that choose kernels or limit them.
_CPU_FLAGS = re.compile(r"avx\w*|amx\w*|fma|f16c|vnni|asimd\w*|sve\w*|bf16|i8mm|hypervisor")
_VARIABLES = (
    *(
        "QUIRE_",
        "VLLM_",
        "HF_",
        "HUGGINGFACE_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "TORCH",
        "PYTORCH_",
        "TRITON_",
        "NCCL_",
    ),
    *("CUDA_", "NVIDIA_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "OTEL_", "MALLOC_", "LD_", "PYTHON", "XDG_"),
)
_MORE_VARIABLES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "LANG", "LC_ALL", "TMPDIR"})
_UNLIMITED = 1 << 60  # bytes; version 1 writes no limit as a number
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,compute_cap"
_GPU_SECONDS = 10.0


def run(settings: CollectEnv) -> int:
    """Print the report; returns the exit status."""
    report = collect()
    print(json.dumps(report, indent=2) if settings.format == "json" else "\n".join(_lines(report)))
    return 0


def collect() -> dict[str, Section]:
    """Return the sections of a report."""
    return {
        "Quire": {"version": __version__, "folder": str(Path(__file__).parents[1]), "kernels": _kernels()},
        "Python": {"version": sys.version, "executable": sys.executable, "platform": platform.platform()},
        "CPU": _cpu(),
        "memory": _memory(),
        "limits": {**_cgroup_limits(), **_process_limits()},
        "GPUs": _gpus(),
        "packages": _packages(),
        "variables": _variables(os.environ),
    }


def _kernels() -> str:
    files = sorted(path.name for path in (Path(__file__).parents[1] / "kernels").glob("_native*.so"))
    return ", ".join(files) or "not compiled; PyTorch's operators are used, which are several times slower"


def _cpu() -> Section:
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    return {
        "model": facts.get("model name", platform.processor() or "unknown"),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable by this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "flags": " ".join(flag for flag in flags if _CPU_FLAGS.fullmatch(flag)),
    }


def _cpu_facts() -> dict[str, str]:
    """What Linux says of the first CPU."""
    text = _read(Path("/proc/cpuinfo")).partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _memory() -> Section:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 its size, not a file
    return {
        "total": _gib(memory.total),
        "available": _gib(memory.available),
        "swap": _gib(swap.total),
        "shared memory": None if shared is None else _gib(shared.total),
        "transparent huge pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or None,
    }


def _cgroup_limits() -> Section:
    """The limits of the container, or of the control group of systemd."""
    texts = {
        name: next(filter(None, (_read(_CGROUP / file) for file in files)), None) for name, files in _LIMITS.items()
    }
    return {
        name: _gib(int(text)) if text and text.isdigit() and "memory" in name else text for name, text in texts.items()
    }


def _process_limits() -> Section:
    kinds = {
        "open files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    return {name: " to ".join(map(_limit, resource.getrlimit(kind))) for name, kind in kinds.items()}


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gpus() -> Section:
    if (tool := shutil.which("nvidia-smi")) is None:
        return {"nvidia-smi": "not found"}
    command = [tool, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"failed: {error}"}
    return {f"GPU {index}": line.strip() for index, line in enumerate(output.splitlines())}


def _packages() -> Section:
    """Versions of the packages that Quire needs or can use; None for one that is not installed."""
    names = dict.fromkeys(_required_names())
    return {name: _version(name) for name in sorted(names, key=str.lower)}


def _required_names() -> Iterator[str]:
    try:
        requirements: Iterable[str] = metadata.requires("quire") or ()
    except metadata.PackageNotFoundError:  # it runs from a folder
        requirements = ("torch", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "pydantic")
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if name != "quire":
            yield name


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _variables(environment: Mapping[str, str]) -> Section:
    return {
        name: shown_variable(name, environment[name])
        for name in sorted(environment)
        if name.startswith(_VARIABLES) or name.upper() in _MORE_VARIABLES
    }


def _read(path: Path) -> str:
    """The text of a small file of the system; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _gib(count: int) -> str:
    return "unlimited" if count >= _UNLIMITED else f"{count / 2**30:.1f} GiB"


def _lines(report: Mapping[str, Section]) -> Iterator[str]:
    for title, section in report.items():
        yield f"{title}:"
        width = max(map(len, section), default=0)
        for name, value in section.items():
            yield f"  {name:<{width}}  {'-' if value is None else ' '.join(str(value).splitlines())}"
