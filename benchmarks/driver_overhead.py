"""What a step costs beyond ExecuTorch's own execute, with 60 caches of 1 MiB bound.

Run: python benchmarks/driver_overhead.py [steps]

The program writes one row into each of 60 caches and does nothing else, so that a copied cache or a
rebound tensor shows. `extra` is the median of a whole step (write the inputs, execute, look at the
output) minus the median of the bare call into ExecuTorch, both thread CPU time and both measured
alternately in one run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from staticlm.errors import RunnerError
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import allocate
from staticlm.runtime.driver import BoundMethod
from staticlm.runtime.drivers import get_driver

LIMITS = {"native": 30.0, "stock": 150.0}
"""Microseconds that a driver may add to a step."""


def bare(driver: str, method: BoundMethod) -> Callable[[], None]:
    """The call into ExecuTorch that `execute` of a driver ends in."""
    if driver == "native":
        return method._native.execute  # type: ignore[attr-defined,no-any-return]
    return method._runner._method.execute  # type: ignore[attr-defined,no-any-return]


def microseconds(call: Callable[[], object]) -> float:
    """Thread CPU time of one call."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1000


def measure(name: str, path: Path, steps: int) -> tuple[float, float, float, float]:
    """Medians in microseconds: whole step, execute, bare execute, the difference."""
    driver = get_driver(name)
    driver.set_threads(1)
    chain = get_chain()
    program = driver.load(path)
    method = program.load_method("decode", chain)
    buffers = [allocate(chain, facts.nbytes) for facts in method.facts.inputs if facts]
    for index, buffer in enumerate(buffers):
        method.bind_input(index, buffer)
    x, position = buffers[0].view("float32", (512,)), buffers[1].view("int64", (1,))
    row = buffers[-1].view("float32", (512, 512))

    def step() -> None:
        x[:] = 1.0
        position[0] = (int(position[0]) + 1) % 512
        method.execute()
        method.output(0)

    step()
    assert row[1, 0] == 1.0, "the cache was not written in place"
    rounds = [
        (microseconds(step), microseconds(method.execute), microseconds(bare(name, method)))
        for _ in range(steps)
    ]
    whole, execute, inner = (median(column) for column in zip(*rounds, strict=True))
    program.close()
    return whole, execute, inner, whole - inner


def main() -> int:
    """Print one line for each driver; 1 when one is above its limit."""
    from tests.support.driver_programs import WRITERS

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    failed = False
    print(f"60 caches of 1 MiB, {steps} steps, medians of thread CPU time in microseconds")
    print(f"{'driver':8} {'step':>9} {'execute':>9} {'bare':>9} {'extra':>9} {'limit':>9}")
    with tempfile.TemporaryDirectory() as directory:
        path = WRITERS["many"](Path(directory) / "many.pte")
        for name, limit in LIMITS.items():
            try:
                whole, execute, inner, extra = measure(name, path, steps)
            except RunnerError as error:
                print(f"{name:8} {error}")
                continue
            failed |= extra > limit
            print(f"{name:8} {whole:9.1f} {execute:9.1f} {inner:9.1f} {extra:9.1f} {limit:9.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
