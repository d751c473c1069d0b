"""The machine that figures hold for, and its limits."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, load and operating system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _line("/proc/cpuinfo", "model name") or platform.processor(),
        "features": [one for one in _FEATURES if one in (_line("/proc/cpuinfo", "flags") or "")],
        "cores": cores,
        "memory_bytes": int((_line("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) * 1024,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "i8mm")


def read_bandwidth(threads: int, megabytes: int = 512, repeats: int = 5) -> float:
    """GB/s of reading memory that no cache holds, the best of some passes: the limit of decode."""
    blocks = [np.ones(megabytes * 2**20 // 8 // threads) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            begun = time.perf_counter()
            list(pool.map(np.max, blocks))  # numpy lets go of the interpreter lock
            spent = time.perf_counter() - begun
            best = max(best, sum(block.nbytes for block in blocks) / spent / 1e9)
    return best


def _line(file: str, key: str) -> str | None:
    try:
        for line in Path(file).read_text().splitlines():
            if line.split(":")[0].strip() == key:
                return line.split(":", 1)[1].strip()
    except OSError:
        return None
    return None
