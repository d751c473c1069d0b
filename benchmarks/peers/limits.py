"""What the machine can do at most: reading memory, float32 and bfloat16 matrix products.

Run with the interpreter that has torch: python benchmarks/peers/limits.py THREADS. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from staticlm.benchmark.machine import read_bandwidth


def best(call: Callable[[], object], passes: int) -> float:
    """Seconds of the fastest pass."""
    call()
    spent = []
    for _ in range(passes):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return min(spent)


def main() -> None:
    """Bandwidth in GB/s, products in GFLOP/s."""
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    # More than any cache holds, read once, as decode reads every weight once.
    found = {"read_gigabytes": read_bandwidth(threads)}
    # Without units for it a bfloat16 product takes forever: a small one shows as much.
    for name, dtype, size in (("float32", torch.float32, 1536), ("bfloat16", torch.bfloat16, 384)):
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        seconds = best(lambda left=left, right=right: torch.mm(left, right), 5)
        found[f"{name}_gigaflops"] = 2 * size**3 / seconds / 1e9
    print(json.dumps(found))


if __name__ == "__main__":
    main()
